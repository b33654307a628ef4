"""Clients that go away, and calls that repeat earlier ones, over a whole line."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, check_refused
from line_fixtures import Line, line, whole_line  # noqa: F401 - fixtures
from worker_processes import wait_until

from service.store.tables import job, job_result

CHAT = "/v1/chat/completions"
ABORT_SECONDS = 1.0  # from the hang-up to the engine's end of the connection
_numbers = itertools.count()


@pytest.fixture
def body() -> dict[str, Any]:
    """One that no other test sends: a repeat is told by its body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": f"hello {next(_numbers)}"}]}


@contextmanager
def calling(api: Api, body: dict[str, Any], **headers: str) -> Iterator[tuple[httpx.Client, Future[httpx.Response]]]:
    """A call under way; closing its client hangs up."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=api.url, timeout=60) as client:
        yield client, pool.submit(client.post, CHAT, json=body, headers=headers)


def outcomes(api: Api, body: dict[str, Any]) -> list[str | None]:
    """How each job of this body ended, in the order they were made."""
    rows = sa.select(job_result.c.outcome).select_from(job).outerjoin(job_result, job_result.c.job_id == job.c.id)
    with api.database.transaction() as conn:
        content = body["messages"][0]["content"].encode()
        return list(conn.execute(rows.where(job.c.body.contains(content)).order_by(job.c.id)).scalars())


def hang_up(client: httpx.Client) -> float:
    """Close the sockets under a call that another thread waits in."""
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]
        connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    return time.monotonic()


def test_a_client_that_goes_away_ends_its_job_and_the_engines_request(line: Line, body: dict[str, Any]) -> None:
    with line.engine.holding(), calling(line.api, body) as (client, call):
        assert line.engine.arrived.acquire(timeout=20)
        gone_at = hang_up(client)
        assert isinstance(call.exception(), httpx.TransportError)
        wait_until(lambda: bool(line.engine.aborted), 20)
        assert line.engine.aborted[0] - gone_at < ABORT_SECONDS
        wait_until(lambda: outcomes(line.api, body) == ["cancelled"], 20)


def test_a_client_that_goes_away_before_an_engine_has_its_job(line: Line, body: dict[str, Any]) -> None:
    body["model"] = "other"  # nobody serves it
    with calling(line.api, body) as (client, call):
        wait_until(lambda: outcomes(line.api, body) == [None], 20)
        hang_up(client)
        assert isinstance(call.exception(), httpx.TransportError)
        wait_until(lambda: outcomes(line.api, body) == ["cancelled"], 20)
    assert line.engine.asked == []


def test_a_cancelled_job_aborts_the_engines_request(line: Line, body: dict[str, Any]) -> None:
    with line.engine.holding(), calling(line.api, body) as (_, call):
        assert line.engine.arrived.acquire(timeout=20)
        (made,) = line.api.http.get("/v1/jobs?limit=1").json()["data"]
        asked_at = time.monotonic()
        assert line.api.http.post(f"/v1/jobs/{made['id']}/cancel").status_code == 200
        check_refused(call.result(20), 409, "job_cancelled")
        wait_until(lambda: bool(line.engine.aborted), 20)
        assert line.engine.aborted[0] - asked_at < ABORT_SECONDS


def test_the_sdks_repeat_of_a_call_whose_answer_was_lost_waits_for_the_same_job(
    line: Line, body: dict[str, Any]
) -> None:
    """As where a proxy between the two broke: the first call is still there for all that the server can tell."""
    line.engine.reply = (200, b'{"choices": [7]}')
    with line.engine.holding(), calling(line.api, body, **{"x-stainless-retry-count": "0"}) as (_, first):
        assert line.engine.arrived.acquire(timeout=20)
        with calling(line.api, body, **{"x-stainless-retry-count": "1"}) as (_, again):
            wait_until(lambda: line.api.callers == 2, 20)
            line.engine.let_go.set()
            assert again.result().content == first.result().content == b'{"choices": [7]}'
    repeated = line.api.http.post(CHAT, json=body, headers={"x-stainless-retry-count": "2"})  # ended by now
    assert repeated.content == b'{"choices": [7]}'
    assert len(line.engine.asked) == 1


def test_two_calls_alike_that_are_no_repeats_are_two_jobs(line: Line, body: dict[str, Any]) -> None:
    for _ in range(2):
        assert line.api.http.post(CHAT, json=body, headers={"x-stainless-retry-count": "0"}).status_code == 200
    assert len(line.engine.asked) == 2


def test_the_first_of_two_callers_goes_away_and_the_other_gets_the_answer(line: Line, body: dict[str, Any]) -> None:
    line.engine.reply = (200, b'{"choices": [8]}')
    headers = {"idempotency-key": body["messages"][0]["content"]}
    with line.engine.holding(), calling(line.api, body, **headers) as (client, first):
        assert line.engine.arrived.acquire(timeout=20)
        with calling(line.api, body, **headers) as (_, again):
            wait_until(lambda: line.api.callers == 2, 20)
            hang_up(client)
            assert isinstance(first.exception(), httpx.TransportError)
            wait_until(lambda: line.api.callers == 1, 20)
            line.engine.let_go.set()
            assert again.result().content == b'{"choices": [8]}'
    assert outcomes(line.api, body) == ["succeeded"]
    assert line.engine.aborted == []
    other = {**body, "max_tokens": 5}
    check_refused(line.api.http.post(CHAT, json=other, headers=headers), 409, "idempotency_conflict", "Idempotency-Key")


def test_an_sdk_that_gives_up_and_asks_again_gets_a_job_of_its_own(line: Line, body: dict[str, Any]) -> None:
    line.engine.reply = (200, b'{"choices": []}')

    def let_the_second_go() -> None:
        assert line.engine.arrived.acquire(timeout=30)
        assert line.engine.arrived.acquire(timeout=30)
        line.engine.let_go.set()

    with line.engine.holding():
        helper = threading.Thread(target=let_the_second_go)
        helper.start()
        with line.api.sdk(max_retries=5, timeout=2.0) as client:
            client.chat.completions.create(**body)
        helper.join()
    assert outcomes(line.api, body)[-1] == "succeeded"
    assert set(outcomes(line.api, body)[:-1]) == {"cancelled"}


def test_the_caller_whose_job_another_process_gives_up_gets_one_of_its_own(line: Line, body: dict[str, Any]) -> None:
    headers = {"idempotency-key": body["messages"][0]["content"]}
    line.engine.reply = (200, json.dumps({"choices": [9]}).encode())
    with line.another_api() as other, line.engine.holding(), calling(other, body, **headers) as (client, first):
        assert line.engine.arrived.acquire(timeout=20)
        with calling(line.api, body, **headers) as (_, again):
            wait_until(lambda: line.api.callers == 1, 20)
            hang_up(client)
            assert isinstance(first.exception(), httpx.TransportError)
            assert line.engine.arrived.acquire(timeout=20)
            line.engine.let_go.set()
            assert again.result().json() == {"choices": [9]}
    assert outcomes(line.api, body) == ["cancelled", "succeeded"]


def test_a_call_that_no_instance_answers_in_time_ends_as_504_and_is_not_repeated(
    line: Line, body: dict[str, Any]
) -> None:
    body["model"] = "other"
    with (
        line.another_api(answer_seconds=0.5) as api,
        api.sdk(max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.chat.completions.create(**body)
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (504, "job_expired", "server_error")
    assert outcomes(line.api, body) == ["expired"]
