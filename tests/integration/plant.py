"""A whole Trunkline in this process, moved by hand: real API over HTTP, intake, dispatcher, one worker and its engine
over HTTP, export. Nothing happens between two calls of `turn`, so a test says what races with what."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from accounting_checks import check_output_files
from api_fixtures import Api, serve_api
from control_fixtures import MODELS, jsonl, request
from fake_server import FakeServer, Handler
from openai.types import Batch

from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.control import run_task
from service.core.model import TERMINAL_BATCH_STATUSES, CohortState, TaskKind
from service.dispatcher import Dispatcher
from service.fleet import Instance
from service.settings import Settings
from service.store import control
from service.store.admin import drop_database, ensure_database
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import cohort, job, job_result
from service.tokenizing import Tokenizing
from workers.owner import InstanceOwner

Reply = Callable[[dict[str, Any]], tuple[int, bytes] | None]
CHAT = "/v1/chat/completions"
PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS = 40, 32, 2  # of every good answer; its blocks are of 32


class ReplyingHandler(Handler):
    """Answers what `PlantServer.reply` says, and where that says nothing, as the fake server does."""

    server: PlantServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_probe = self.path == "/tokenize" or "probe" in json.dumps(body)
        found = None if is_probe else self.server.reply(body)
        if is_probe:
            status, data = (404, b"{}") if self.path == "/tokenize" else (200, good_answer(body))
        else:
            self.server.requests.append(body)
            self.server.arrived.release()
            self.server.gate.wait(60)
            status, data = found or (200, good_answer(body))
        self._send_bytes(status, data)


class PlantServer(FakeServer):
    """The engine. While `gate` is closed its answers are held; `arrived` counts the requests."""

    request_queue_size = 128

    def __init__(self, port: int, mode: str, seconds: float = 0.0) -> None:
        super().__init__(port, mode, seconds)
        self.RequestHandlerClass = ReplyingHandler
        self.reply: Reply = lambda body: None
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)


def good_answer(body: dict[str, Any]) -> bytes:
    """A chat completion that says what was asked."""
    asked = body["messages"][-1]["content"] if body.get("messages") else ""
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": ANSWER_TOKENS,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
    message = {"role": "assistant", "content": asked}
    answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}
    return json.dumps(answer).encode()


class Plant:
    """What stands, and what moves it."""

    def __init__(self, api: Api, server: PlantServer, owner: InstanceOwner, dispatcher: Dispatcher) -> None:
        self.api, self.server, self.owner, self.dispatcher = api, server, owner, dispatcher
        self.work = api.desk().work
        self.database = api.database
        self._running: list[threading.Thread] = []

    def control(self, *kinds: TaskKind) -> int:
        """Run the control tasks that are due (of these kinds); how many."""
        with self.database.transaction() as conn:
            control.due_finalizing(conn)
            control.due_expiries(conn)
            due = control.unpublished_tasks(conn, 0)
            of_kind = dict(map(tuple, conn.execute(sa.select(control_task.c.id, control_task.c.kind))))
        chosen = [task_id for task_id in due if not kinds or of_kind[task_id] in kinds]
        for task_id in chosen:
            run_task(self.work, task_id)
        return len(chosen)

    def dispatch(self) -> int:
        """Plan, and start a thread for every cohort that is out, as the worker would at its message; how many."""
        self.dispatcher.step()
        out = sa.select(cohort.c.id, cohort.c.dispatch_no).where(cohort.c.state == CohortState.DISPATCHED)
        with self.database.transaction() as conn:
            messages = conn.execute(out).all()
        started = [threading.Thread(target=self.owner.run_cohort, args=tuple(message)) for message in messages]
        for thread in started:
            thread.start()
        self._running += started
        return len(started)

    def join(self) -> None:
        """Until the worker has ended all that it runs."""
        for thread in self._running:
            thread.join(60)
            assert not thread.is_alive()
        self._running = []

    def turn(self) -> None:
        self.control()
        self.dispatch()
        self.join()

    def finish(self, batch_id: str, seconds: float = 60) -> Batch:
        """Turn until the batch is terminal. A line that waits for its next try makes this take as long."""
        deadline, pause = time.monotonic() + seconds, threading.Event()
        sdk = self.api.sdk()
        while (batch := sdk.batches.retrieve(batch_id)).status not in TERMINAL_BATCH_STATUSES:
            assert time.monotonic() < deadline, batch
            self.turn()
            pause.wait(0.02)
        return batch

    def submit(self, data: bytes, sdk: openai.OpenAI | None = None, **fields: Any) -> str:
        """Uploaded and created with the SDK; the batch's id."""
        sdk = sdk or self.api.sdk()
        uploaded = sdk.files.create(file=("in.jsonl", data), purpose="batch")
        return sdk.batches.create(
            input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", extra_body=fields or None
        ).id

    def run(self, data: bytes, **fields: Any) -> Batch:
        return self.finish(self.submit(data, **fields))

    def check_good_batch(self) -> None:
        """A plain batch completes."""
        batch = self.run(jsonl(request(f"good-{n}") for n in range(3)))
        assert batch.status == "completed", batch
        assert {line["custom_id"] for line in self.lines(batch.output_file_id)} == {f"good-{n}" for n in range(3)}

    def completed(self, batch_id: str) -> int:
        counts = self.api.sdk().batches.retrieve(batch_id).request_counts
        return counts.completed if counts else 0

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The records of a result file as the SDK's own line iterator cuts them."""
        if file_id is None:
            return []
        return [json.loads(line) for line in self.api.sdk().files.content(file_id).iter_lines()]

    def results_per_line(self, batch_id: str) -> dict[str, int]:
        """custom_id -> result rows: 1 for each job that ended."""
        counted = (
            sa.select(job.c.custom_id, sa.func.count(job_result.c.job_id))
            .outerjoin(job_result, job_result.c.job_id == job.c.id)
            .where(job.c.batch_id == batch_id)
            .group_by(job.c.custom_id)
        )
        with self.database.transaction() as conn:
            return dict(map(tuple, conn.execute(counted)))


def check_accounting(plant: Plant, batch: Batch, lines: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The invariant over both files of a batch that ended, read with the SDK; their records."""
    content = plant.api.sdk().files.content
    source, output, error = (
        content(file_id).read() if file_id else b""
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id)
    )
    check_output_files(batch.to_dict(mode="python"), source=source, output=output, error=error)
    assert batch.request_counts is not None
    assert batch.request_counts.total == lines
    return plant.lines(batch.output_file_id), plant.lines(batch.error_file_id)


@contextmanager
def running_plant(settings: Settings, database: Database, broker_url: str, **changes: Any) -> Iterator[Plant]:
    """A plant with one engine for the model `tiny`; `changes` are settings."""
    settings = replace(settings, stale_boot_seconds=600.0, lease_seconds=600.0, **changes)  # whatever a test waits for
    with serving_plant() as server, serve_api(settings, database, broker_url) as api:
        options = (("max_num_seqs", 16.0), ("kv_capacity_tokens", 65536.0), ("block_size", 32.0))
        instance = Instance(name="one", engine="openai", model="tiny", url=server.url, options=options)
        owner = InstanceOwner(
            settings=settings,
            instance=instance,
            model=MODELS.by_name["tiny"],
            database=database,
            tokenizing=Tokenizing(MODELS),
        )
        owner.start(lambda: False)
        publisher = Publisher(make_app(settings, broker_url, queue=CONTROL_QUEUE))
        try:
            yield Plant(api, server, owner, Dispatcher(settings, database, publisher))
        finally:
            server.gate.set()
            owner.stop()


@pytest.fixture(scope="module")
def standing(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    """One plant for all the tests of a module; starting one takes seconds."""
    base = Database(servers.database_url, pool_size=1)
    name = f"trunkline_test_{secrets.token_hex(6)}"
    ensure_database(base, name, template=servers.template)
    settings = Settings(
        state_folder=tmp_path_factory.mktemp("plant") / "state folder",
        database_url=servers.url_of(name),
        broker_url=servers.broker_url,
        secret_key="test-secret",
        cancel_grace_seconds=2.0,
        job_tries=2,
    )
    database = Database(servers.url_of(name))
    with running_plant(settings, database, servers.broker_url) as plant:
        yield plant
    database.close()
    drop_database(base, name)
    base.close()


@pytest.fixture
def plant(standing: Plant) -> Iterator[Plant]:
    """The standing plant, with an engine that answers as it should; after the test a good batch must complete."""
    server = standing.server
    server.requests.clear()
    server.reply = lambda body: None
    server.gate.set()
    yield standing
    server.gate.set()
    server.reply = lambda body: None
    standing.check_good_batch()


@contextmanager
def serving_plant() -> Iterator[PlantServer]:
    server = PlantServer(0, "honours")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
