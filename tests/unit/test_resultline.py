"""service.core.resultline: the shapes of CONTRACT.md's result lines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.model import LineErrorCode
from service.core.resultline import answer_line, error_envelope, skipped_line, unanswered_line


def answer(body: bytes, status_code: int = 200, custom_id: str = "c") -> bytes:
    return answer_line(
        line_id="batch_req_1", custom_id=custom_id, status_code=status_code, request_id="req_1", body=body
    )


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"])))
def test_lines_are_ascii_and_round_trip(custom_id: str, content: str) -> None:
    line = answer(json.dumps({"x": content}, ensure_ascii=False, indent=1).encode(), custom_id=custom_id)
    assert line.isascii()
    assert line.index(b"\n") == len(line) - 1
    assert json.loads(line) == {
        "id": "batch_req_1",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": "req_1", "body": {"x": content}},
        "error": None,
    }


def test_numbers_that_are_no_json_become_null() -> None:
    line = answer(b'{"a":NaN,"b":-Infinity,"c":1e999,"d":0.1}')
    assert json.loads(line)["response"]["body"] == {"a": None, "b": None, "c": None, "d": 0.1}


@pytest.mark.parametrize(
    ("body", "message", "param", "code"),
    [
        (b'{"error":{"message":"bad","type":"BadRequestError","param":"n","code":400}}', "bad", "n", None),
        (b'{"object":"error","message":"bad","type":"x","param":null,"code":"y"}', "bad", None, "y"),
        (b'{"error":"bad"}', "bad", None, None),
        (b'{"detail":"bad"}', "bad", None, None),
        (b'{"detail":[{"loc":["body"],"msg":"bad"},{"msg":"worse"}]}', "bad; worse", None, None),
        (b"<html>", "The engine answered with status 400.", None, None),
        (b"[1]", "The engine answered with status 400.", None, None),
        (b'{"error":[1]}', "The engine answered with status 400.", None, None),
    ],
)
def test_errors_come_out_in_the_envelope(body: bytes, message: str, param: str | None, code: str | None) -> None:
    inner = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert error_envelope(400, body) == {"error": inner}
    assert json.loads(answer(body, 400))["response"]["body"] == {"error": inner}


@pytest.mark.parametrize(
    ("status_code", "kind"),
    [(401, "authentication_error"), (403, "permission_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_the_type_follows_the_status(status_code: int, kind: str) -> None:
    assert error_envelope(status_code, b"")["error"]["type"] == kind


def test_lines_that_were_never_answered() -> None:
    line = unanswered_line(line_id="i", custom_id="c", code=LineErrorCode.BATCH_EXPIRED, message="late")
    error = {"code": "batch_expired", "message": "late"}
    assert json.loads(line) == {"id": "i", "custom_id": "c", "response": None, "error": error}
    skipped = json.loads(skipped_line(line_id="i", custom_id=None, code="invalid_url", message="no"))
    assert skipped["error"] == {"code": "skipped_invalid_line", "message": "invalid_url: no"}
    assert skipped["custom_id"] is None
