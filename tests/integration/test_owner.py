"""The owner of an instance in this process: real Postgres, an engine over HTTP, cohorts handed in by hand."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from fake_server import FakeServer, serving
from seeds import MODEL, QUEUE, add_batch, add_jobs, add_tenant

from service.core.model import BatchStatus
from service.errors import InstanceHeld
from service.fleet import Instance, Model, Models
from service.settings import Settings
from service.store import backlog, dispatching
from service.store.session import Database
from service.store.tables import batch, cohort, instance_boot, job, job_result
from service.tokenizing import Tokenizing
from workers.owner import InstanceOwner, StartStopped

ONE = dispatching.Room(jobs=1, least_cohorts=1, most_cohorts=1)


class Bench:
    """An owner attached to a server, and a tenant with a batch."""

    def __init__(self, settings: Settings, database: Database, server: FakeServer) -> None:
        self.settings = dataclasses.replace(settings, job_tries=2, drain_seconds=600)
        self.database = database
        self.server = server
        self.owner = self.make_owner()

    def make_owner(self) -> InstanceOwner:
        options = (("max_num_seqs", 2.0), ("kv_capacity_tokens", 4096.0), ("block_size", 32.0))
        instance = Instance(name="one", engine="openai", model=MODEL, url=self.server.url, options=options)
        model = Model(name=MODEL)
        return InstanceOwner(
            settings=self.settings,
            instance=instance,
            model=model,
            database=self.database,
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

    def rows(self, *columns: sa.ColumnElement[object]) -> list[tuple[object, ...]]:
        with self.database.transaction() as conn:
            return [tuple(row) for row in conn.execute(sa.select(*columns))]


@pytest.fixture
def bench(settings: Settings, database: Database) -> Iterator[Bench]:
    with serving("honours") as server:
        bench = Bench(settings, database, server)
        bench.owner.start(lambda: False)
        server.requests.clear()
        yield bench
        server.pause.set()
        bench.owner.stop()


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


def test_a_start_is_stopped_and_leaves_no_row_behind(settings: Settings, database: Database) -> None:
    with serving("honours", seconds=0) as server:
        bench = Bench(settings, database, server)
        with pytest.raises(StartStopped):
            bench.owner.start(lambda: True)
        assert bench.rows(instance_boot.c.state) in ([], [("gone",)])


def test_a_failed_start_leaves_no_row_that_holds_the_queue(bench: Bench) -> None:
    with bench.database.transaction() as conn:
        conn.execute(sa.update(instance_boot).values(pid=1, host="another host"))
    second = bench.make_owner()
    with pytest.raises(InstanceHeld):
        second.start(lambda: False)
    assert bench.rows(instance_boot.c.state) == [("ready",)]
