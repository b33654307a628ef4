"""The Python client against the real API on real Postgres; control work runs when the test says so."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, serve_api  # noqa: F401 - `api` is a fixture
from client_steps import answer_job, complete, run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.store.session import Database
from service.store.tables import batch as batch_table
from service.store.tables import file
from trunkline import (
    AsyncClient,
    AuthenticationError,
    BatchFailed,
    Client,
    ConflictError,
    ConnectionFailed,
    InvalidRequestError,
    JobFailed,
    NotFoundError,
    QuotaError,
    TimedOut,
)
from trunkline.wire import Batch

pytestmark = pytest.mark.embedded_only

# No pause before a retry or a poll is longer than a test should wait.
FAST = {"poll_seconds": 0.05}


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with Client(f"{api.url}/v1") as client:
        yield client


def count(database: Database, table: sa.Table) -> int:
    with database.transaction() as conn:
        return conn.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def test_a_batch_of_prompts_from_create_to_results(client: Client, desk: Desk) -> None:
    made = client.batch((f"question {n}" for n in range(5)), model="tiny", metadata={"run": "1"})
    assert (made.status, made.metadata) == ("validating", {"run": "1"})
    run_open_tasks(desk)
    complete(desk, made.id, failed=("request-2",))
    seen: list[str] = []
    ended = client.wait(made, progress=lambda state: seen.append(state.status), **FAST)
    assert (ended.status, seen[-1]) == ("completed", "completed")
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (5, 4, 1)
    assert ended.lines_ended == 5
    assert ended.queue.cache.hit_rate == 0.4
    results = {result.custom_id: result for result in client.results(ended)}
    assert set(results) == {f"request-{n}" for n in range(1, 6)}
    assert results["request-1"].body is not None
    assert results["request-1"].failure is None
    refused = results["request-2"]
    assert (refused.is_success, refused.response and refused.response.status_code) == (False, 400)
    assert refused.failure is not None


def test_wait_sees_the_progress_of_a_running_batch(client: Client, desk: Desk) -> None:
    made = client.batch(["a", "b", "c"], model="tiny")
    run_open_tasks(desk)
    ended: list[int] = []

    def progress(state: Batch) -> None:
        ended.append(state.lines_ended)
        if len(ended) == 1:
            desk.answer(made.id, ["request-1"])
        if len(ended) == 2:
            desk.answer(made.id, ["request-2", "request-3"])
            desk.finalize()
            run_open_tasks(desk)

    assert client.wait(made, progress=progress, **FAST).status == "completed"
    assert ended == [0, 1, 3]


def test_results_follow_a_running_batch_to_its_end(client: Client, desk: Desk) -> None:
    made = client.batch(["a", "b", "c"], model="tiny")
    run_open_tasks(desk)
    desk.answer(made.id, ["request-2"])
    assert [result.custom_id for result in client.results(made, follow=False)] == ["request-2"]
    found = []
    for result in client.results(made):
        found.append(result.custom_id)
        if found == ["request-2"]:
            desk.answer(made.id, ["request-1"])
        if found == ["request-2", "request-1"]:
            complete_rest = ["request-3"]
            desk.answer(made.id, complete_rest)
            desk.finalize()
            run_open_tasks(desk)
    assert found == ["request-2", "request-1", "request-3"]


def test_a_batch_from_a_path_a_stream_and_an_uploaded_file(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "my requests.txt"
    path.write_bytes(jsonl([request("a")]))
    from_path = client.batch(path)
    assert client.get_file(from_path.input_file_id).filename == "my requests.txt.jsonl"
    with path.open("rb") as stream:
        from_stream = client.batch(stream)
    assert b"".join(client.download(from_stream.input_file_id)) == path.read_bytes()
    uploaded = client.upload(path, expires_after_seconds=3600)
    assert uploaded.expires_at == uploaded.created_at + 3600
    first = client.batch(uploaded, idempotency_key="once")
    assert client.batch(uploaded, idempotency_key="once").id == first.id
    with pytest.raises(ConflictError) as raised:
        client.batch(uploaded, idempotency_key="once", metadata={"other": "body"})
    assert raised.value.code == "idempotency_conflict"


def test_a_create_whose_answer_is_lost_makes_one_batch(api: Api, database: Database) -> None:
    lost: list[str] = []

    class LosesFirstAnswers(httpx.HTTPTransport):
        """The request arrives and is done; its answer does not come back, once for each path."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            if request.method == "POST" and request.url.path not in lost:
                lost.append(request.url.path)
                response.read()
                response.close()
                raise httpx.ReadError("the connection broke", request=request)
            return response

    with Client(f"{api.url}/v1", http_client=httpx.Client(transport=LosesFirstAnswers())) as client:
        made = client.batch(["a"], model="tiny")
        submitted = client.submit("a", model="tiny")
        assert [found.id for found in client.batches()] == [made.id]
        assert [found.id for found in client.jobs()] == [submitted.id]
    assert lost == ["/v1/files", "/v1/batches", "/v1/jobs"]
    assert (count(database, batch_table), count(database, file)) == (1, 2)


def test_a_failed_batch_raises_with_its_lines(client: Client, desk: Desk) -> None:
    lines = [{"custom_id": "a", "body": {"messages": [{"role": "user", "content": text}]}} for text in "xy"]
    made = client.batch([*lines, {"custom_id": "b", "body": {}}], model="tiny")
    run_open_tasks(desk)
    with pytest.raises(BatchFailed) as raised:
        client.wait(made, **FAST)
    found = {(error.line, error.code, error.param) for error in raised.value.errors}
    assert found == {(2, "duplicate_custom_id", "custom_id"), (3, "missing_required_parameter", "body.messages")}
    assert "line 2: " in str(raised.value)
    with pytest.raises(BatchFailed):
        list(client.results(made))


def test_a_cancelled_batch_keeps_what_it_has(client: Client, desk: Desk) -> None:
    made = client.batch(["a", "b"], model="tiny")
    run_open_tasks(desk)
    desk.answer(made.id, ["request-1"])
    assert client.cancel(made).status == "cancelling"
    run_open_tasks(desk)
    ended = client.wait(made, **FAST)
    assert ended.status == "cancelled"
    failures = {result.custom_id: result.failure and result.failure.code for result in client.results(ended)}
    assert failures == {"request-1": None, "request-2": "batch_cancelled"}


def test_waiting_times_out_and_the_batch_goes_on(client: Client, desk: Desk) -> None:
    made = client.batch(["a"], model="tiny")
    with pytest.raises(TimedOut, match="validating"):
        client.wait(made, timeout=0.1, **FAST)
    assert client.get_batch(made).status == "validating"


def test_a_single_job_is_awaited(client: Client, api: Api) -> None:
    submitted = client.submit("hello", model="tiny", metadata={"a": "b"})
    assert submitted.status == "queued"
    answer = {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}
    answering = threading.Timer(0.2, answer_job, (api.database, submitted.id, answer))
    answering.start()
    ended = client.result(submitted, timeout=30)
    answering.join()
    assert (ended.status, ended.text, ended.metadata) == ("succeeded", "hi", {"a": "b"})
    assert ended.usage is not None
    assert (ended.usage.prompt_tokens, ended.usage.cached_tokens) == (10, 4)


def test_a_refused_job_and_a_late_one_raise(client: Client, api: Api) -> None:
    submitted = client.submit({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}, priority="low")
    with pytest.raises(TimedOut, match="queued"):
        client.result(submitted, timeout=0)
    answer_job(api.database, submitted.id, {"error": {"message": "too long"}}, status_code=400)
    with pytest.raises(JobFailed, match="too long"):
        client.result(submitted)
    with pytest.raises(ConflictError):
        client.cancel_job(submitted)
    other = client.submit("x", model="tiny")
    assert client.cancel_job(other).status == "cancelled"


def test_refusals_have_their_classes(api: Api, client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.get_batch("batch_none")
    assert (missing.value.code, missing.value.param) == ("not_found", "batch_id")
    assert missing.value.request_id is not None
    with pytest.raises(InvalidRequestError) as wrong:
        client.batch(["a"], model="tiny", completion_window="soon")
    assert wrong.value.param == "completion_window"
    with pytest.raises(NotFoundError, match="no-such"):
        client.submit("a", model="no-such")
    key = api.make_key("acme")
    with pytest.raises(AuthenticationError, match="TRUNKLINE_API_KEY"):
        client.models()
    with Client(f"{api.url}/v1", key) as known:
        assert "tiny" in [model.id for model in known.models()]


def test_a_full_queue_is_a_quota_error_and_is_not_tried_again(
    settings: Any, database: Database, broker_url: str
) -> None:
    with serve_api(settings, database, broker_url, max_queued_lines=1) as api, Client(f"{api.url}/v1") as client:
        made = client.batch(["a"], model="tiny")
        run_open_tasks(api.desk())
        with pytest.raises(QuotaError) as raised:
            client.batch(["c"], model="tiny")
        assert raised.value.code == "queue_full"
        client.cancel(made)


def test_lists_page_through_everything(client: Client) -> None:
    ids = [client.submit(str(n), model="tiny").id for n in range(5)]
    assert [found.id for found in client.jobs()] == ids[::-1]
    assert [found.id for found in client.jobs(2)] == ids[:2:-1]
    made = [client.batch([str(n)], model="tiny") for n in range(3)]
    assert [found.id for found in client.batches()] == [batch.id for batch in made[::-1]]
    assert {found.id for found in client.files(purpose="batch")} == {batch.input_file_id for batch in made}
    with pytest.raises(ConflictError):
        client.delete_file(made[0].input_file_id)


def test_nobody_listens(tmp_path: Path) -> None:
    with Client("http://127.0.0.1:9/v1", max_retries=0) as client, pytest.raises(ConnectionFailed, match=":9/v1"):
        client.models()


@pytest.fixture
async def async_client(api: Api) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"{api.url}/v1") as client:
        yield client


async def test_the_async_client_does_the_same(async_client: AsyncClient, desk: Desk, api: Api) -> None:
    made = await async_client.batch([f"question {n}" for n in range(3)], model="tiny")
    run_open_tasks(desk)
    complete(desk, made.id)
    ended = await async_client.wait(made, timeout=30, **FAST)
    assert ended.status == "completed"
    results = [result.custom_id async for result in async_client.results(ended)]
    assert sorted(results, key=str) == ["request-1", "request-2", "request-3"]
    assert [found.id async for found in async_client.batches()] == [made.id]
    submitted = await async_client.submit("hello", model="tiny")
    answer_job(api.database, submitted.id, {"choices": [{"text": "hi"}]})
    assert (await async_client.result(submitted, timeout=30)).text == "hi"
    with pytest.raises(NotFoundError):
        await async_client.get_job("job_none")


def test_a_batch_is_changed_looked_into_retried_and_deleted(client: Client, desk: Desk) -> None:
    made = client.batch(["a", "b", "c"], model="tiny")
    changed = client.update_batch(made, priority="high", paused=True, completion_window="48h")
    assert (changed.queue.priority, changed.queue.paused, changed.completion_window) == ("high", True, "48h")
    assert client.update_batch(made, paused=False).queue.priority == "high"
    run_open_tasks(desk)
    desk.answer(made.id, ["request-2"])
    assert [line.status for line in client.requests(made)] == ["queued", "succeeded", "queued"]
    assert [line.custom_id for line in client.requests(made, status="queued", limit=1)] == ["request-1"]
    with pytest.raises(ConflictError) as raised:
        client.delete_batch(made)
    assert raised.value.code == "batch_not_terminal"
    client.cancel(made)
    run_open_tasks(desk)
    again = client.retry(made, idempotency_key="k")
    assert again.queue.retry_of == made.id
    assert client.retry(made, idempotency_key="k").id == again.id
    with pytest.raises(ConflictError) as ended:
        client.update_batch(made, paused=True)
    assert ended.value.code == "batch_terminal"
    assert client.delete_batch(made)
    assert [batch.id for batch in client.batches()] == [again.id]


async def test_the_async_client_changes_retries_and_deletes(async_client: AsyncClient, desk: Desk) -> None:
    made = await async_client.batch(["a", "b"], model="tiny")
    assert (await async_client.update_batch(made, priority="low")).queue.priority == "low"
    run_open_tasks(desk)
    assert [line.line async for line in async_client.requests(made, status="queued")] == [1, 2]
    await async_client.cancel(made)
    run_open_tasks(desk)
    again = await async_client.retry(made)
    assert (again.status, again.queue.retry_of) == ("validating", made.id)
    assert await async_client.delete_batch(made)
    with pytest.raises(NotFoundError):
        await async_client.get_batch(made)
