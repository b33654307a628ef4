"""CONTRACT section 3's table of validation errors, row by row, three ways: `?validate=true`, the SDK's `errors.data` of
a failed batch, and the error file of a batch that skips."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest
from api_fixtures import Api, api, check_refused, serve_api, steady  # noqa: F401 - two are fixtures
from control_fixtures import jsonl, request
from openai.types import Batch
from plant import Plant, check_accounting, plant, standing  # noqa: F401 - two are fixtures

from service.settings import Settings
from service.store.session import Database

pytestmark = pytest.mark.embedded_only

GOOD = json.dumps(request("good")).encode()


def line(name: str, **changes: Any) -> bytes:
    """A good line with some of its fields replaced, or taken away (`...`)."""
    fields = {key: value for key, value in {**request(name), **changes}.items() if value is not ...}
    return json.dumps(fields).encode()


def body(custom_id: str, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **changes}
    return line(custom_id, body={key: value for key, value in fields.items() if value is not ...})


# (line, code, param): every row of the table that concerns one line, each cause in it.
ROWS: list[tuple[bytes, str, str | None]] = [
    (b"{not json", "invalid_json_line", None),
    (GOOD.replace(b"hello", b"\xff\xfe"), "invalid_json_line", None),
    *((GOOD.replace(b"5}", number + b"}"), "invalid_json_line", None) for number in (b"NaN", b"-Infinity", b"1e400")),
    (GOOD.replace(b"5}", b"[" * 101 + b"]" * 101 + b"}"), "invalid_json_line", None),
    (GOOD.replace(b"5}", b"[" * 50_000 + b"]" * 50_000 + b"}"), "invalid_json_line", None),
    (GOOD.replace(b"5}", b"9" * 5_000 + b"}"), "invalid_json_line", None),
    (GOOD + b" {}", "invalid_json_line", None),
    (b"\xef\xbb\xbf" + GOOD, "invalid_json_line", None),  # a mark that is not at the start of the file
    *((text, "invalid_request", None) for text in (b"[]", b"null", b"1", b'"x"')),
    (line("t1", method=5), "invalid_request", "method"),
    (line("t2", url=["x"]), "invalid_request", "url"),
    (line("t3", custom_id=7), "invalid_request", "custom_id"),
    (line("t4", body="{}"), "invalid_request", "body"),
    (body("t5", model=1), "invalid_request", "body.model"),
    (body("t6", messages="hi"), "invalid_request", "body.messages"),
    (body("t7", messages=["hi"]), "invalid_request", "body.messages"),
    (body("t8", stream="yes"), "invalid_request", "body.stream"),
    (body("s1", user="\ud800"), "invalid_request", "body.user"),
    (line("\udfff"), "invalid_request", "custom_id"),
    (GOOD.replace(b'"url"', b'"method": "POST", "url"'), "invalid_request", "method"),
    (GOOD.replace(b'"model"', b'"model": "a", "model"'), "invalid_request", "body.model"),
    (b"{}", "missing_required_parameter", "custom_id"),
    *(
        (line("m1", **{name: ...}), "missing_required_parameter", name)
        for name in ("custom_id", "method", "url", "body")
    ),
    *((line("m2", **{name: None}), "missing_required_parameter", name) for name in ("custom_id", "method", "url")),
    (body("m3", model=...), "missing_required_parameter", "body.model"),
    (body("m4", messages=...), "missing_required_parameter", "body.messages"),
    *((line(name), "invalid_custom_id", "custom_id") for name in ("", "x" * 257, "a\tb", "a\0b", "a\x85b")),
    (line("known"), "", None),  # the one good line
    (line("known"), "duplicate_custom_id", "custom_id"),
    *((line(f"v{n}", method=name), "invalid_method", "method") for n, name in enumerate(("GET", "", "POST "))),
    *(
        (line(f"u{n}", url=url), "invalid_url", "url")
        for n, url in enumerate(("/v1/embeddings", "/v1/chat/completions/", "/V1/chat/completions", ""))
    ),
    (body("f1", stream=True), "streaming_unsupported", "body.stream"),
    *((body(f"n{n}", model=name), "model_not_found", "body.model") for n, name in enumerate(("absent", "", "Tiny"))),
]
DATA = b"\n".join(row[0] for row in ROWS) + b"\n"
EXPECTED = [(code, number, param) for number, (_, code, param) in enumerate(ROWS, 1) if code]


def validated(api: Api, data: bytes, **query: str) -> dict[str, Any]:
    answer = upload(api, data, **(query or {"validate": "true"}))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def upload(api: Api, data: bytes, **query: str) -> httpx.Response:
    return api.http.post(
        "/v1/files", params=query, data={"purpose": "batch"}, files={"file": ("in.jsonl", data, "text/plain")}
    )


def listed(errors: list[dict[str, Any]]) -> list[tuple[str, int | None, str | None]]:
    assert all(set(error) == {"code", "line", "message", "param"} and error["message"] for error in errors)
    return [(error["code"], error["line"], error["param"]) for error in errors]


def test_validate_reports_every_row_of_the_table(steady: Api) -> None:
    found = validated(steady, DATA)
    report = found["validation"]
    assert listed(report["errors"]) == EXPECTED
    assert (report["lines"], report["valid"]) == (len(ROWS), 1)
    (repeated,) = [error for error in report["errors"] if error["code"] == "duplicate_custom_id"]
    assert repeated["message"] == f"custom_id 'known' is already used on line {repeated['line'] - 1}."
    plain = steady.http.get(f"/v1/files/{found['id']}").json()
    assert plain == {key: value for key, value in found.items() if key != "validation"}


def test_a_failed_batch_shows_every_row_of_the_table_to_the_sdk(plant: Plant) -> None:
    batch = plant.run(DATA)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert [(error.code, error.line, error.param) for error in batch.errors.data or []] == EXPECTED
    assert all(error.message for error in batch.errors.data or [])


def test_a_batch_that_skips_has_every_row_of_the_table_in_its_error_file(plant: Plant) -> None:
    batch = plant.run(DATA, queue={"on_invalid_line": "skip"})
    assert (batch.status, batch.errors) == ("completed", None)
    good, bad = check_accounting(plant, batch, len(ROWS))
    assert [line["custom_id"] for line in good] == ["known"]
    assert {line["error"]["code"] for line in bad} == {"skipped_invalid_line"}
    assert [line["error"]["message"].partition(":")[0] for line in bad] == [code for code, _, _ in EXPECTED]
    names = {line["custom_id"] for line in bad}
    assert {None, "t1", "known", ""} <= names
    assert batch.model_extra is not None
    assert batch.model_extra["queue"]["skipped"] == len(EXPECTED)


async def test_the_async_sdk_uploads_and_validates(steady: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{steady.url}/v1", api_key="none") as sdk:
        made = await sdk.files.create(
            file=("in.jsonl", GOOD + b"\n[]"), purpose="batch", extra_query={"validate": "true"}
        )
        assert made.model_extra is not None
        assert listed(made.model_extra["validation"]["errors"]) == [("invalid_request", 2, None)]
        assert (await sdk.files.content(made.id)).content == GOOD + b"\n[]"
        batch = await sdk.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert (await sdk.batches.retrieve(batch.id)).status == "validating"
        assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
        assert batch.id in [item.id async for item in sdk.batches.list(limit=1)]
        with pytest.raises(openai.ConflictError):
            await sdk.files.delete(made.id)


def test_a_good_file_has_no_errors_and_can_be_run(steady: Api) -> None:
    found = validated(steady, b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + line("b"))
    assert found["validation"] == {"lines": 2, "valid": 2, "errors": []}
    assert steady.create(found["id"])["status"] == "validating"


@pytest.mark.parametrize("data", [b"\n \t\r\n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_an_empty_batch(steady: Api, data: bytes) -> None:
    report = validated(steady, data)["validation"]
    assert (report["lines"], report["valid"]) == (0, 0)
    assert listed(report["errors"]) == [("empty_batch", None, None)]


def test_the_endpoint_is_that_of_the_first_line_with_one(steady: Api) -> None:
    completion = {"model": "tiny", "prompt": "hi"}
    rows = [b"{", *(line(f"c{n}", url="/v1/completions", body=completion) for n in range(2)), line("chat")]
    report = validated(steady, b"\n".join(rows))["validation"]
    assert listed(report["errors"]) == [("invalid_json_line", 1, None), ("invalid_url", 4, "url")]
    embedding = line("e", url="/v1/embeddings", body={"model": "tiny", "input": "hi"})
    assert listed(validated(steady, embedding)["validation"]["errors"]) == [("model_not_found", 1, "body.model")]


def test_all_errors_are_reported_where_a_batch_shows_a_hundred(steady: Api) -> None:
    report = validated(steady, b"{\n" * 20_000)["validation"]
    assert (report["lines"], report["valid"], len(report["errors"])) == (20_000, 0, 20_000)
    assert report["errors"][-1]["line"] == 20_000


def test_lines_beyond_the_limit_end_the_validation(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, max_lines=2) as api:
        report = validated(api, jsonl(request(f"c{n}") for n in range(9)))["validation"]
        assert listed(report["errors"]) == [("too_many_tasks", 3, None)]
        assert (report["lines"], report["valid"]) == (2, 2)


def test_too_long_a_line_is_reported(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, max_line_bytes=500) as api:
        report = validated(api, line("a") + b"\n" + body("b", user="x" * 500) + b"\n")["validation"]
        assert listed(report["errors"]) == [("line_too_long", 2, None)]


def test_what_is_refused_is_refused_with_validate_too(steady: Api) -> None:
    before = steady.http.get("/v1/files").json()
    check_refused(upload(steady, GOOD, validate="maybe"), 400, "invalid_value", "validate")
    check_refused(upload(steady, b"", validate="true"), 400, "empty_file", "file")
    assert steady.http.get("/v1/files").json() == before
    assert "validation" not in validated(steady, GOOD, validate="false")


def test_strict_batches_refuse_a_second_model(plant: Plant) -> None:
    rows = [line("a"), body("alias", model="small"), body("b", model="other")]
    batch = plant.run(b"\n".join(rows), queue={"model_policy": "strict"})
    assert batch.errors is not None
    assert [(error.code, error.line, error.param) for error in batch.errors.data or []] == [
        ("model_mismatch", 3, "body.model")
    ]


def errors_of(batch: Batch) -> list[tuple[str | None, int | None, str | None]]:
    assert batch.status == "failed"
    assert batch.errors is not None
    return [(error.code, error.line, error.param) for error in batch.errors.data or []]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_errors_of_the_file_as_the_sdk_sees_them(plant: Plant, policy: str) -> None:
    queue = {"on_invalid_line": policy}
    assert errors_of(plant.run(b"\n \n", queue=queue)) == [("empty_batch", None, None)]
    work = plant.work
    try:
        plant.work = dataclasses.replace(work, settings=dataclasses.replace(work.settings, max_lines=3))
        failed = plant.run(jsonl(request(f"c{n}") for n in range(5)), queue=queue)
    finally:
        plant.work = work
    assert errors_of(failed) == [("too_many_tasks", 4, None)]
    assert failed.request_counts is not None
    assert (failed.request_counts.total, failed.output_file_id, failed.error_file_id) == (0, None, None)


def test_after_a_hundred_errors_comes_one_that_says_so(plant: Plant) -> None:
    found = errors_of(plant.run(b"\n".join([b"{"] * 130)))
    assert found == [
        *(("invalid_json_line", number, None) for number in range(1, 101)),
        ("too_many_errors", None, None),
    ]
    assert len(errors_of(plant.run(b"{\n" * 100))) == 100
