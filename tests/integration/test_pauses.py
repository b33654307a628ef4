"""Pause, class and deadline of a batch reach what waits, in memory and in cohorts that are written and not out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa
from seeds import MODEL, QUEUE, add_batch, add_boot, add_jobs, add_tenant

from service.broker import Publisher, make_app
from service.core.model import CohortState, Priority
from service.dispatcher import Dispatcher
from service.settings import Settings
from service.store import backlog, pauses
from service.store.changes import Change, ChangeOutcome, change_batch
from service.store.session import Database
from service.store.tables import batch, cohort, job, job_result

OUT = (CohortState.DISPATCHED, CohortState.DONE)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """No heartbeat comes from the boots of these tests: they stay fresh however slow the machine is."""
    return replace(settings, stale_boot_seconds=600.0)


@pytest.fixture
def dispatcher(settings: Settings, database: Database, broker_url: str) -> Dispatcher:
    return Dispatcher(settings, database, Publisher(make_app(settings, broker_url, queue="control")))


def seed(database: Database, *batches: tuple[str, int]) -> list[list[int]]:
    """Batches of so many jobs each, and one ready boot; the ids of their jobs."""
    with database.transaction() as conn:
        add_boot(conn)
        tenant_id = add_tenant(conn)
        return [add_jobs(conn, tenant_id, add_batch(conn, tenant_id, name), [1] * n) for name, n in batches]


def change(database: Database, batch_id: str, **values: object) -> None:
    with database.transaction() as conn:
        assert change_batch(conn, batch_id, Change(**values)) is ChangeOutcome.DONE  # type: ignore[arg-type]


def in_states(database: Database, batch_id: str, *states: CohortState) -> set[int]:
    with database.transaction() as conn:
        statement = sa.select(job.c.id).join(cohort, cohort.c.id == job.c.cohort_id)
        return set(conn.execute(statement.where(job.c.batch_id == batch_id, cohort.c.state.in_(states))).scalars())


def move(database: Database, source: CohortState, to: CohortState) -> None:
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).where(cohort.c.state == source).values(state=to))


def write_cohort(database: Database, jobs: list[int]) -> int:
    row = backlog.NewCohort(
        model=MODEL,
        queue=QUEUE,
        sequence=1,
        priority=Priority.NORMAL,
        alone=False,
        body_bytes=0,
        estimated_seconds=1.0,
        job_ids=jobs,
        predicted_cached_tokens=[0] * len(jobs),
        first_of_group=[False] * len(jobs),
    )
    with database.transaction() as conn:
        (cohort_id,) = backlog.insert_cohorts(conn, [row])
    return cohort_id


def test_of_a_written_cohort_only_the_jobs_of_a_paused_batch_stay(database: Database, dispatcher: Dispatcher) -> None:
    held, free = seed(database, ("held", 3), ("free", 2))
    cohort_id = write_cohort(database, [held[0], free[0], held[1], free[1], held[2]])
    with database.transaction() as conn:
        conn.execute(sa.insert(job_result).values(job_id=held[2], batch_id="held", outcome="cancelled"))
    change(database, "held", paused=True)
    assert dispatcher.step() == 1
    assert in_states(database, "free", CohortState.DISPATCHED) == set(free)
    assert in_states(database, "held", CohortState.DISPATCHED) == {held[2]}  # it has its result: nobody runs it
    with database.transaction() as conn:
        assert conn.scalar(sa.select(cohort.c.n_jobs).where(cohort.c.id == cohort_id)) == 3
    change(database, "held", paused=False)
    dispatcher.step()
    assert in_states(database, "held", CohortState.DISPATCHED) == set(held)


def test_a_cohort_of_a_paused_batch_alone_is_done_and_its_jobs_run_when_it_goes_on(
    database: Database, dispatcher: Dispatcher
) -> None:
    (jobs,) = seed(database, ("held", 4))
    assert dispatcher.step() > 0
    change(database, "held", paused=True)
    move(database, CohortState.DISPATCHED, CohortState.READY)  # given back by an instance that stops
    assert dispatcher.step() == 0
    with database.transaction() as conn:
        assert set(conn.execute(sa.select(cohort.c.state, cohort.c.n_jobs)).all()) == {("done", 0)}
    change(database, "held", paused=False)
    assert dispatcher.step() > 0
    assert in_states(database, "held", CohortState.DISPATCHED) == set(jobs)


def test_what_is_out_finishes(database: Database, dispatcher: Dispatcher) -> None:
    (jobs,) = seed(database, ("held", 4))
    dispatcher.step()
    change(database, "held", paused=True)
    dispatcher.step()
    assert in_states(database, "held", CohortState.DISPATCHED) == set(jobs)


def test_a_suspect_of_a_paused_batch_blocks_nobody(database: Database, dispatcher: Dispatcher) -> None:
    held, free = seed(database, ("held", 1), ("free", 2))
    write_cohort(database, held)
    with database.transaction() as conn:
        conn.execute(sa.update(cohort).values(alone=True))
    change(database, "held", paused=True)
    dispatcher.step()
    assert in_states(database, "held", CohortState.DISPATCHED) == set()
    assert in_states(database, "free", CohortState.DISPATCHED) == set(free)


def test_a_pause_that_was_over_before_the_next_pass_loses_no_job(
    database: Database, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause comes when the backlog is read already, the end of it before it is read again."""
    (jobs,) = seed(database, ("held", 4))
    write = backlog.insert_cohorts

    def write_then_pause(conn: sa.Connection, planned: list[backlog.NewCohort]) -> list[int]:
        ids = write(conn, planned)
        if planned:
            conn.execute(sa.update(batch).values(paused=True))
        return ids

    monkeypatch.setattr(backlog, "insert_cohorts", write_then_pause)
    assert dispatcher.step() == 0
    monkeypatch.undo()
    change(database, "held", paused=False)
    assert dispatcher.step() > 0
    assert in_states(database, "held", CohortState.DISPATCHED) == set(jobs)


@contextmanager
def dispatching(database: Database, dispatcher: Dispatcher) -> Iterator[threading.Semaphore]:
    """The dispatcher at work with an engine that answers at once; the semaphore counts its passes."""
    stop, passes = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        while not stop.is_set():
            dispatcher.step()
            passes.release()
            move(database, CohortState.DISPATCHED, CohortState.DONE)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield passes
    finally:
        stop.set()
        thread.join()


def test_nothing_of_a_paused_batch_goes_out_once_the_pause_was_answered(
    database: Database, dispatcher: Dispatcher
) -> None:
    (jobs,) = seed(database, ("held", 1500))
    rounds_with_work_left = 0
    with dispatching(database, dispatcher) as passes:
        for _ in range(12):
            passes.acquire()
            change(database, "held", paused=True)
            was_out = in_states(database, "held", *OUT)
            for _ in range(3):
                passes.acquire()
            while passes.acquire(blocking=False):
                pass
            passes.acquire()
            passes.acquire()  # one whole pass at least began after the pause
            assert in_states(database, "held", *OUT) == was_out
            rounds_with_work_left += len(was_out) < len(jobs)
            change(database, "held", paused=False)
        while len(in_states(database, "held", *OUT)) < len(jobs):
            passes.acquire()
    assert rounds_with_work_left >= 3
    assert in_states(database, "held", *OUT) == set(jobs)


def test_a_raised_class_overtakes_what_waits(database: Database, dispatcher: Dispatcher) -> None:
    _, later = seed(database, ("first", 200), ("second", 20))
    dispatcher.step()
    assert in_states(database, "second", CohortState.DISPATCHED) == set()
    change(database, "second", priority=Priority.HIGH)
    move(database, CohortState.DISPATCHED, CohortState.DONE)
    dispatcher.step()
    assert in_states(database, "second", CohortState.DISPATCHED) == set(later)


def test_a_nearer_deadline_reaches_the_backlog_in_memory(database: Database, dispatcher: Dispatcher) -> None:
    seed(database, ("first", 200), ("second", 20))
    with database.transaction() as conn:
        before = backlog.open_batches(conn, 1)
    change(database, "second", completion_window="1h", window_seconds=3600)
    with database.transaction() as conn:
        after = backlog.open_batches(conn, 1)
    assert [item.id for item in after] == ["second", "first"]
    assert after[0].order != before[1].order
    assert after[1].order == before[0].order
    assert after[0].expires_at < before[1].expires_at - timedelta(hours=20)


def test_hold_back_looks_at_its_own_queue_alone(database: Database) -> None:
    (jobs,) = seed(database, ("held", 2))
    write_cohort(database, jobs)
    change(database, "held", paused=True)
    with database.transaction() as conn:
        assert pauses.hold_back(conn, "instance.other", MODEL) == frozenset()
        assert pauses.hold_back(conn, QUEUE, MODEL) == {"held"}
        assert pauses.hold_back(conn, QUEUE, MODEL) == frozenset()


def test_a_pause_is_answered_behind_a_dispatch_under_way_and_holds_the_next(database: Database) -> None:
    (jobs,) = seed(database, ("held", 2))
    write_cohort(database, jobs)
    pausing = threading.Thread(target=change, args=(database, "held"), kwargs={"paused": True})
    with database.transaction() as conn:
        assert pauses.hold_back(conn, QUEUE, MODEL) == frozenset()
        pausing.start()
        while not waits_for_advisory_lock(database):
            assert pausing.is_alive()
    pausing.join()
    with database.transaction() as conn:
        assert pauses.hold_back(conn, QUEUE, MODEL) == {"held"}


def waits_for_advisory_lock(database: Database) -> bool:
    waiting = sa.text(
        "select exists (select 1 from pg_locks where locktype = 'advisory' and not granted"
        " and database = (select oid from pg_database where datname = current_database()))"
    )
    with database.transaction() as conn:
        return bool(conn.scalar(waiting))
