"""The backlog in memory against real Postgres: nothing is missed and nothing doubled, whatever batches do meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sqlalchemy as sa
from seeds import MODEL, add_batch, add_jobs, add_tenant

from service.core.model import Outcome, Priority
from service.core.plan import InstanceView, Rates
from service.core.policies import make_policy
from service.live_backlog import LiveBacklog
from service.store import backlog
from service.store.session import Database
from service.store.tables import batch, job, job_result

VIEW = InstanceView(
    queue="instance.one",
    block_size=32,
    kv_capacity_tokens=100_000,
    max_num_seqs=16,
    rates=Rates(prefill_tokens_per_second=1000.0, decode_tokens_per_second=500.0),
    boot_id=1,
)


class Reader:
    """A live backlog of one model with one instance, and what was taken from it."""

    def __init__(self, database: Database, window_jobs: int = 1000) -> None:
        self.database = database
        self.live = LiveBacklog(lambda: make_policy("prefix"), window_jobs)
        self.live.policy(MODEL).set_instances([VIEW], 0.0)

    @property
    def waiting(self) -> int:
        return self.live.policy(MODEL).pending_jobs

    def sync(self) -> None:
        while self.live.sync(self.database, [MODEL], 0.0):
            pass

    def take(self, *, bind: bool = True) -> list[int]:
        """One cohort, bound to a row or lost on the way there."""
        cohort = self.live.policy(MODEL).next_cohort(0, 0.0)
        ids = [] if cohort is None else cohort.job_ids.tolist()
        if bind and ids:
            with self.database.transaction() as conn:
                backlog.insert_cohorts(conn, [new_cohort(conn, ids)])
        self.live.settle(self.database, MODEL, ids)
        return ids

    def take_all(self) -> list[int]:
        ids: list[int] = []
        while self.waiting:
            ids += self.take()
        return ids


def new_cohort(conn: sa.Connection, ids: Sequence[int]) -> backlog.NewCohort:
    return backlog.NewCohort(
        model=MODEL,
        queue="instance.one",
        sequence=backlog.next_sequence(conn),
        priority=Priority.NORMAL,
        alone=False,
        body_bytes=0,
        estimated_seconds=1.0,
        job_ids=ids,
        predicted_cached_tokens=[0] * len(ids),
        first_of_group=[False] * len(ids),
    )


def seed(database: Database, n: int, **of_batch: object) -> list[int]:
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        return add_jobs(conn, tenant_id, add_batch(conn, tenant_id, **of_batch), [1] * n)


def change(database: Database, **values: object) -> None:
    with database.transaction() as conn:
        conn.execute(sa.update(batch).values(**values))


def test_a_batch_is_read_once(database: Database) -> None:
    jobs, reader = seed(database, 30), Reader(database)
    reader.sync()
    reader.sync()
    assert reader.waiting == 30
    assert sorted(reader.take_all()) == jobs
    reader.sync()
    assert reader.waiting == 0


def test_who_takes_over_reads_what_is_not_bound(database: Database) -> None:
    jobs, first = seed(database, 30), Reader(database)
    first.sync()
    taken = first.take()
    second = Reader(database)
    second.sync()
    assert sorted(taken + second.take_all()) == jobs


@pytest.mark.parametrize("stop", [{"paused": True}, {"status": "cancelling"}])
def test_a_batch_that_stops_is_forgotten(database: Database, stop: dict[str, object]) -> None:
    seed(database, 30)
    reader = Reader(database)
    reader.sync()
    reader.take()
    change(database, **stop)
    reader.sync()
    assert reader.waiting == 0


def test_a_batch_that_goes_on_is_read_again(database: Database) -> None:
    jobs, reader = seed(database, 30), Reader(database)
    reader.sync()
    taken = reader.take()
    change(database, paused=True)
    reader.sync()
    change(database, paused=False)
    reader.sync()
    assert sorted(taken + reader.take_all()) == jobs


def test_a_pause_that_no_pass_saw_loses_nothing(database: Database) -> None:
    jobs, reader = seed(database, 30), Reader(database)
    reader.sync()
    change(database, paused=True)
    refused = reader.take()
    change(database, paused=False)
    reader.sync()
    assert refused
    assert sorted(reader.take_all()) == jobs


def test_another_priority_is_another_class(database: Database) -> None:
    jobs, reader = seed(database, 30), Reader(database)
    reader.sync()
    change(database, priority=int(Priority.HIGH))
    reader.sync()
    cohort = reader.live.policy(MODEL).next_cohort(0, 0.0)
    assert cohort is not None
    assert cohort.priority == Priority.HIGH
    assert reader.waiting + len(cohort.job_ids) == len(jobs)


def test_a_job_comes_back_when_its_time_has_come_each_time(database: Database) -> None:
    (job_id,) = seed(database, 1)
    reader = Reader(database)
    reader.sync()
    for _ in range(3):
        assert reader.take_all() == [job_id]
        with database.transaction() as conn:
            conn.execute(sa.update(job).values(cohort_id=None, not_before=sa.text("now() + interval '1 hour'")))
        reader.sync()
        assert reader.waiting == 0
        with database.transaction() as conn:
            conn.execute(sa.update(job).values(not_before=sa.text("now() - interval '1 second'")))
        reader.sync()
        reader.sync()
        assert reader.waiting == 1


def test_what_ended_meanwhile_is_not_read(database: Database) -> None:
    jobs, reader = seed(database, 3), Reader(database)
    with database.transaction() as conn:
        conn.execute(sa.insert(job_result).values(job_id=jobs[0], batch_id="batch_1", outcome=Outcome.CANCELLED))
    reader.sync()
    assert sorted(reader.take_all()) == jobs[1:]


def test_intake_goes_on_while_its_first_lines_run(database: Database) -> None:
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        batch_id = add_batch(conn, tenant_id, intake_done=False, intake_line=8_000)
        first = add_jobs(conn, tenant_id, batch_id, [1] * 5)
    reader = Reader(database)
    reader.sync()
    with database.transaction() as conn:
        more = conn.execute(
            sa.insert(job)
            .from_select(
                [c.name for c in job.c if c.name not in ("id", "line_no")] + ["line_no"],
                sa.select(*[c for c in job.c if c.name not in ("id", "line_no")], job.c.line_no + 100),
            )
            .returning(job.c.id)
        ).scalars()
        later = list(more)
        conn.execute(sa.update(batch).values(intake_line=16_000, intake_done=True))
    reader.sync()
    assert sorted(reader.take_all()) == sorted(first + later)


def test_a_batch_of_few_lines_waits_for_the_rest_of_them(database: Database) -> None:
    seed(database, 5, intake_done=False, intake_line=5)
    reader = Reader(database)
    reader.sync()
    assert reader.waiting == 0


def test_memory_is_bounded_by_the_window_and_a_small_tenant_gets_in(database: Database) -> None:
    jobs, reader = seed(database, 100), Reader(database, window_jobs=20)
    reader.sync()
    assert reader.waiting == 20
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "small")
        small = add_jobs(conn, tenant_id, add_batch(conn, tenant_id, "batch_2"), [2] * 3)
    reader.sync()
    assert reader.waiting == 23
    taken: list[int] = []
    while reader.waiting:
        taken += reader.take()
        reader.sync()
        assert reader.waiting <= 23
    assert sorted(taken) == sorted(jobs + small)


def test_retries_of_a_paused_batch_hold_up_no_others_and_come_when_it_goes_on(database: Database) -> None:
    paused = seed(database, 5)
    with database.transaction() as conn:
        tenant_id = add_tenant(conn, "second")
        (other,) = add_jobs(conn, tenant_id, add_batch(conn, tenant_id, "batch_2"), [1])
        conn.execute(sa.update(job).values(not_before=sa.text("now() - interval '1 hour'")))
        conn.execute(sa.update(batch).where(batch.c.id == "batch_1").values(paused=True))
    reader = Reader(database)
    reader.sync()
    assert reader.take_all() == [other]
    with database.transaction() as conn:
        conn.execute(sa.update(batch).values(paused=False))
    reader.sync()
    assert sorted(reader.take_all()) == paused


def test_a_model_that_cannot_be_planned_is_read_anew(database: Database) -> None:
    jobs, reader = seed(database, 5), Reader(database)
    reader.sync()
    reader.live.reset(MODEL)
    assert reader.waiting == 0
    reader.live.policy(MODEL).set_instances([VIEW], 0.0)
    reader.sync()
    assert sorted(reader.take_all()) == jobs
