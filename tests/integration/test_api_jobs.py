"""Single jobs over HTTP: submit, long poll, page, cancel, every refusal."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, steady  # noqa: F401 - two are fixtures

from service.core.model import CohortState, LineErrorCode, Outcome
from service.store import results
from service.store.tables import cohort, job, job_result, tenant
from service.tokenizing import Tokenizing

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "one\0two"}], "max_tokens": 5}


def submit(api: Api, **fields: Any) -> dict[str, Any]:
    answer = api.http.post("/v1/jobs", json={"endpoint": CHAT, "body": BODY, **fields})
    assert answer.status_code == 202, answer.text
    made: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{made['id']}"
    return made


def look(api: Api, job_id: str, **params: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.http.get(f"/v1/jobs/{job_id}", params=params).raise_for_status().json()
    return found


def place(api: Api, job_id: str, state: CohortState) -> None:
    """The job in a cohort of that state, as dispatcher and worker would have put it."""
    with api.database.transaction() as conn:
        values = {"model": "tiny", "queue": "instance.one", "sequence": 1, "n_jobs": 1, "priority": 3}
        cohort_id = conn.execute(
            sa.insert(cohort).values(**values, state=state, attempt=1, started_at=sa.func.now()).returning(cohort.c.id)
        ).scalar_one()
        conn.execute(sa.update(job).where(job.c.public_id == job_id).values(cohort_id=cohort_id))


def answer(api: Api, job_id: str, *, status_code: int = 200, response: bytes = b'{"choices": []}') -> None:
    """A result, announced as the worker's transaction announces it."""
    with api.database.transaction() as conn:
        row = conn.execute(sa.select(job.c.id).where(job.c.public_id == job_id)).one()
        conn.execute(
            sa.insert(job_result).values(
                job_id=row.id,
                outcome=Outcome.SUCCEEDED if status_code == 200 else Outcome.FAILED,
                status_code=status_code,
                response=response,
                prompt_tokens=20,
                cached_tokens=16,
                predicted_cached_tokens=18,
                completion_tokens=3,
                attempt=1,
                started_at=sa.func.now(),
                miss_cause="evicted",
            )
        )
        conn.execute(sa.select(sa.func.pg_notify("job", f"job_other,{job_id}")))


def test_a_job_from_submit_to_answer(api: Api) -> None:
    made = submit(api, metadata={"user": "7"}, deadline_seconds=3600)
    assert made == {
        "id": made["id"],
        "object": "job",
        "status": "queued",
        "endpoint": CHAT,
        "model": "tiny",
        "priority": "interactive",
        "created_at": made["created_at"],
        "started_at": None,
        "finished_at": None,
        "attempts": 0,
        "instance": None,
        "usage": None,
        "cache": {"predicted_cached_tokens": None, "cached_tokens": None, "miss_cause": None},
        "response": None,
        "error": None,
        "metadata": {"user": "7"},
    }
    assert abs(made["created_at"] - time.time()) < 60
    place(api, made["id"], CohortState.RUNNING)
    running = look(api, made["id"])
    assert (running["status"], running["attempts"], running["started_at"] is None) == ("running", 1, False)
    answer(api, made["id"], response=b'{"choices": [], "n": NaN, "half": "\\ud800"}')
    ended = look(api, made["id"])
    assert (ended["status"], ended["finished_at"] is None, ended["error"]) == ("succeeded", False, None)
    assert ended["response"]["status_code"] == 200
    assert ended["response"]["body"] == {"choices": [], "n": None, "half": "\ud800"}
    assert ended["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert ended["cache"] == {"predicted_cached_tokens": 18, "cached_tokens": 16, "miss_cause": "evicted"}


def test_what_is_stored_is_keyed_and_stripped(api: Api) -> None:
    body = {**BODY, "model": "small", "cache_salt": "mine", "stream": False, "priority": -5}
    made = submit(api, body=body, priority="low", webhook_url="https://example.com/hook")
    with api.database.transaction() as conn:
        row = conn.execute(sa.select(job).where(job.c.public_id == made["id"])).one()
        salt = conn.execute(sa.select(tenant.c.salt)).scalar_one()
    kept = {**BODY, "model": "small"}
    assert json.loads(row.body) == kept
    assert (row.model, row.priority, row.batch_id, row.webhook_url) == ("tiny", 0, None, "https://example.com/hook")
    expected = Tokenizing(api.desk().work.models).key("small", CHAT, kept, salt=salt)
    assert (row.prefix_key, row.prompt_tokens) == (expected.prefix_key, expected.prompt_tokens)
    assert row.predicted_output_tokens == 5


def test_a_refusal_of_the_engine_is_in_the_envelope(api: Api) -> None:
    made = submit(api)
    answer(api, made["id"], status_code=422, response=b'{"detail": "too long"}')
    ended = look(api, made["id"])
    assert (ended["status"], ended["error"]) == ("failed", None)
    error = ended["response"]["body"]["error"]
    assert (error["message"], error["type"]) == ("too long", "invalid_request_error")


def test_a_long_poll_is_woken_by_the_answer(api: Api) -> None:
    made = submit(api)
    with ThreadPoolExecutor(4) as pool:
        polls = [pool.submit(look, api, made["id"], wait=60) for _ in range(3)]
        started = time.monotonic()
        answer(api, made["id"])
        assert [poll.result()["status"] for poll in polls] == ["succeeded"] * 3
        assert time.monotonic() - started < 30
    assert look(api, made["id"], wait=60)["status"] == "succeeded"  # at once


def test_a_long_poll_finds_an_answer_that_nobody_announced(api: Api) -> None:
    made = submit(api)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(look, api, made["id"], wait=60)
        with api.database.transaction() as conn:
            row = conn.execute(sa.select(job.c.id)).one()
            conn.execute(
                sa.insert(job_result).values(job_id=row.id, outcome="succeeded", status_code=200, response=b"{}")
            )
        started = time.monotonic()
        assert poll.result()["status"] == "succeeded"
        assert time.monotonic() - started < 30


def test_a_long_poll_ends_with_the_job_as_it_is(api: Api) -> None:
    started = time.monotonic()
    assert look(api, submit(api)["id"], wait=1)["status"] == "queued"
    assert time.monotonic() - started >= 1


def test_a_submit_wakes_the_lane_of_single_jobs(api: Api) -> None:
    heard: list[str] = []
    listening = threading.Event()

    def listen() -> None:
        raw = api.database.engine.raw_connection()
        conn = raw.driver_connection
        assert conn is not None
        conn.autocommit = True
        conn.execute("listen single")
        listening.set()
        heard.extend(notice.channel for notice in conn.notifies(timeout=30, stop_after=1))
        raw.invalidate()

    thread = threading.Thread(target=listen)
    thread.start()
    assert listening.wait(30)
    submit(api)
    thread.join()
    assert heard == ["single"]


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"endpoint": None}, 400, "missing_required_parameter", "endpoint"),
        ({"body": None}, 400, "missing_required_parameter", "body"),
        ({"endpoint": 1}, 400, "invalid_type", "endpoint"),
        ({"endpoint": "/v1/responses"}, 400, "invalid_value", "endpoint"),
        ({"endpoint": "/v1/embeddings"}, 400, "missing_required_parameter", "body.input"),
        ({"endpoint": "/v1/embeddings", "body": {"model": "tiny", "input": "a"}}, 404, "model_not_found", "body.model"),
        ({"body": "text"}, 400, "invalid_type", "body"),
        ({"body": {"messages": []}}, 400, "missing_required_parameter", "body.model"),
        ({"body": {"model": "tiny"}}, 400, "missing_required_parameter", "body.messages"),
        ({"body": {"model": "tiny", "messages": "hi"}}, 400, "invalid_type", "body.messages"),
        ({"body": {**BODY, "model": "unknown\0"}}, 404, "model_not_found", "body.model"),
        ({"body": {**BODY, "stream": True}}, 400, "streaming_unsupported", "body.stream"),
        ({"body": {**BODY, "stream": "no"}}, 400, "invalid_type", "body.stream"),
        ({"priority": "urgent"}, 400, "invalid_value", "priority"),
        ({"priority": 3}, 400, "invalid_value", "priority"),
        ({"deadline_seconds": "5"}, 400, "invalid_type", "deadline_seconds"),
        ({"deadline_seconds": 0}, 400, "invalid_value", "deadline_seconds"),
        ({"deadline_seconds": 1e12}, 400, "invalid_value", "deadline_seconds"),
        ({"metadata": {"a": 1}}, 400, "invalid_type", "metadata"),
        ({"webhook_url": "ftp://example.com"}, 400, "invalid_value", "webhook_url"),
        ({"webhook_url": "http://["}, 400, "invalid_value", "webhook_url"),
    ],
)
def test_submit_errors(steady: Api, changes: dict[str, Any], status: int, code: str, param: str) -> None:
    before = steady.http.get("/v1/jobs").json()
    fields = {"endpoint": CHAT, "body": BODY, **changes}
    check_refused(steady.http.post("/v1/jobs", json=fields), status, code, param)
    assert steady.http.get("/v1/jobs").json() == before


def test_a_body_over_the_limit(steady: Api) -> None:
    large = json.dumps({"endpoint": CHAT, "body": {**BODY, "user": "x" * 9_000_000}})
    check_refused(steady.http.post("/v1/jobs", content=large), 413, "request_too_large")


@pytest.mark.parametrize("wait", ["61", "-1", "x", "1.5", ""])
def test_wait_errors(steady: Api, wait: str) -> None:
    made = submit(steady)
    check_refused(steady.http.get(f"/v1/jobs/{made['id']}?wait={wait}"), 400, "invalid_value", "wait")


@pytest.mark.parametrize("job_id", ["job_1", "job_" + "0" * 32, "batch_" + "0" * 32, "job_%00"])
def test_unknown_jobs_are_404_on_every_call(steady: Api, job_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "?wait=30"), ("POST", "/cancel")):
        check_refused(steady.http.request(method, f"/v1/jobs/{job_id}{path}"), 404, "not_found", "job_id")


def test_repeats(api: Api) -> None:
    fields = {"endpoint": CHAT, "body": BODY}
    headers = {"idempotency-key": "k"}
    first = api.http.post("/v1/jobs", json=fields, headers=headers)
    again = api.http.post("/v1/jobs", json=fields, headers=headers)
    assert (again.status_code, again.json()) == (202, first.json())
    other = {**fields, "priority": "low"}
    check_refused(
        api.http.post("/v1/jobs", json=other, headers=headers), 409, "idempotency_conflict", "Idempotency-Key"
    )
    check_refused(
        api.http.post("/v1/batches", json=api.create_body(), headers=headers),
        409,
        "idempotency_conflict",
        "Idempotency-Key",
    )
    assert submit(api)["id"] != first.json()["id"]


def test_pages(api: Api) -> None:
    ids = [submit(api)["id"] for _ in range(3)][::-1]
    page = api.http.get("/v1/jobs", params={"limit": 2}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[:2], True)
    rest = api.http.get("/v1/jobs", params={"limit": 2, "after": page["last_id"]}).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[2:], False)
    check_refused(api.http.get("/v1/jobs?limit=101"), 400, "invalid_value", "limit")
    check_refused(api.http.get("/v1/jobs?after=batch_1"), 400, "invalid_value", "after")


@pytest.mark.parametrize("state", [None, CohortState.READY, CohortState.DISPATCHED, CohortState.RUNNING])
def test_cancel(api: Api, state: CohortState | None) -> None:
    made = submit(api)
    if state is not None:
        place(api, made["id"], state)
    cancelled = api.http.post(f"/v1/jobs/{made['id']}/cancel")
    on_engine = state in (CohortState.DISPATCHED, CohortState.RUNNING)
    if on_engine:  # its worker aborts it
        assert cancelled.json()["status"] in ("queued", "running")
        with api.database.transaction() as conn:
            row = conn.execute(sa.select(job.c.id, job.c.cancel_requested_at)).one()
            assert row.cancel_requested_at is not None
            assert results.end_single(conn, row.id, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED)
    ended = look(api, made["id"], wait=60)
    assert (ended["status"], ended["error"]["code"]) == ("cancelled", "job_cancelled")
    check_refused(api.http.post(f"/v1/jobs/{made['id']}/cancel"), 409, "job_not_cancellable", "job_id")
