"""The owner of an instance in this process: real Postgres, an engine over HTTP, cohorts handed in by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from fake_server import FakeServer, serving
from feeding import make_claim
from seeds import MODEL, QUEUE, add_batch, add_boot, add_jobs, add_tenant

from service.core.model import BatchStatus
from service.errors import InstanceHeld
from service.fleet import Instance, Model, Models
from service.settings import Settings
from service.store import backlog, dispatching
from service.store.session import Database
from service.store.tables import batch, cohort, instance_boot, job, job_result
from service.tokenizing import Tokenizing
from workers.engines.base import EngineFacts
from workers.engines.simulated import SimulatedEngine
from workers.feeder import Admission, Feeder
from workers.life import Life
from workers.owner import InstanceOwner, StartStopped
from workers.runner import CohortRun
from workers.runs import Runs
from workers.watch import Watch

T = TypeVar("T")
RETURNED = sa.select(sa.func.count()).where(job.c.not_before.is_not(None))
ONE = dispatching.Room(jobs=1, least_cohorts=1, most_cohorts=1)


IN_FLIGHT = 4  # of bulk jobs: max_num_seqs + 4, less the two places for interactive ones


class LostAnswers(Database):
    """Its first commit that returned a job is answered by a broken connection, when told so."""

    loses_answers = False
    lost = 0

    def run(self, work: Callable[[sa.Connection], T]) -> T:
        def watched(conn: sa.Connection) -> tuple[T, bool]:
            before = conn.execute(RETURNED).scalar_one()
            return work(conn), conn.execute(RETURNED).scalar_one() > before

        answer, is_return = super().run(watched)
        if is_return and self.loses_answers and not self.lost:
            self.lost += 1
            raise sa.exc.OperationalError("", None, Exception("server closed the connection unexpectedly"))
        return answer


class SlowStart(Database):
    """Its first transaction waits until the worker has been told to stop, and once more been asked whether it is."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reached, self.released = threading.Event(), threading.Event()
        self.answers = iter([True])

    def run(self, work: Callable[[sa.Connection], T]) -> T:
        self.reached.set()
        self.released.wait(20)
        return super().run(work)

    def is_stopping(self) -> bool:
        if not self.reached.is_set():
            return False
        if next(self.answers, False):
            return True
        self.released.set()
        return True


class Bench:
    """An owner attached to a server, and a tenant with a batch."""

    def __init__(self, settings: Settings, database_url: str, server: FakeServer) -> None:
        self.settings = dataclasses.replace(settings, job_tries=2, drain_seconds=600)
        self.database = LostAnswers(database_url)
        self.server = server
        self.owner = self.make_owner()

    def make_owner(self, database: Database | None = None) -> InstanceOwner:
        options = (("max_num_seqs", 2.0), ("kv_capacity_tokens", 4096.0), ("block_size", 32.0))
        instance = Instance(name="one", engine="openai", model=MODEL, url=self.server.url, options=options)
        model = Model(name=MODEL)
        return InstanceOwner(
            settings=self.settings,
            instance=instance,
            model=model,
            database=database or self.database,
            tokenizing=Tokenizing(Models({MODEL: model})),
        )

    def dispatch(self, count: int) -> dispatching.Message:
        """One cohort of `count` jobs, as the dispatcher would announce it."""
        with self.database.transaction() as conn:
            tenant = add_tenant(conn)
            jobs = add_jobs(conn, tenant, add_batch(conn, tenant), [1] * count)
            boot_id = conn.execute(sa.select(instance_boot.c.id).where(instance_boot.c.state == "ready")).scalar_one()
            row = backlog.NewCohort(
                model=MODEL,
                queue=QUEUE,
                sequence=1,
                priority=1,
                alone=False,
                body_bytes=10,
                estimated_seconds=1.0,
                job_ids=jobs,
                predicted_cached_tokens=[0] * count,
                first_of_group=[True] + [False] * (count - 1),
            )
            backlog.insert_cohorts(conn, [row])
            (message,) = dispatching.dispatch(
                conn, boot_id=boot_id, queue=QUEUE, model=MODEL, room=ONE, interactive=False
            )
        return message

    def run(self, message: dispatching.Message) -> None:
        self.owner.run_cohort(message.cohort_id, message.dispatch_no)

    def at_engine(self) -> tuple[int, int]:
        """(jobs in flight, jobs waiting)"""
        standing = self.owner.standing()
        assert standing is not None
        return standing.running_jobs, standing.waiting_jobs

    def count_waiting(self) -> int:
        """Sessions that wait for another's transaction."""
        waiting = (
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        with self.database.transaction() as conn:
            return int(conn.execute(sa.text(waiting)).scalar_one())

    def rows(self, *columns: sa.ColumnElement[Any]) -> list[tuple[object, ...]]:
        with self.database.transaction() as conn:
            return [tuple(row) for row in conn.execute(sa.select(*columns))]


@pytest.fixture
def bench(settings: Settings, database_url: str) -> Iterator[Bench]:
    with serving("honours") as server:
        bench = Bench(settings, database_url, server)
        bench.owner.start(lambda: False)
        server.requests.clear()
        yield bench
        server.pause.set()
        bench.owner.stop()
        bench.database.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def test_a_cohort_is_answered_and_done(bench: Bench) -> None:
    bench.run(bench.dispatch(5))
    assert bench.rows(job_result.c.outcome, job_result.c.status_code) == [("succeeded", 200)] * 5
    assert bench.rows(cohort.c.state, cohort.c.attempt) == [("done", 1)]
    salts = {request["cache_salt"] for request in bench.server.requests}
    assert salts == {(b"s" * 16).hex()}
    priorities = [request["priority"] for request in bench.server.requests]
    assert sorted(priorities) == sorted(set(priorities))


def test_a_message_counts_once(bench: Bench) -> None:
    message = bench.dispatch(2)
    bench.run(message)
    bench.run(message)
    assert len(bench.server.requests) == 2


def test_a_job_that_was_cancelled_before_its_cohort_was_claimed_does_not_run(bench: Bench) -> None:
    message = bench.dispatch(2)
    with bench.database.transaction() as conn:
        first = sa.select(sa.func.min(job.c.id)).scalar_subquery()
        conn.execute(sa.update(job).where(job.c.id == first).values(cancel_requested_at=sa.func.now()))
    bench.run(message)
    assert len(bench.server.requests) == 1
    assert sorted(bench.rows(job_result.c.outcome)) == [("cancelled",), ("succeeded",)]
    assert bench.rows(cohort.c.state) == [("done",)]


def test_a_server_error_is_tried_again_and_then_kept_with_its_answer(bench: Bench) -> None:
    bench.server.status = 500
    bench.run(bench.dispatch(1))
    assert len(bench.server.requests) == 2
    ((outcome, status, code, response),) = bench.rows(
        job_result.c.outcome, job_result.c.status_code, job_result.c.error_code, job_result.c.response
    )
    assert (outcome, status, code) == ("failed", 500, None)
    assert isinstance(response, bytes)
    assert json.loads(response) == {"error": {"message": "no"}}


def test_a_refusal_is_not_tried_again(bench: Bench) -> None:
    bench.server.status = 400
    bench.run(bench.dispatch(3))
    assert len(bench.server.requests) == 3
    assert bench.rows(job_result.c.outcome, job_result.c.status_code) == [("failed", 400)] * 3


def test_a_long_wait_goes_back_to_the_backlog(bench: Bench) -> None:
    bench.server.status, bench.server.retry_after = 429, 60
    bench.run(bench.dispatch(2))
    assert bench.rows(job.c.cohort_id, job.c.tries, job.c.not_before > sa.func.now()) == [(None, 1, True)] * 2
    assert bench.rows(cohort.c.state) == [("done",)]
    assert bench.rows(job_result.c.job_id) == []


def test_a_lost_lease_ends_the_run_and_nothing_is_written(bench: Bench) -> None:
    bench.server.seconds = 60
    message = bench.dispatch(4)
    thread = threading.Thread(target=bench.run, args=(message,))
    thread.start()
    wait_until(lambda: len(bench.server.requests) > 0)
    with bench.database.transaction() as conn:
        conn.execute(sa.update(cohort).values(state="ready", instance_boot_id=None))
    thread.join(20)  # the next heartbeat finds out
    assert not thread.is_alive()
    assert bench.rows(job_result.c.job_id) == []
    assert bench.rows(cohort.c.state) == [("ready",)]


def test_a_cancelled_batch_ends_what_waits_and_what_runs(bench: Bench) -> None:
    bench.server.seconds = 60
    message = bench.dispatch(9)
    thread = threading.Thread(target=bench.run, args=(message,))
    thread.start()
    wait_until(lambda: len(bench.server.requests) > 0)
    with bench.database.transaction() as conn:
        conn.execute(sa.update(batch).values(status=BatchStatus.CANCELLING))
    thread.join(20)
    assert bench.rows(job_result.c.outcome, job_result.c.error_code) == [("cancelled", "batch_cancelled")] * 9
    assert bench.rows(cohort.c.state) == [("done",)]


def test_a_drain_waits_for_what_runs_until_it_is_asked_again(bench: Bench) -> None:
    bench.server.seconds = 60
    message = bench.dispatch(9)
    run = threading.Thread(target=bench.run, args=(message,))
    run.start()
    wait_until(lambda: len(bench.server.requests) > 0)
    drain = threading.Thread(target=bench.owner.drain)
    drain.start()
    wait_until(lambda: bench.rows(instance_boot.c.state) == [("draining",)])
    assert run.is_alive()
    bench.owner.drain()
    run.join(5)
    drain.join(5)
    assert not run.is_alive()
    assert not drain.is_alive()
    assert bench.rows(cohort.c.state, cohort.c.failures) == [("ready", 0)]
    bench.owner.stop()
    assert bench.rows(instance_boot.c.state, instance_boot.c.gone_reason) == [("gone", "stopped")]


def test_a_start_is_stopped_and_leaves_no_row_behind(settings: Settings, database_url: str) -> None:
    with serving("honours", seconds=0) as server:
        bench = Bench(settings, database_url, server)
        with pytest.raises(StartStopped):
            bench.owner.start(lambda: True)
        assert bench.rows(instance_boot.c.state) in ([], [("gone",)])
        bench.database.close()


def test_a_start_that_is_stopped_while_its_row_is_written_marks_it_gone(settings: Settings, database_url: str) -> None:
    with serving("honours", seconds=0) as server:
        bench = Bench(settings, database_url, server)
        slow = SlowStart(database_url)
        owner = bench.make_owner(slow)
        with pytest.raises(StartStopped):
            owner.start(slow.is_stopping)
        assert bench.rows(instance_boot.c.state, instance_boot.c.gone_reason) == [("gone", "stopped")]
        slow.close()
        bench.database.close()


def test_a_failed_start_leaves_no_row_that_holds_the_queue(bench: Bench) -> None:
    with bench.database.transaction() as conn:
        conn.execute(sa.update(instance_boot).values(pid=1, host="another host"))
    second = bench.make_owner()
    with pytest.raises(InstanceHeld):
        second.start(lambda: False)
    assert bench.rows(instance_boot.c.state) == [("ready",)]


def test_a_dying_server_that_answers_500_crashes_what_it_had_and_gets_nothing_more(bench: Bench) -> None:
    bench.server.seconds = 60
    message = bench.dispatch(9)
    thread = threading.Thread(target=bench.run, args=(message,))
    thread.start()
    wait_until(lambda: len(bench.server.requests) == IN_FLIGHT)
    bench.server.die()
    thread.join(30)
    assert not thread.is_alive()
    assert len(bench.server.requests) == IN_FLIGHT
    assert Counter(bench.rows(job.c.crashes)) == {(0,): 9 - IN_FLIGHT, (1,): IN_FLIGHT}
    assert bench.rows(job_result.c.job_id) == []
    assert bench.rows(cohort.c.state, cohort.c.failures) == [("ready", 1)]


def test_an_error_in_a_run_leaves_nothing_of_it_at_the_engine(bench: Bench) -> None:
    bench.server.seconds = 60
    message = bench.dispatch(9)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bench.run(message)
        except sa.exc.IntegrityError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(bench.server.requests) == IN_FLIGHT)
    with bench.database.transaction() as conn:
        conn.execute(sa.text("alter table job_result add constraint full_up check (false)"))
        conn.execute(sa.update(job).where(job.c.line_no == 1).values(cancel_requested_at=sa.func.now()))
    thread.join(20)
    assert len(errors) == 1
    wait_until(lambda: bench.at_engine() == (0, 0), 5)


def test_a_job_that_went_back_by_a_commit_whose_answer_was_lost_went_back(bench: Bench) -> None:
    bench.server.status, bench.server.retry_after = 429, 60
    message = bench.dispatch(2)
    bench.database.loses_answers = True
    bench.run(message)
    assert bench.database.lost == 1
    assert bench.rows(job.c.cohort_id, job.c.tries) == [(None, 1)] * 2
    assert bench.rows(cohort.c.state) == [("done",)]


def test_two_workers_that_start_together_are_told_apart(bench: Bench) -> None:
    second = bench.make_owner()
    errors: list[BaseException] = []

    def start() -> None:
        try:
            second.start(lambda: False)
        except InstanceHeld as error:
            errors.append(error)

    bench.owner.stop()
    with bench.database.transaction() as conn:
        add_boot(conn, ready=False)
        thread = threading.Thread(target=start)
        thread.start()
        wait_until(lambda: bench.count_waiting() == 1)  # its own row waits for what becomes of ours
    thread.join(20)
    assert [type(error) for error in errors] == [InstanceHeld]


def test_a_run_that_ends_leaves_the_newer_one_of_its_cohort_registered(bench: Bench) -> None:
    engine = SimulatedEngine(Instance(name="one", engine="simulated", model=MODEL), Model(name=MODEL))
    loop = asyncio.new_event_loop()
    facts = EngineFacts(
        version=None,
        kv_capacity_tokens=None,
        block_size=None,
        max_num_seqs=1,
        max_model_len=None,
        honours_salt=True,
        honours_priority=True,
        reports_cached_tokens=True,
    )
    life = Life(
        boot_id=1,
        engine=engine,
        facts=facts,
        key_agrees=None,
        feeder=Feeder(engine=engine, admission=Admission(max_num_seqs=1, kv_capacity_tokens=None), timeout_seconds=1),
        loop=loop,
        watch=Watch(facts=facts),
    )
    older = CohortRun(bench.database, life, make_claim(7), job_tries=1)
    newer = CohortRun(bench.database, life, dataclasses.replace(make_claim(7), attempt=2), job_tries=1)
    runs = Runs()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(runs.registered(older))
        second.enter_context(runs.registered(newer))
        assert (older.is_lost, newer.is_lost) == (True, False)  # else the older would drop the newer's jobs later
        first.close()
        assert runs.ids() == {7}
        second.close()
        assert runs.ids() == frozenset()
    loop.close()
