"""trunkline._requests, _retry and errors: what is sent, what is sent again, and which error a refusal becomes."""

from __future__ import annotations

import io
import json

import pytest

from trunkline import _requests as requests
from trunkline._requests import Reply, error_of
from trunkline._retry import Unreachable, retry_delay_seconds
from trunkline.errors import (
    APIError,
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDenied,
    QuotaError,
    ServerError,
    UnreadableReply,
)

BATCH = {
    "id": "batch_1",
    "object": "batch",
    "status": "in_progress",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "created_at": 1,
}


def reply(status: int = 200, body: object = None, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()}, body=raw)


def envelope(**fields: object) -> dict[str, object]:
    return {"error": {"message": "no", "type": "t", "param": None, "code": None, **fields}}


def test_every_create_carries_its_key() -> None:
    batch = requests.create_batch(
        input_file_id="f", endpoint="/e", completion_window="24h", metadata=None, queue=None, idempotency_key="k"
    )
    job = requests.create_job(
        endpoint="/e",
        body={},
        priority=None,
        deadline_seconds=None,
        metadata=None,
        webhook_url=None,
        idempotency_key="k",
    )
    assert batch.headers == job.headers == {"idempotency-key": "k"}
    assert batch.json == {"input_file_id": "f", "endpoint": "/e", "completion_window": "24h"}
    assert job.json == {"endpoint": "/e", "body": {}}


def test_an_id_cannot_leave_its_segment() -> None:
    assert requests.get_batch("../files?x=1").path == "/batches/..%2Ffiles%3Fx%3D1"


def test_an_upload_says_its_purpose_and_expiry() -> None:
    upload = requests.upload_file(io.BytesIO(b"{}"), "a.jsonl", 3600).upload
    assert upload is not None
    assert upload.fields == {
        "purpose": "batch",
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "3600",
    }


def test_unknown_fields_are_kept_and_given_back() -> None:
    sent = {**BATCH, "new_field": {"a": 1}, "queue": {"priority": "low", "shiny": True}}
    batch = requests.get_batch("batch_1").read(reply(body=sent))
    assert batch.queue.priority == "low"
    assert batch.as_dict() == sent


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"id": 1}', b"", b"\xff", b"[" * 5000])
def test_what_is_no_object_of_the_contract_is_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableReply):
        requests.get_batch("batch_1").read(reply(body=body))


def test_half_a_surrogate_pair_in_an_answer_is_read() -> None:
    body = b'{"id":"job_1","status":"succeeded","endpoint":"/e","created_at":1,"response":{"status_code":200,'
    body += b'"body":{"choices":[{"text":"\\ud83d"}]}}}'
    assert requests.get_job("job_1").read(reply(body=body)).text == "\ud83d"


def test_a_range_ends_where_the_file_does() -> None:
    call = requests.read_file("file-1", 4, 4)
    assert call.headers["range"] == "bytes=4-7"
    part = call.read(reply(206, b"efgh", content_range="bytes 4-7/10"))
    assert (part.data, part.is_last) == (b"efgh", False)
    assert call.read(reply(206, b"ef", content_range="bytes 4-5/6")).is_last
    whole = call.read(reply(200, b"abcdef"))
    assert (whole.data, whole.is_last) == (b"ef", True)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (401, AuthenticationError),
        (403, PermissionDenied),
        (404, NotFoundError),
        (405, InvalidRequestError),
        (408, ServerError),
        (409, ConflictError),
        (413, InvalidRequestError),
        (429, QuotaError),
        (500, ServerError),
        (599, ServerError),
        (307, InvalidRequestError),
    ],
)
def test_the_class_follows_the_status(status: int, kind: type[APIError]) -> None:
    error = error_of(reply(status, envelope(code="c", param="p"), x_request_id="req_1"))
    assert type(error) is kind
    assert (error.code, error.param, error.request_id, error.status_code) == ("c", "p", "req_1", status)
    assert "no" in str(error)
    assert "req_1" in str(error)


def test_an_integer_code_becomes_text() -> None:
    assert error_of(reply(400, envelope(code=400))).code == "400"


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway", b"[]", b'{"error": "text"}', b'{"detail": "x"}'])
def test_an_answer_without_envelope_still_says_something(body: bytes) -> None:
    assert "HTTP 502" in str(error_of(reply(502, body)))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_with_growing_delays(status: int) -> None:
    delays = [retry_delay_seconds(reply(status), tried, 3, 0.0) for tried in (1, 2, 3, 4)]
    assert delays == [0.5, 1.0, 2.0, None]


@pytest.mark.parametrize("status", [300, 400, 401, 404, 409, 413])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    assert retry_delay_seconds(reply(status), 1, 3, 0.0) is None


def test_a_lost_connection_is_tried_again_up_to_the_longest_delay() -> None:
    assert retry_delay_seconds(Unreachable(cause="x"), 20, 30, 0.0) == 8.0
    assert retry_delay_seconds(Unreachable(cause="x"), 1, 3, 1.0) == 0.25


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({"x_should_retry": "false"}, None),
        ({"retry_after": "7"}, 7.0),
        ({"retry_after": "0"}, 0.5),
        ({"retry_after": "121"}, None),
        ({"retry_after": "soon"}, 0.5),
        ({"retry_after": "nan"}, 0.5),
        ({"retry_after": "7", "x_should_retry": "false"}, None),
    ],
)
def test_what_the_server_says_about_retries_counts(headers: dict[str, str], delay: float | None) -> None:
    assert retry_delay_seconds(reply(429, **headers), 1, 3, 0.0) == delay


def test_a_server_may_ask_for_a_retry_of_any_refusal() -> None:
    assert retry_delay_seconds(reply(409, x_should_retry="true"), 1, 3, 0.0) == 0.5
