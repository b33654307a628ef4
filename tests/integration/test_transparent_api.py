"""The transparent endpoint by itself: refusals, our own failures, quotas, tenants, the end of the process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api, steady  # noqa: F401 - fixtures
from worker_processes import wait_until

from service.core.model import LineErrorCode, Outcome
from service.settings import Settings
from service.store.session import Database
from service.store.tables import job, job_result

pytestmark = pytest.mark.embedded_only

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
GOOD = b'{"choices": []}'


@contextmanager
def calling(
    client: httpx.Client, path: str = CHAT, body: dict[str, Any] = BODY, **headers: str
) -> Iterator[Future[httpx.Response]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(client.post, path, json=body, headers=headers)


def open_job(api: Api) -> sa.Row[Any]:
    """The one job that has no result, once it is there."""
    no_result = ~sa.exists().where(job_result.c.job_id == job.c.id)
    found: list[sa.Row[Any]] = []

    def look() -> bool:
        with api.database.transaction() as conn:
            found[:] = conn.execute(sa.select(job).where(no_result)).all()
        return len(found) == 1

    wait_until(look, 20)
    return found[0]


def end(api: Api, outcome: Outcome = Outcome.SUCCEEDED, *, announce: bool = True, **values: Any) -> sa.Row[Any]:
    """The open job ends, as a worker's transaction ends it."""
    row = open_job(api)
    with api.database.transaction() as conn:
        conn.execute(sa.insert(job_result).values(job_id=row.id, outcome=outcome, **values))
        if announce:
            conn.execute(sa.select(sa.func.pg_notify("job", row.public_id)))
    return row


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, {"messages": []}, 400, "missing_required_parameter", "model"),
        (CHAT, {"model": "tiny"}, 400, "missing_required_parameter", "messages"),
        (CHAT, {"model": "tiny", "messages": None}, 400, "missing_required_parameter", "messages"),
        (CHAT, {"model": "tiny", "messages": "hi"}, 400, "invalid_type", "messages"),
        (CHAT, {"model": 3, "messages": []}, 400, "invalid_type", "model"),
        (CHAT, {**BODY, "model": "unknown\0"}, 404, "model_not_found", "model"),
        (CHAT, {**BODY, "stream": "yes"}, 400, "invalid_type", "stream"),
        (CHAT, {**BODY, "chat_template": "{{ x }}"}, 400, "invalid_type", "chat_template"),
        (CHAT, [BODY], 400, "invalid_type", None),
        (TEXT, {"model": "tiny"}, 400, "missing_required_parameter", "prompt"),
        (TEXT, {"model": "tiny", "prompt": {}}, 400, "invalid_type", "prompt"),
        (EMBED, {"model": "tiny"}, 400, "missing_required_parameter", "input"),
        (EMBED, {"model": "tiny", "input": "a"}, 404, "model_not_found", "model"),
        (EMBED, {"model": "tiny", "input": "a", "stream": True}, 400, "streaming_unsupported", "stream"),
    ],
)
def test_refusals_name_the_field(steady: Api, path: str, body: Any, status: int, code: str, param: str | None) -> None:
    check_refused(steady.http.post(path, json=body), status, code, param)
    assert steady.http.get("/v1/jobs").json()["data"] == []


def test_refusals_of_what_is_no_good_body(steady: Api) -> None:
    check_refused(steady.http.post(CHAT, content=b'{"model": '), 400, "invalid_json")
    check_refused(steady.http.post(CHAT, content=b'{"model": "a", "model": "b"}'), 400, "invalid_value", "model")
    large = json.dumps({**BODY, "user": "x" * 9_000_000})
    check_refused(steady.http.post(CHAT, content=large), 413, "request_too_large")
    check_refused(steady.http.get(CHAT), 405, "method_not_allowed")
    check_refused(steady.http.post(f"{CHAT}/", json=BODY), 404, "not_found")


@pytest.mark.parametrize(
    ("outcome", "code", "status", "said"),
    [
        (Outcome.FAILED, LineErrorCode.ENGINE_CRASH, 500, "engine_crash"),
        (Outcome.FAILED, LineErrorCode.WORKER_LOST, 502, "worker_lost"),
        (Outcome.FAILED, LineErrorCode.REQUEST_TIMEOUT, 504, "request_timeout"),
        (Outcome.EXPIRED, LineErrorCode.BATCH_EXPIRED, 504, "job_expired"),
        (Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED, 409, "job_cancelled"),
    ],
)
def test_our_own_failures_are_told_once(
    api: Api, outcome: Outcome, code: LineErrorCode, status: int, said: str
) -> None:
    """The SDK, which repeats each of these statuses by itself, asks once."""
    with api.sdk(max_retries=2) as sdk, ThreadPoolExecutor(1) as pool:
        call = pool.submit(sdk.chat.completions.create, **BODY)
        end(api, outcome, error_code=code.value)
        error = call.exception(timeout=20)
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (status, said)
    assert error.response.headers["x-should-retry"] == "false"
    assert len(api.http.get("/v1/jobs").json()["data"]) == 1


def test_an_answer_that_nobody_announced_is_found(api: Api) -> None:
    with calling(api.http) as call:
        end(api, announce=False, status_code=200, response=GOOD)
        assert call.result(20).content == GOOD


def test_a_call_waits_for_an_instance_as_any_job_does(api: Api) -> None:
    with calling(api.http) as call:
        row = open_job(api)
        seconds_left = (row.deadline_at - row.created_at).total_seconds()
        assert seconds_left == api.settings.answer_seconds
        end(api, status_code=200, response=GOOD)
        assert call.result(20).status_code == 200


def test_a_job_that_a_crash_of_the_database_took_back_is_asked_for_again(api: Api) -> None:
    with calling(api.http) as call:
        row = open_job(api)
        with api.database.transaction() as conn:
            conn.execute(sa.delete(job).where(job.c.id == row.id))
        answer = call.result(20)
    check_refused(answer, 503, "service_unavailable")
    assert answer.headers["retry-after"] == "1"


def test_the_end_of_the_process_leaves_the_job_to_a_repeat(
    settings: Settings, database: Database, broker_url: str
) -> None:
    first, again = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
    with ThreadPoolExecutor(1) as pool:
        with serve_api(settings, database, broker_url) as old:
            call = pool.submit(httpx.post, f"{old.url}{CHAT}", json=BODY, headers=first, timeout=60)
            row = open_job(old)
        answer = call.result(20)
    check_refused(answer, 503, "service_unavailable")
    assert answer.headers["retry-after"] == "1"
    with serve_api(settings, database, broker_url) as new, calling(new.http, **again) as repeat:
        wait_until(lambda: new.callers == 1, 20)
        assert end(new, status_code=200, response=GOOD).id == row.id
        assert repeat.result(20).content == GOOD


def test_a_tenant_that_has_as_much_queued_as_it_may(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, max_queued_lines=0) as full:
        answer = full.http.post(CHAT, json=BODY)
        check_refused(answer, 429, "queue_full")
        assert full.http.get("/v1/jobs").json()["data"] == []


def test_a_key_names_the_tenant_and_nobody_else_sees_its_job(api: Api) -> None:
    mine, other = (api.as_tenant(api.make_key(name)) for name in ("mine", "other"))
    check_refused(api.http.post(CHAT, json=BODY), 401, "invalid_api_key")
    headers = {"idempotency-key": "the same"}
    with calling(mine, **headers) as call:
        made = end(api, status_code=200, response=b'{"mine": 1}').public_id
        assert call.result(20).json() == {"mine": 1}
    for method, path in (("GET", ""), ("GET", "?wait=1"), ("POST", "/cancel")):
        check_refused(other.request(method, f"/v1/jobs/{made}{path}"), 404, "not_found", "job_id")
    assert other.get("/v1/jobs").json()["data"] == []
    with calling(other, **headers) as call:  # its own job, under the same key and body
        assert end(api, status_code=200, response=b'{"other": 1}').public_id != made
        assert call.result(20).json() == {"other": 1}


def test_a_submit_may_wait_for_the_end(api: Api) -> None:
    with calling(api.http, "/v1/jobs?wait=30", {"endpoint": CHAT, "body": BODY}) as call:
        row = end(api, status_code=200, response=GOOD)
        answer = call.result(20)
    assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/jobs/{row.public_id}")
    assert (answer.json()["status"], answer.json()["response"]["body"]) == ("succeeded", {"choices": []})
    unended = api.http.post("/v1/jobs?wait=1", json={"endpoint": CHAT, "body": BODY})
    assert (unended.status_code, unended.json()["status"]) == (202, "queued")
    check_refused(api.http.post("/v1/jobs?wait=61", json={}), 400, "invalid_value", "wait")
