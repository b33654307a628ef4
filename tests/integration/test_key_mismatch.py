"""The alarm `key mismatch`, with a real worker, real rows and an engine over HTTP: raised for what is wrong, in time,
and silent for an engine whose cache is merely small."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from caching_server import MODEL, TEMPLATE, CachingServer, serving, write_tokenizer
from seeds import QUEUE, add_batch, add_tenant

from service.core.alarm import Mismatch
from service.core.model import Endpoint, MissCause
from service.core.prefix import cacheable_tokens, shared_tokens
from service.fleet import Instance, Model, Models
from service.settings import Settings
from service.store import backlog, dispatching
from service.store.session import Database
from service.store.tables import instance_boot, job, job_result, tenant
from service.tokenizing import Keyed, Tokenizing
from workers.agreement import key_agreement
from workers.engines.base import Engine, EngineGone
from workers.engines.openai import OpenAIEngine
from workers.owner import InstanceOwner

ALARM_SECONDS = 10.0  # after the last wrong result; the heartbeat of these tests is 0.5 s
ONE = dispatching.Room(jobs=1, least_cohorts=1, most_cohorts=1)
GROUPS, LINES = 5, 12
SALT = b"s" * 16


def chat(group: int, line: int, **fields: Any) -> dict[str, Any]:
    """Groups share from 320 to 540 tokens."""
    system = f"Group {group}. " + "rules " * 90
    messages = [{"role": "system", "content": system[: 300 + 53 * group]}, {"role": "user", "content": f"{line}?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 1, **fields}


class Bench:
    """An owner attached to a server, and one batch whose jobs it runs in key order."""

    def __init__(self, settings: Settings, database: Database, server: CachingServer, files: Path) -> None:
        self.database = database
        model = Model(name=MODEL, tokenizer=files)
        self.tokenizing = Tokenizing(Models({MODEL: model}))
        options = (("max_num_seqs", 2.0), ("kv_capacity_tokens", float(server.capacity_blocks * server.block_size)))
        block = () if server.told_block_size and server.told_block_size != 32 else (("block_size", 32.0),)
        self.owner = InstanceOwner(
            settings=settings,
            instance=Instance(name="one", engine="openai", model=MODEL, url=server.url, options=options + block),
            model=model,
            database=database,
            tokenizing=self.tokenizing,
        )
        with database.transaction() as conn:
            self.tenant = conn.execute(sa.select(tenant.c.id)).scalar() or add_tenant(conn)
            self.batch = add_batch(conn, self.tenant, f"batch_{id(self)}")
        self._line = 0

    def run(self, bodies: Sequence[dict[str, Any]], at_least: int = 0) -> None:
        """One cohort, in key order, each job predicted after the one before it (or `at_least`, as a plan that does not
        think of evictions has it)."""
        keyed = [(self.tokenizing.key(MODEL, Endpoint.CHAT, body, SALT), body) for body in bodies]
        keyed.sort(key=lambda item: (item[0].prefix_key, item[0].prompt_tokens))
        predicted = [0] + [
            cacheable_tokens(shared_tokens(before.prefix_key, item.prefix_key), item.prompt_tokens, 32)
            for (before, _), (item, _) in itertools.pairwise(keyed)
        ]
        predicted = [max(tokens, at_least) for tokens in predicted]
        with self.database.transaction() as conn:
            message = self._dispatch(conn, [self._add(conn, item, body) for item, body in keyed], predicted)
        self.owner.run_cohort(message.cohort_id, message.dispatch_no)

    def _add(self, conn: sa.Connection, keyed: Keyed, body: dict[str, Any]) -> int:
        self._line += 1
        values = {
            "tenant_id": self.tenant,
            "batch_id": self.batch,
            "line_no": self._line,
            "endpoint": Endpoint.CHAT,
            "model": MODEL,
            "body": json.dumps(body).encode(),
            "prefix_key": keyed.prefix_key,
            "prompt_tokens": keyed.prompt_tokens,
            "predicted_output_tokens": 1,
        }
        return int(conn.execute(sa.insert(job).values(**values).returning(job.c.id)).scalar_one())

    def _dispatch(self, conn: sa.Connection, ids: list[int], predicted: list[int]) -> dispatching.Message:
        boot_id = conn.execute(sa.select(instance_boot.c.id).where(instance_boot.c.state == "ready")).scalar_one()
        row = backlog.NewCohort(
            model=MODEL,
            queue=QUEUE,
            sequence=backlog.next_sequence(conn),
            priority=1,
            alone=False,
            body_bytes=10,
            estimated_seconds=1.0,
            job_ids=ids,
            predicted_cached_tokens=predicted,
            first_of_group=[tokens == 0 for tokens in predicted],
        )
        backlog.insert_cohorts(conn, [row])
        (message,) = dispatching.dispatch(conn, boot_id=boot_id, queue=QUEUE, model=MODEL, room=ONE, interactive=False)
        return message

    def alarm(self) -> tuple[bool | None, str | None]:
        with self.database.transaction() as conn:
            newest = sa.select(instance_boot.c.key_agrees, instance_boot.c.alarm).order_by(instance_boot.c.id.desc())
            row = conn.execute(newest).first()
            return (row.key_agrees, row.alarm) if row is not None else (None, None)

    def wait_for(self, alarm: Mismatch) -> None:
        deadline = time.monotonic() + ALARM_SECONDS
        pause = threading.Event()
        while self.alarm() != (False, alarm):
            assert time.monotonic() < deadline, self.alarm()
            pause.wait(0.05)

    def causes(self) -> Counter[str | None]:
        """Of the jobs that were served less than predicted."""
        short = job_result.c.cached_tokens < job_result.c.predicted_cached_tokens
        with self.database.transaction() as conn:
            return Counter(conn.execute(sa.select(job_result.c.miss_cause).where(short)).scalars())

    def next_heartbeats(self) -> None:
        """Return after two of them."""
        beat = sa.select(instance_boot.c.heartbeat_at).order_by(instance_boot.c.id.desc()).limit(1)
        pause = threading.Event()
        for _ in range(2):
            with self.database.transaction() as conn:
                before = conn.execute(beat).scalar_one()
            deadline = time.monotonic() + ALARM_SECONDS
            now = before
            while now == before:
                assert time.monotonic() < deadline
                pause.wait(0.05)
                with self.database.transaction() as conn:
                    now = conn.execute(beat).scalar_one()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "files")


@contextmanager
def bench_at(server: CachingServer, settings: Settings, database: Database, files: Path) -> Iterator[Bench]:
    with serving(server):
        bench = Bench(dataclasses.replace(settings, job_tries=1), database, server, files)
        bench.owner.start(lambda: False)
        try:
            yield bench
        finally:
            bench.owner.stop()


ALL = [chat(group, line) for group in range(GROUPS) for line in range(LINES)]


def test_a_sound_engine_serves_what_was_predicted_and_raises_nothing(
    settings: Settings, database: Database, files: Path
) -> None:
    with bench_at(CachingServer(files), settings, database, files) as bench:
        bench.run(ALL)
        bench.next_heartbeats()
        assert bench.alarm() == (True, None)
        assert bench.causes() == {}


def test_a_small_cache_evicts_and_raises_nothing(settings: Settings, database: Database, files: Path) -> None:
    with bench_at(CachingServer(files, capacity_tokens=1600), settings, database, files) as bench:
        for line in range(0, LINES, 2):  # a cohort of two jobs of each group, which the groups after it evict
            bench.run([chat(group, line + other) for group in range(GROUPS) for other in range(2)], at_least=288)
        bench.next_heartbeats()
        assert bench.alarm() == (True, None)
        causes = bench.causes()
        # Of two jobs of a group that are at the engine at once, each may be told that the other had not got there yet.
        assert causes[MissCause.EVICTED] >= GROUPS
        assert causes[MissCause.EVICTED] + causes[MissCause.IN_FLIGHT] >= GROUPS * (LINES // 2 - 1)
        beside = {MissCause.IN_FLIGHT, MissCause.OTHER_INSTANCE, MissCause.FIRST_OF_GROUP}  # of the first round
        assert set(causes) <= {MissCause.EVICTED, *beside}


def test_a_wrong_template_is_found_at_the_start(
    settings: Settings, database: Database, files: Path, tmp_path: Path
) -> None:
    wrong = write_tokenizer(tmp_path / "wrong", TEMPLATE.replace("<{{ message.role }}>", "<|{{ message.role }}|>"))
    with bench_at(CachingServer(wrong), settings, database, files) as bench:
        assert bench.alarm() == (False, Mismatch.TOKENS)


@pytest.mark.parametrize("part", ["system", "tools"])
def test_a_template_that_differs_for_one_kind_of_message_is_found_at_the_start(
    settings: Settings, files: Path, tmp_path: Path, part: str
) -> None:
    changed = {
        "tools": TEMPLATE.replace("<tools>", "You may call: "),
        "system": "{% if messages[0].role != 'system' %}<system>Be kind.</system>{% endif %}" + TEMPLATE,
    }
    wrong = write_tokenizer(tmp_path / "wrong", changed[part])
    with serving(CachingServer(wrong)) as server:
        assert agreement(server, settings, files) is False


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS])
def test_a_tokenizer_that_differs_is_found_at_every_endpoint(
    settings: Settings, files: Path, tmp_path: Path, endpoint: Endpoint
) -> None:
    wrong = write_tokenizer(tmp_path / "wrong")
    text = (wrong / "tokenizer.json").read_text()
    lower = json.loads(text) | {"normalizer": {"type": "NFD"}}
    (wrong / "tokenizer.json").write_text(json.dumps(lower))
    with serving(CachingServer(wrong)) as server:
        assert agreement(server, settings, files, endpoint) is False
    with serving(CachingServer(files)) as server:
        assert agreement(server, settings, files, endpoint) is True


class Dying(Engine):
    """Answers some questions, with tokens of its own, and then no more."""

    def __init__(self, answers: list[list[int] | None]) -> None:
        self.answers = answers

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        if not self.answers:
            raise EngineGone("test")
        return self.answers.pop(0)


@pytest.mark.parametrize(("answers", "agrees"), [([], None), ([None], None), ([[1, 2, 3]], False)])
async def test_what_was_found_before_an_engine_went_away_counts(
    files: Path, answers: list[list[int] | None], agrees: bool | None
) -> None:
    model = Model(name=MODEL, tokenizer=files)
    assert await key_agreement(Dying(answers), Tokenizing(Models({MODEL: model})), model) is agrees


def agreement(
    server: CachingServer, settings: Settings, files: Path, endpoint: Endpoint = Endpoint.CHAT
) -> bool | None:
    """What the canaries say; asked of a server as a worker asks it."""
    model = Model(name=MODEL, tokenizer=files, endpoints=(endpoint,))

    async def ask() -> bool | None:
        engine = OpenAIEngine(Instance(name="one", engine="openai", model=MODEL, url=server.url), model, settings)
        try:
            return await key_agreement(engine, Tokenizing(Models({MODEL: model})), model)
        finally:
            await engine.stop(0)

    return asyncio.run(ask())


def test_a_wrong_template_of_a_server_that_has_no_tokenize_is_found_in_its_counts(
    settings: Settings, database: Database, files: Path, tmp_path: Path
) -> None:
    wrong = write_tokenizer(tmp_path / "wrong", TEMPLATE.replace("<tools>", "You may call: "))
    server = CachingServer(wrong)
    server.answers_tokenize = False
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    with bench_at(server, settings, database, files) as bench:
        assert bench.alarm() == (None, None)
        bench.run(ALL)
        bench.next_heartbeats()
        assert bench.alarm() == (None, None)
        bench.run([chat(1, line, tools=[tool]) for line in range(20)])
        bench.wait_for(Mismatch.TOKENS)


@pytest.mark.parametrize("true_block", [16, 64, 128])
def test_a_wrong_block_size_is_found_in_what_is_served(
    settings: Settings, database: Database, files: Path, true_block: int
) -> None:
    with bench_at(CachingServer(files, block_size=true_block), settings, database, files) as bench:
        assert bench.alarm() == (True, None)
        bench.run(ALL)
        bench.wait_for(Mismatch.BLOCK_SIZE)


def test_a_block_size_that_the_engine_contradicts_is_found_at_the_start(
    settings: Settings, database: Database, files: Path
) -> None:
    server = CachingServer(files, block_size=16)
    server.told_block_size = 32
    with bench_at(server, settings, database, files) as bench:
        assert bench.alarm() == (True, None)
    instance = Instance(
        name="two",
        engine="openai",
        model=MODEL,
        url="http://127.0.0.1:1",
        options=(("block_size", 16.0), ("max_num_seqs", 1.0)),
    )
    server = CachingServer(files)
    server.told_block_size = 32
    with serving(server):
        owner = InstanceOwner(
            settings=settings,
            instance=dataclasses.replace(instance, url=server.url),
            model=Model(name=MODEL, tokenizer=files),
            database=database,
            tokenizing=Tokenizing(Models({MODEL: Model(name=MODEL, tokenizer=files)})),
        )
        owner.start(lambda: False)
        with database.transaction() as conn:
            found = conn.execute(
                sa.select(instance_boot.c.key_agrees, instance_boot.c.alarm).where(instance_boot.c.name == "two")
            ).one()
        owner.stop()
    assert tuple(found) == (False, Mismatch.BLOCK_SIZE)


def test_a_salt_of_its_own_in_every_request_is_found_in_what_is_not_served(
    settings: Settings, database: Database, files: Path
) -> None:
    server = CachingServer(files)
    with bench_at(server, settings, database, files) as bench:
        assert bench.alarm() == (True, None)
        server.salts_each = True
        bench.run(ALL)
        bench.wait_for(Mismatch.CACHE)
        bench.run([chat(1, line) for line in range(100, 110)])
        assert bench.causes()[MissCause.SALT] >= 9


def test_a_new_boot_knows_what_ran_on_the_one_before(settings: Settings, database: Database, files: Path) -> None:
    with bench_at(CachingServer(files), settings, database, files) as bench:
        bench.run(ALL)
    with bench_at(CachingServer(files), settings, database, files) as again:
        again.run([chat(1, line) for line in range(50, 60)], at_least=288)
        causes = again.causes()
    assert causes[MissCause.RESTARTED] >= 1
    assert set(causes) <= {MissCause.RESTARTED, MissCause.IN_FLIGHT}
