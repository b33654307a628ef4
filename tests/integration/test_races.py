"""What happens at the same time as something else: cancels, deadlines, deletes, and creates that are sent twice."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api  # noqa: F401 - a fixture
from control_fixtures import jsonl, request
from cutting_proxy import CuttingProxy, proxying
from plant import CHAT, Plant, check_accounting, plant, standing  # noqa: F401 - two are fixtures

from service.children import spawn, stop_all
from service.core.model import TaskKind
from service.ports import free_port
from service.settings import Settings, child_environment
from service.store.session import Database
from service.store.tables import batch, file

LINES = 6
DATA = jsonl(request(f"c{n}", text=f"line {n}") for n in range(LINES))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """All of them in threads of their own, let go together; what each returned, or raised of the SDK's errors."""
    together = threading.Barrier(len(calls))

    def call(one: Callable[[], Any]) -> Any:
        together.wait(10)
        try:
            return one()
        except openai.APIStatusError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def move_deadline(plant: Plant, batch_id: str) -> None:
    """The deadline is now."""
    with plant.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(expires_at=sa.func.now()))


def start_in_flight(plant: Plant, **fields: Any) -> str:
    """A batch whose lines are all at the engine, which holds its answers."""
    plant.server.gate.clear()
    batch_id = plant.submit(DATA, **fields)
    plant.control(TaskKind.INTAKE)
    assert plant.dispatch()
    for _ in range(LINES):
        assert plant.server.arrived.acquire(timeout=20)
    return batch_id


def test_a_batch_that_is_cancelled_twice_while_finalizing_completes(plant: Plant) -> None:
    batch_id = plant.submit(DATA)
    plant.control(TaskKind.INTAKE)
    plant.dispatch()
    plant.join()
    assert plant.control(TaskKind.INTAKE) == 0  # nothing but the look that finds every line ended
    sdk = plant.api.sdk()
    assert sdk.batches.retrieve(batch_id).status == "finalizing"
    for answer in (sdk.batches.cancel(batch_id), sdk.batches.cancel(batch_id)):
        assert (answer.status, answer.cancelling_at) == ("finalizing", None)
    done = plant.finish(batch_id)
    assert (done.status, done.cancelling_at) == ("completed", None)
    good, bad = check_accounting(plant, done, LINES)
    assert (len(good), bad) == (LINES, [])
    with pytest.raises(openai.ConflictError) as refused:
        sdk.batches.cancel(batch_id)
    assert refused.value.code == "batch_not_cancellable"
    assert refused.value.request.headers["x-stainless-retry-count"] == "0"


def test_cancels_that_race_with_the_export_change_nothing(plant: Plant) -> None:
    for _ in range(5):
        batch_id = plant.submit(DATA)
        plant.control(TaskKind.INTAKE)
        plant.dispatch()
        plant.join()
        plant.control(TaskKind.INTAKE)
        sdk = plant.api.sdk(max_retries=0)
        cancel = lambda sdk=sdk, batch_id=batch_id: sdk.batches.cancel(batch_id)  # noqa: E731
        answers = at_once(cancel, lambda: plant.control(TaskKind.EXPORT), cancel)
        for answer in (answers[0], answers[2]):
            is_late = isinstance(answer, openai.ConflictError) and answer.code == "batch_not_cancellable"
            assert is_late or answer.status == "finalizing"
        done = plant.finish(batch_id)
        assert (done.status, done.cancelling_at) == ("completed", None)
        check_accounting(plant, done, LINES)


def test_a_cancel_that_races_with_the_end_of_the_last_line_ends_in_one_of_both_ways(plant: Plant) -> None:
    for _ in range(5):
        batch_id = start_in_flight(plant)
        sdk = plant.api.sdk()

        def answer() -> None:
            plant.server.gate.set()
            plant.join()
            plant.control(TaskKind.EXPORT)

        at_once(answer, lambda sdk=sdk, batch_id=batch_id: sdk.batches.cancel(batch_id))
        done = plant.finish(batch_id)
        assert done.status in ("completed", "cancelled")
        check_accounting(plant, done, LINES)
        assert set(plant.results_per_line(batch_id).values()) == {1}


def test_a_deadline_with_lines_in_flight_expires_them_and_their_late_answers_count_for_nothing(plant: Plant) -> None:
    batch_id = start_in_flight(plant)
    move_deadline(plant, batch_id)
    plant.control()
    sdk = plant.api.sdk()
    expired = sdk.batches.retrieve(batch_id)
    assert expired.status == "expired"
    good, bad = check_accounting(plant, expired, LINES)
    assert good == []
    assert {line["error"]["code"] for line in bad} == {"batch_expired"}
    assert expired.output_file_id is None
    plant.server.gate.set()  # the answers come now
    plant.join()
    plant.turn()
    assert sdk.batches.retrieve(batch_id) == expired
    assert plant.results_per_line(batch_id) == {f"c{n}": 1 for n in range(LINES)}
    with pytest.raises(openai.ConflictError):
        sdk.batches.cancel(batch_id)


def test_a_deadline_keeps_what_was_answered_before_it(plant: Plant) -> None:
    early = {"line 0", "line 1"}
    release = threading.Event()

    def reply(body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] not in early:
            release.wait(30)

    plant.server.reply = reply
    try:
        batch_id = plant.submit(DATA)
        plant.control(TaskKind.INTAKE)
        plant.dispatch()
        wait_until(lambda: plant.completed(batch_id) == len(early))
        move_deadline(plant, batch_id)
        plant.control()
    finally:
        release.set()
        plant.join()
    done = plant.finish(batch_id)
    assert done.status == "expired"
    good, bad = check_accounting(plant, done, LINES)
    assert {line["custom_id"] for line in good} == {"c0", "c1"}
    assert len(bad) == LINES - 2


def test_an_input_file_that_a_running_batch_reads_cannot_be_deleted(plant: Plant) -> None:
    sdk = plant.api.sdk()

    def is_refused() -> bool:
        with pytest.raises(openai.ConflictError) as refused:
            sdk.files.delete(sdk.batches.retrieve(batch_id).input_file_id)
        assert refused.value.request.headers["x-stainless-retry-count"] == "0"
        return (refused.value.code, refused.value.param) == ("file_in_use", "file_id")

    batch_id = plant.submit(DATA)
    assert is_refused()  # validating
    plant.server.gate.clear()
    plant.control(TaskKind.INTAKE)
    plant.dispatch()
    assert is_refused()  # in_progress
    plant.server.gate.set()
    plant.join()
    plant.control(TaskKind.INTAKE)
    assert sdk.batches.retrieve(batch_id).status == "finalizing"
    assert is_refused()
    done = plant.finish(batch_id)
    check_accounting(plant, done, LINES)
    assert sdk.files.delete(done.input_file_id).deleted
    assert len(plant.lines(done.output_file_id)) == LINES

    batch_id = start_in_flight(plant)
    assert sdk.batches.cancel(batch_id).status == "cancelling"
    assert is_refused()
    plant.server.gate.set()
    assert plant.finish(batch_id).status in ("cancelled", "completed")


def test_a_delete_and_a_create_at_once_leave_a_batch_with_its_file_or_neither(plant: Plant) -> None:
    sdk = plant.api.sdk(max_retries=0)
    seen = set()
    for _ in range(15):
        file_id = plant.api.upload(DATA)
        created, deleted = at_once(
            lambda file_id=file_id: sdk.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h"),
            lambda file_id=file_id: sdk.files.delete(file_id),
        )
        if isinstance(created, openai.NotFoundError):
            assert (created.code, created.param, deleted.deleted) == ("not_found", "input_file_id", True)
            seen.add("deleted")
            continue
        assert isinstance(deleted, openai.ConflictError)
        assert plant.finish(created.id).status == "completed"
        seen.add("created")
    assert seen


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    pause = threading.Event()
    for _ in range(round(seconds / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come to hold")


# Creates whose answer is lost


@pytest.fixture
def proxy(api: Api) -> Iterator[CuttingProxy]:
    with proxying(api.url) as proxy:
        yield proxy


def lose_creates(proxy: CuttingProxy, count: int) -> None:
    proxy.lose = lambda method, path: method == "POST" and path == "/v1/batches" and len(proxy.lost) < count


def create(sdk: openai.OpenAI, file_id: str, **options: Any) -> str:
    return sdk.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", **options).id


def batch_ids(api: Api) -> list[str]:
    return [item["id"] for item in api.http.get("/v1/batches?limit=100").json()["data"]]


@pytest.mark.parametrize("status", [None, 502, 504])
def test_a_create_whose_answer_was_lost_and_which_the_sdk_repeats_makes_one_batch(
    api: Api, proxy: CuttingProxy, status: int | None
) -> None:
    proxy.status = status
    sdk = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none")
    file_id = api.upload(DATA)
    lose_creates(proxy, 2)  # the first try and its first repeat
    assert [create(sdk, file_id)] == batch_ids(api)
    assert proxy.lost == ["0", "1"]
    second = create(sdk, file_id)  # the application means it once more
    assert batch_ids(api)[0] == second
    assert len(batch_ids(api)) == 2


async def test_the_async_sdk_repeats_a_lost_create_into_one_batch(api: Api, proxy: CuttingProxy) -> None:
    lose_creates(proxy, 1)
    file_id = api.upload(DATA)
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as sdk:
        made = await sdk.batches.create(
            input_file_id=file_id, endpoint=CHAT, completion_window="24h", extra_headers={"Idempotency-Key": "night-7"}
        )
    assert (batch_ids(api), proxy.lost) == ([made.id], ["0"])


def test_a_repeat_that_comes_while_the_first_is_still_at_work_makes_one_batch(api: Api) -> None:
    file_id = api.upload(DATA)
    sdk = api.sdk(timeout=1.0, max_retries=3)
    with ThreadPoolExecutor(1) as pool, api.database.transaction() as conn:
        # Both creates wait for this row: the first gives up on the client's side, and the repeat is sent.
        conn.execute(sa.select(file).where(file.c.id == file_id).with_for_update())
        made: Future[str] = pool.submit(create, sdk, file_id)
        wait_until(lambda: waiting_sessions(api) >= 2)
        conn.rollback()
        assert [made.result(20)] == batch_ids(api)


def waiting_sessions(api: Api) -> int:
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with api.database.transaction() as conn:
        return int(conn.execute(sa.text(query)).scalar_one())


# Two API processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two `python -m service api` over one database, broker and file store."""

    urls: tuple[str, str]

    def sdks(self, **options: Any) -> tuple[openai.OpenAI, openai.OpenAI]:
        one, two = (openai.OpenAI(base_url=f"{url}/v1", api_key="none", **options) for url in self.urls)
        return one, two


@pytest.fixture
def pair(settings: Settings, database: Database, broker_url: str) -> Iterator[Pair]:
    settings.state_folder.mkdir(parents=True, exist_ok=True)
    settings.models_path.write_text("[models.tiny]\n")
    ports = (free_port(), free_port())
    children = []
    try:
        for port in ports:
            environment = child_environment(dataclasses.replace(settings, port=port))
            with (settings.state_folder / f"api-{port}.log").open("wb") as output:
                argv = [sys.executable, "-m", "service", "api"]
                children.append(spawn(argv, environment=environment, output=output))
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        wait_until(lambda: all(map(is_healthy, urls)), 60)
        yield Pair(urls=(urls[0], urls[1]))
    finally:
        stop_all([(child, 15.0) for child in children])


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_two_api_processes_are_one_service(pair: Pair) -> None:
    one, two = pair.sdks()
    uploaded = one.files.create(file=("in.jsonl", DATA), purpose="batch")
    assert two.files.content(uploaded.id).read() == DATA

    # The same key at once on both, many times: one batch.
    keyed = {"Idempotency-Key": "k-1"}
    calls = [lambda sdk=sdk: create(sdk, uploaded.id, extra_headers=keyed) for sdk in (one, two) * 8]
    (batch_id,) = set(at_once(*calls))
    assert [item.id for item in two.batches.list()] == [item.id for item in one.batches.list()] == [batch_id]

    # Another body under that key: one of them is refused, on whichever process, and makes nothing.
    other = {"Idempotency-Key": "k-2"}
    window = {"extra_headers": other, "extra_body": {"completion_window": "36h"}}
    answers = at_once(lambda: create(one, uploaded.id, extra_headers=other), lambda: create(two, uploaded.id, **window))
    (refused,) = [answer for answer in answers if isinstance(answer, openai.ConflictError)]
    assert refused.code == "idempotency_conflict"
    assert len(list(one.batches.list())) == 2

    # A create that was answered by the one and lost is repeated to the other.
    with proxying(*pair.urls) as proxy:
        lose_creates(proxy, 1)
        sdk = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none")
        third = create(sdk, uploaded.id)
        assert proxy.lost == ["0"]
    assert next(iter(one.batches.list())).id == third
    assert len(list(two.batches.list())) == 3

    # Both cancel at once: both see it cancelling, and it is cancelled once.
    states = at_once(*(lambda sdk=sdk: sdk.batches.cancel(batch_id) for sdk in (one, two) * 4))
    assert {answer.status for answer in states} == {"cancelling"}
    assert len({answer.cancelling_at for answer in states}) == 1

    # A file that the one deletes is gone on the other.
    spare = two.files.create(file=("spare.jsonl", DATA), purpose="batch")
    assert one.files.delete(spare.id).deleted
    with pytest.raises(openai.NotFoundError):
        two.files.content(spare.id)
