"""The cohort's state machine against real Postgres: guards, fences, and who may move what."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa
from seeds import FACTS, MODEL, QUEUE, add_batch, add_boot, add_jobs, add_tenant

from service.core.model import BatchStatus, CohortState, LineErrorCode, Outcome
from service.core.usage import Usage
from service.errors import FenceLost, InstanceHeld
from service.store import backlog, cohorts, dispatching, instances, results, stealing
from service.store.session import Database
from service.store.tables import batch, batch_progress, cohort, instance_boot, job, job_result

ROOM = dispatching.Room(jobs=100, least_cohorts=0, most_cohorts=4)


class World:
    """A batch of four jobs, planned as one cohort on one ready boot."""

    def __init__(self, conn: sa.Connection) -> None:
        self.tenant = add_tenant(conn)
        self.batch = add_batch(conn, self.tenant)
        self.jobs = add_jobs(conn, self.tenant, self.batch, [2, 1, 2, 1])
        self.boot = add_boot(conn)
        self.cohort = plan_one(conn, self.jobs)

    def dispatch(self, conn: sa.Connection) -> dispatching.Message:
        (message,) = dispatching.dispatch(
            conn, boot_id=self.boot, queue=QUEUE, model=MODEL, room=ROOM, interactive=False
        )
        return message

    def claim(self, conn: sa.Connection) -> cohorts.Claim:
        message = self.dispatch(conn)
        claim = claim_message(conn, message, self.boot)
        assert claim is not None
        return claim


def plan_one(conn: sa.Connection, jobs: list[int], *, alone: bool = False, sequence: int = 1) -> int:
    row = backlog.NewCohort(
        model=MODEL,
        queue=QUEUE,
        sequence=sequence,
        priority=1,
        alone=alone,
        body_bytes=10,
        estimated_seconds=2.0,
        job_ids=jobs,
        predicted_cached_tokens=[64] * len(jobs),
        first_of_group=[False] * len(jobs),
    )
    (cohort_id,) = backlog.insert_cohorts(conn, [row])
    return cohort_id


def claim_message(conn: sa.Connection, message: dispatching.Message, boot: int) -> cohorts.Claim | None:
    return cohorts.claim(
        conn,
        cohort_id=message.cohort_id,
        dispatch_no=message.dispatch_no,
        boot_id=boot,
        queue=message.queue,
        lease_seconds=30,
    )


def finished(job_id: int, outcome: Outcome = Outcome.SUCCEEDED) -> results.FinishedJob:
    return results.FinishedJob(
        job_id=job_id,
        outcome=outcome,
        status_code=200,
        error_code=None,
        error_message=None,
        response=b"{}",
        usage=Usage(prompt_tokens=384, cached_tokens=64, completion_tokens=8, reasoning_tokens=None),
        predicted_cached_tokens=64,
        miss_cause=None,
        queue_ms=5,
        run_ms=7,
        started_ms_ago=7,
    )


def state_of(conn: sa.Connection, cohort_id: int) -> CohortState:
    return CohortState(conn.execute(sa.select(cohort.c.state).where(cohort.c.id == cohort_id)).scalar_one())


@pytest.fixture
def world(database: Database) -> World:
    with database.transaction() as conn:
        return World(conn)


def test_a_cohort_runs_once_from_ready_to_done(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        jobs = cohorts.load_jobs(conn, claim)
        assert [item.job_id for item in jobs] == world.jobs  # the planned order, as given
        assert not cohorts.finish(conn, claim)
        assert results.record(conn, claim, [finished(item.job_id) for item in jobs]) == 4
        assert cohorts.finish(conn, claim)
        assert state_of(conn, world.cohort) is CohortState.DONE
        progress = conn.execute(sa.select(batch_progress)).one()
    assert (progress.completed, progress.prompt_tokens, progress.cached_tokens) == (4, 4 * 384, 4 * 64)


def test_started_at_comes_from_the_database_clock(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        results.record(conn, claim, [finished(world.jobs[0])])
        row = conn.execute(sa.select(job_result.c.started_at, job_result.c.finished_at)).one()
    assert isinstance(row.started_at, datetime)
    assert row.finished_at - row.started_at == timedelta(milliseconds=7)


def test_a_message_is_good_for_one_claim(database: Database, world: World) -> None:
    with database.transaction() as conn:
        message = world.dispatch(conn)
        assert claim_message(conn, message, world.boot) is not None
        assert claim_message(conn, message, world.boot) is None


def test_a_moved_cohort_makes_its_old_message_stale(database: Database, world: World) -> None:
    with database.transaction() as conn:
        message = world.dispatch(conn)
        instances.mark_gone(conn, world.boot, "test")
        assert state_of(conn, world.cohort) is CohortState.READY
        assert claim_message(conn, message, world.boot) is None


def test_a_draining_boot_claims_nothing(database: Database, world: World) -> None:
    with database.transaction() as conn:
        message = world.dispatch(conn)
        instances.mark_draining(conn, world.boot)
        assert claim_message(conn, message, world.boot) is None


def test_writes_of_an_older_attempt_are_refused(database: Database, world: World) -> None:
    with database.transaction() as conn:
        old = world.claim(conn)
        conn.execute(sa.update(cohort).values(lease_expires_at=sa.text("now() - interval '1 second'")))
        assert dispatching.expire_leases(conn) == [world.cohort]
        new = world.claim(conn)
        assert new.attempt == old.attempt + 1
        assert new.moved
        with pytest.raises(FenceLost):
            results.record(conn, old, [finished(world.jobs[0])])
        assert not cohorts.finish(conn, old)
        assert not cohorts.release(conn, old, reason="late", failure=False)
        with pytest.raises(FenceLost):
            cohorts.return_job(conn, old, world.jobs[0], 1)
        assert results.record(conn, new, [finished(world.jobs[0])]) == 1


def test_a_renewed_lease_is_not_reaped(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        conn.execute(sa.update(cohort).values(lease_expires_at=sa.text("now() - interval '1 second'")))
        assert cohorts.renew(conn, world.boot, 30, [claim.cohort_id]) == {claim.cohort_id}
        assert dispatching.expire_leases(conn) == []


def test_only_jobs_without_a_result_run_again(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        results.record(conn, claim, [finished(world.jobs[0]), finished(world.jobs[1])])
        assert cohorts.release(conn, claim, reason="drain", failure=False)
        again = world.claim(conn)
        assert {item.job_id for item in cohorts.load_jobs(conn, again)} == set(world.jobs[2:])
        assert conn.execute(sa.select(cohort.c.failures)).scalar_one() == 0


def test_a_result_is_recorded_once(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        assert results.record(conn, claim, [finished(world.jobs[0])]) == 1
        assert results.record(conn, claim, [finished(world.jobs[0], Outcome.FAILED)]) == 0
        assert conn.execute(sa.select(job_result.c.outcome)).scalar_one() == Outcome.SUCCEEDED
        assert conn.execute(sa.select(sa.func.sum(batch_progress.c.completed))).scalar_one() == 1


def test_a_returned_job_leaves_the_cohort_and_waits(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        assert cohorts.return_job(conn, claim, world.jobs[0], 60)
        assert not cohorts.return_job(conn, claim, world.jobs[0], 60)  # again, as after a commit whose answer was lost
        assert results.record(conn, claim, [finished(world.jobs[0])]) == 0
        results.record(conn, claim, [finished(job_id) for job_id in world.jobs[1:]])
        assert cohorts.finish(conn, claim)
        start = backlog.RetryPosition()
        assert backlog.jobs_to_retry(conn, MODEL, start, 10) == []
        conn.execute(sa.update(job).values(not_before=sa.text("now()")))
        (found,) = backlog.jobs_to_retry(conn, MODEL, start, 10)
        assert (found.batch_id, found.job.job_id) == ("batch_1", world.jobs[0])
        assert backlog.jobs_to_retry(conn, MODEL, found.position, 10) == []
        assert backlog.jobs_after(conn, "batch_1", MODEL, 0, 10) == []


def test_two_failures_take_a_cohort_apart_and_each_job_runs_alone(database: Database, world: World) -> None:
    with database.transaction() as conn:
        for _ in range(2):
            claim = world.claim(conn)
            assert cohorts.release(conn, claim, reason="engine died", failure=True, crashed_jobs=world.jobs[:1])
        assert (
            dispatching.dispatch(conn, boot_id=world.boot, queue=QUEUE, model=MODEL, room=ROOM, interactive=False) == []
        )
        (suspect,) = backlog.suspects(conn, 10)
        assert backlog.isolate(conn, suspect) == 4
        assert state_of(conn, world.cohort) is CohortState.DEAD
        first = dispatching.dispatch_suspects(conn, boot_id=world.boot, queue=QUEUE, model=MODEL)
        assert len(first) == 1
        assert dispatching.dispatch_suspects(conn, boot_id=world.boot, queue=QUEUE, model=MODEL) == []
        assert conn.execute(sa.select(job.c.crashes).where(job.c.id == world.jobs[0])).scalar_one() == 2


def test_a_job_that_loses_its_worker_while_alone_is_blamed(database: Database) -> None:
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        jobs = add_jobs(conn, tenant_id, add_batch(conn, tenant_id), [1])
        boot = add_boot(conn)
        plan_one(conn, jobs, alone=True)
        (message,) = dispatching.dispatch_suspects(conn, boot_id=boot, queue=QUEUE, model=MODEL)
        assert claim_message(conn, message, boot) is not None
        instances.mark_gone(conn, boot, "killed")
        assert conn.execute(sa.select(job.c.crashes)).scalar_one() == 1


def test_a_cancel_ends_what_does_not_run_and_names_what_does(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        idle = add_jobs(conn, world.tenant, add_batch(conn, world.tenant, "batch_2"), [3, 3])
        conn.execute(sa.update(batch).values(status=BatchStatus.CANCELLING))
        for batch_id, ended in (("batch_1", 0), ("batch_2", len(idle))):
            assert ended == results.end_jobs(
                conn,
                batch_id,
                outcome=Outcome.CANCELLED,
                error_code=LineErrorCode.BATCH_CANCELLED,
                only_idle=True,
            )
        assert cohorts.jobs_to_abort(conn, claim.boot_id) == dict.fromkeys(world.jobs, Outcome.CANCELLED)


def test_late_answers_lose_to_the_primary_key(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        results.end_jobs(
            conn, "batch_1", outcome=Outcome.EXPIRED, error_code=LineErrorCode.BATCH_EXPIRED, only_idle=False
        )
        assert results.record(conn, claim, [finished(job_id) for job_id in world.jobs]) == 0
        assert cohorts.finish(conn, claim)


def test_a_cancelled_or_paused_batch_is_not_planned(database: Database, world: World) -> None:
    with database.transaction() as conn:
        other = add_batch(conn, world.tenant, "batch_2", paused=True)
        jobs = add_jobs(conn, world.tenant, other, [5])
        assert [found.id for found in backlog.open_batches(conn, 10)] == ["batch_1"]
        plan_one(conn, jobs, sequence=2)
        n_jobs = conn.execute(sa.select(cohort.c.n_jobs).where(cohort.c.sequence == 2)).scalar_one()
        assert n_jobs == 0


def test_a_batch_still_in_intake_waits_for_the_rest_of_its_lines(database: Database, world: World) -> None:
    with database.transaction() as conn:
        other = add_batch(conn, world.tenant, "batch_2", intake_done=False)

        def is_open(least_lines: int) -> bool:
            return other in [found.id for found in backlog.open_batches(conn, least_lines)]

        conn.execute(sa.update(batch).where(batch.c.id == other).values(intake_line=3))
        assert is_open(3)
        assert not is_open(4)
        conn.execute(sa.update(batch).values(intake_done=True))
        assert is_open(4)


def test_batches_come_by_deadline(database: Database, world: World) -> None:
    with database.transaction() as conn:
        soon = sa.text("now() + interval '1 hour'")
        add_batch(conn, world.tenant, "batch_2", expires_at=soon, priority=2)
        first, second = backlog.open_batches(conn, 10)
        assert (first.id, first.priority, second.id) == ("batch_2", 2, "batch_1")
        assert 3500 < first.seconds_left <= 3600


def test_jobs_are_read_by_model_and_in_order(database: Database, world: World) -> None:
    with database.transaction() as conn:
        ids = add_jobs(conn, world.tenant, add_batch(conn, world.tenant, "batch_2"), [5, 6, 7])
        conn.execute(sa.update(job).where(job.c.id == ids[1]).values(model="other"))

        def after(model: str, last: int, limit: int = 10) -> list[int]:
            return [found.job_id for found in backlog.jobs_after(conn, "batch_2", model, last, limit)]

        assert after(MODEL, 0) == [ids[0], ids[2]]
        assert after(MODEL, ids[0]) == [ids[2]]
        assert after(MODEL, 0, limit=1) == [ids[0]]
        assert after("other", 0) == [ids[1]]


def test_a_steal_moves_the_tail_and_corrects_its_first_prediction(database: Database, world: World) -> None:
    with database.transaction() as conn:
        jobs = add_jobs(conn, world.tenant, add_batch(conn, world.tenant, "batch_2"), [8, 8])
        last = plan_one(conn, jobs, sequence=2)
        tail = stealing.tail_of(conn, QUEUE, MODEL)
        assert tail is not None
        assert (tail.cohort_id, [item.job_id for item in tail.jobs]) == (last, jobs)
        stealing.rebind(conn, last, "instance.two", first_predicted=0)
        predicted = conn.execute(
            sa.select(job.c.predicted_cached_tokens).where(job.c.cohort_id == last).order_by(job.c.cohort_position)
        ).scalars()
        assert list(predicted) == [0, 64]
        assert conn.execute(sa.select(cohort.c.moved).where(cohort.c.id == last)).scalar_one()


def test_what_a_boot_was_given_last_is_known_as_far_as_its_cache_goes(database: Database, world: World) -> None:
    with database.transaction() as conn:
        assert stealing.keys_run(conn, world.boot, 10_000) == []
        world.dispatch(conn)
        keys = list(conn.execute(sa.select(job.c.prefix_key).order_by(job.c.prefix_key)).scalars())
        assert stealing.keys_run(conn, world.boot, 10_000) == keys
        assert len(stealing.keys_run(conn, world.boot, 800)) == 2  # some 330 tokens each that were new


def test_a_lost_message_is_sent_again_under_its_number(database: Database, world: World) -> None:
    with database.transaction() as conn:
        message = world.dispatch(conn)
        assert dispatching.lost_messages(conn, 10) == []
        conn.execute(sa.update(cohort).values(dispatched_at=sa.text("now() - interval '11 seconds'")))
        assert dispatching.lost_messages(conn, 10) == [message]
        assert dispatching.lost_messages(conn, 10) == []


def test_a_live_holder_keeps_its_queue_and_a_silent_one_loses_it(database: Database, world: World) -> None:
    with database.transaction() as conn:
        with pytest.raises(InstanceHeld, match="process 1 on here"):
            add_boot(conn, pid=2)
        conn.execute(sa.update(instance_boot).values(heartbeat_at=sa.text("now() - interval '16 seconds'")))
        successor = add_boot(conn, pid=2)
        assert successor != world.boot
        assert not instances.heartbeat(conn, world.boot, 0, 0)
        assert not instances.mark_ready(conn, world.boot, FACTS)


def test_silent_boots_are_reaped_with_their_cohorts(database: Database, world: World) -> None:
    with database.transaction() as conn:
        world.claim(conn)
        assert instances.reap_boots(conn, 15) == []
        conn.execute(sa.update(instance_boot).values(heartbeat_at=sa.text("now() - interval '16 seconds'")))
        assert instances.reap_boots(conn, 15) == [world.boot]
        row = conn.execute(sa.select(cohort.c.state, cohort.c.failures)).one()
        assert (row.state, row.failures) == (CohortState.READY, 1)


def test_the_last_key_of_a_queue_is_where_its_run_goes_on(database: Database, world: World) -> None:
    with database.transaction() as conn:
        last = conn.execute(sa.select(job.c.prefix_key).where(job.c.id == world.jobs[-1])).scalar_one()
        assert backlog.last_keys(conn, [(world.boot, QUEUE)]) == {QUEUE: last}
        claim = world.claim(conn)
        assert backlog.last_keys(conn, [(world.boot, QUEUE)]) == {QUEUE: last}
        assert backlog.last_keys(conn, [(claim.boot_id + 1, QUEUE)]) == {}


def test_a_tail_is_split_in_planned_order(database: Database, world: World) -> None:
    with database.transaction() as conn:
        tail = stealing.tail_of(conn, QUEUE, MODEL)
        assert tail is not None
        second = stealing.split_tail(conn, tail, at=1)
        rows = conn.execute(sa.select(cohort.c.id, cohort.c.n_jobs, cohort.c.estimated_seconds).order_by(cohort.c.id))
        assert [tuple(row) for row in rows] == [(world.cohort, 1, 0.5), (second, 3, 1.5)]
        first, _ = dispatching.dispatch(
            conn, boot_id=world.boot, queue=QUEUE, model=MODEL, room=ROOM, interactive=False
        )
        claim = claim_message(conn, first, world.boot)
        assert claim is not None
        assert [item.job_id for item in cohorts.load_jobs(conn, claim)] == world.jobs[:1]


def test_a_message_nobody_hears_brings_the_cohort_back(database: Database, world: World) -> None:
    with database.transaction() as conn:
        world.dispatch(conn)
        for _ in range(6):
            conn.execute(sa.update(cohort).values(dispatched_at=sa.text("now() - interval '11 seconds'")))
            assert dispatching.take_back_unheard(conn, 10) == []
            assert len(dispatching.lost_messages(conn, 10)) == 1
        conn.execute(sa.update(cohort).values(dispatched_at=sa.text("now() - interval '11 seconds'")))
        assert dispatching.lost_messages(conn, 10) == []
        assert dispatching.take_back_unheard(conn, 10) == [world.cohort]
        assert state_of(conn, world.cohort) is CohortState.READY


def test_a_job_may_wait_longer_than_an_integer_of_milliseconds(database: Database, world: World) -> None:
    with database.transaction() as conn:
        conn.execute(sa.update(job).values(created_at=sa.text("now() - interval '30 days'")))
        assert {item.queued_ms for item in cohorts.load_jobs(conn, world.claim(conn))} == {2**31 - 1}


def test_no_bulk_cohort_overtakes_a_suspect(database: Database, world: World) -> None:
    with database.transaction() as conn:
        tenant_jobs = add_jobs(conn, world.tenant, add_batch(conn, world.tenant, "batch_2"), [5, 6, 7])
        plan_one(conn, tenant_jobs[:1], alone=True, sequence=2)
        behind = plan_one(conn, tenant_jobs[1:], sequence=3)
        (message,) = dispatching.dispatch(
            conn, boot_id=world.boot, queue=QUEUE, model=MODEL, room=ROOM, interactive=False
        )
        assert message.cohort_id == world.cohort
        assert state_of(conn, behind) is CohortState.READY


def test_jobs_that_ended_unplanned_leave_the_backlog(database: Database, world: World) -> None:
    with database.transaction() as conn:
        ids = add_jobs(conn, world.tenant, add_batch(conn, world.tenant, "batch_2"), [5, 6])
        assert backlog.jobs_by_batch(conn, ids) == [("batch_2", 2, 2)]
        results.end_jobs(
            conn, "batch_2", outcome=Outcome.CANCELLED, error_code=LineErrorCode.BATCH_CANCELLED, only_idle=True
        )
        assert backlog.jobs_after(conn, "batch_2", MODEL, 0, 10) == []
        assert backlog.jobs_by_batch(conn, ids) == [("batch_2", 2, 0)]


def test_a_failed_batch_is_aborted_where_it_runs(database: Database, world: World) -> None:
    with database.transaction() as conn:
        claim = world.claim(conn)
        conn.execute(sa.update(batch).values(status=BatchStatus.FAILED))
        assert cohorts.jobs_to_abort(conn, claim.boot_id) == dict.fromkeys(world.jobs, Outcome.CANCELLED)


def test_a_suspect_goes_to_no_boot_that_is_gone(database: Database) -> None:
    with database.transaction() as conn:
        tenant_id = add_tenant(conn)
        jobs = add_jobs(conn, tenant_id, add_batch(conn, tenant_id), [1])
        boot = add_boot(conn)
        plan_one(conn, jobs, alone=True)
        instances.mark_gone(conn, boot, "test")
        assert dispatching.dispatch_suspects(conn, boot_id=boot, queue=QUEUE, model=MODEL) == []


def test_what_a_gone_boot_still_has_goes_back(database: Database, world: World) -> None:
    with database.transaction() as conn:
        world.dispatch(conn)
        conn.execute(sa.update(instance_boot).values(state="gone"))
        assert instances.release_stranded(conn) == [world.cohort]
        assert state_of(conn, world.cohort) is CohortState.READY
        assert instances.release_stranded(conn) == []


def test_a_worker_frozen_in_its_claim_blocks_no_reaper(database: Database, world: World) -> None:
    with database.transaction() as conn:
        message = world.dispatch(conn)
        conn.execute(sa.update(cohort).values(dispatched_at=sa.text("now() - interval '11 seconds'")))
    with database.transaction() as frozen:
        assert claim_message(frozen, message, world.boot) is not None
        with database.transaction() as conn:
            conn.execute(sa.text("set local lock_timeout = '2s'"))
            assert dispatching.lost_messages(conn, 10) == []
            assert dispatching.expire_leases(conn) == []
