"""Cohorts as their worker moves them: claim, load, renew, give back, finish. Every write is fenced by the attempt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BatchStatus, CohortState, Outcome, Priority
from service.errors import FenceLost
from service.store.backlog import SINGLES_CHANNEL
from service.store.clock import RELAXED, later
from service.store.frozen import Frozen
from service.store.listen import notify
from service.store.tables import batch, cohort, cohort_event, instance_boot, job, job_result, tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker's hold on one cohort: the attempt number is the fence of everything it writes."""

    cohort_id: int
    attempt: int
    boot_id: int
    priority: int
    sequence: int
    alone: bool
    model: str
    moved: bool  # it ran or was planned elsewhere before: what its neighbours left is in another cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """One job of a claimed cohort that has no result yet."""

    job_id: int
    batch_id: str | None
    endpoint: str
    body: bytes
    salt: str
    prefix_key: bytes
    prompt_tokens: int
    predicted_output_tokens: int
    predicted_cached_tokens: int
    first_of_group: bool
    tries: int
    crashes: int
    queued_ms: int
    stream_to: str | None = None  # where its answer is relayed while it comes
    is_cancelled: bool = False  # a single job: while its message was on its way


def claim(
    conn: sa.Connection, *, cohort_id: int, dispatch_no: int, boot_id: int, queue: str, lease_seconds: float
) -> Claim | None:
    """dispatched -> running under a new attempt. None: the message is stale (moved, claimed or ended meanwhile), or
    this boot is no longer one that takes work.

    Relaxed: a claim that a crash of Postgres takes back is lost like a lease, and its cohort is dispatched again.
    """
    row = _CLAIM.run(
        conn,
        cohort_id=cohort_id,
        dispatch_number=dispatch_no,
        boot_id=boot_id,
        on_queue=queue,
        lease=timedelta(seconds=lease_seconds),
    ).one_or_none()
    if row is None:
        return None
    return Claim(
        cohort_id=cohort_id,
        attempt=row.attempt,
        boot_id=boot_id,
        priority=row.priority,
        sequence=row.sequence,
        alone=row.alone,
        model=row.model,
        moved=row.moved or row.attempt > 1,
    )


def _claiming() -> sa.Select[Any]:
    """The claim and its event."""
    held = (
        sa.update(cohort)
        .where(
            cohort.c.id == sa.bindparam("cohort_id"),
            cohort.c.state == CohortState.DISPATCHED,
            cohort.c.dispatch_no == sa.bindparam("dispatch_number"),
            cohort.c.instance_boot_id == sa.bindparam("boot_id"),
            cohort.c.queue == sa.bindparam("on_queue"),
            sa.exists().where(instance_boot.c.id == cohort.c.instance_boot_id, instance_boot.c.state == "ready"),
        )
        .values(
            state=CohortState.RUNNING,
            attempt=cohort.c.attempt + 1,
            started_at=func.now(),
            lease_expires_at=func.now() + sa.bindparam("lease", type_=sa.Interval),
        )
        .returning(cohort, RELAXED)
        .cte("held")
    )
    event = sa.select(held.c.id, held.c.attempt, sa.literal("claimed"), held.c.instance_boot_id)
    said = sa.insert(cohort_event).from_select(("cohort_id", "attempt", "kind", "instance_boot_id"), event).cte("said")
    columns = (held.c.attempt, held.c.priority, held.c.sequence, held.c.alone, held.c.model, held.c.moved)
    return sa.select(*columns, held.c.relaxed).add_cte(said)


_CLAIM = Frozen(_claiming())


def load_jobs(conn: sa.Connection, claim: Claim) -> list[ClaimedJob]:
    """The jobs of a claimed cohort that have no result, in planned order."""
    rows = _JOBS.run(conn, cohort=claim.cohort_id)
    return [ClaimedJob(**row._mapping) for row in rows]


_MAX_INT = 2**31 - 1  # ms: 24.8 days, and a job may wait longer
_QUEUED_MS = func.extract("epoch", func.now() - job.c.created_at) * 1000
_CLAIMED = [
    job.c.id.label("job_id"),
    job.c.batch_id,
    job.c.endpoint,
    job.c.body,
    func.encode(tenant.c.salt, "hex").label("salt"),
    job.c.prefix_key,
    job.c.prompt_tokens,
    job.c.predicted_output_tokens,
    func.coalesce(job.c.predicted_cached_tokens, 0).label("predicted_cached_tokens"),
    func.coalesce(job.c.first_of_group, sa.false()).label("first_of_group"),
    job.c.tries,
    job.c.crashes,
    job.c.cancel_requested_at.is_not(None).label("is_cancelled"),
    job.c.stream_to,
    sa.cast(func.least(_MAX_INT, func.greatest(0, _QUEUED_MS)), sa.Integer).label("queued_ms"),
]
_JOBS = Frozen(
    sa.select(*_CLAIMED)
    .join(tenant, tenant.c.id == job.c.tenant_id)
    .where(job.c.cohort_id == sa.bindparam("cohort"), ~sa.exists().where(job_result.c.job_id == job.c.id))
    .order_by(job.c.cohort_position, job.c.id)
)


def renew(conn: sa.Connection, boot_id: int, lease_seconds: float, cohort_ids: Collection[int]) -> set[int]:
    """Renew the leases of the cohorts that a boot knows it runs, in one UPDATE; the ids that it still holds.

    Only those: a claim whose commit was answered by a broken connection runs nowhere, and its lease must expire.
    """
    rows = conn.execute(
        sa.update(cohort)
        .where(
            cohort.c.instance_boot_id == boot_id,
            cohort.c.state == CohortState.RUNNING,
            cohort.c.id.in_(sorted(cohort_ids)),
        )
        .values(lease_expires_at=later(lease_seconds))
        .returning(cohort.c.id)
    )
    return {int(row.id) for row in rows}


def jobs_to_abort(conn: sa.Connection, boot_id: int) -> dict[int, Outcome]:
    """Jobs in this boot's running cohorts whose batch, or who themselves, are being cancelled or are past their
    deadline, and how they shall end."""
    rows = conn.execute(
        sa.select(
            job.c.id,
            (sa.or_(batch.c.status.in_(_CANCELLED), job.c.cancel_requested_at.is_not(None))).label("is_cancelled"),
        )
        .join(cohort, cohort.c.id == job.c.cohort_id)
        .outerjoin(batch, batch.c.id == job.c.batch_id)
        .where(
            cohort.c.instance_boot_id == boot_id,
            cohort.c.state == CohortState.RUNNING,
            ~sa.exists().where(job_result.c.job_id == job.c.id),
            sa.or_(
                batch.c.status.in_((*_CANCELLED, BatchStatus.EXPIRED)),
                batch.c.expires_at <= func.now(),
                job.c.cancel_requested_at.is_not(None),
                job.c.deadline_at <= func.now(),
            ),
        )
    )
    return {row.id: Outcome.CANCELLED if row.is_cancelled else Outcome.EXPIRED for row in rows}


_FINISH = Frozen(
    sa.update(cohort)
    .where(
        cohort.c.id == sa.bindparam("cohort_id"),
        cohort.c.attempt == sa.bindparam("held_attempt"),
        cohort.c.instance_boot_id == sa.bindparam("boot_id"),
        cohort.c.state == CohortState.RUNNING,
        ~sa.exists().where(job.c.cohort_id == cohort.c.id, ~sa.exists().where(job_result.c.job_id == job.c.id)),
    )
    .values(state=CohortState.DONE, finished_at=func.now(), lease_expires_at=None)
    .returning(cohort.c.id, RELAXED)
)


def finish(conn: sa.Connection, claim: Claim) -> bool:
    """running -> done, when no job still bound here lacks a result. False: not yet, or the fence is lost.

    Relaxed: should a crash take it back, whoever claims the cohort next finds nothing in it to run.
    """
    done = _FINISH.run(conn, cohort_id=claim.cohort_id, held_attempt=claim.attempt, boot_id=claim.boot_id)
    if done.one_or_none() is None:
        return False
    _event(conn, claim, "done", None)
    # A single job's end frees a thread for the next one; what waits in bulk is not fed by it.
    notify(conn, SINGLES_CHANNEL if claim.priority >= Priority.INTERACTIVE else "dispatch")
    return True


def release(conn: sa.Connection, claim: Claim, *, reason: str, failure: bool, crashed_jobs: Sequence[int] = ()) -> bool:
    """running -> ready, so that its jobs without a result run again. `failure` only for an engine's death, never for
    a drain; `crashed_jobs` were in flight at that death. False: the fence is lost, nothing was written."""
    done = conn.execute(
        sa.update(cohort)
        .where(*_fence(claim))
        .values(
            state=CohortState.READY,
            moved=True,
            failures=cohort.c.failures + int(failure),
            dispatch_no=cohort.c.dispatch_no + 1,
            instance_boot_id=None,
            lease_expires_at=None,
            last_error=reason,
        )
    )
    if done.rowcount != 1:
        return False
    if crashed_jobs:
        conn.execute(
            sa.update(job)
            .where(job.c.id.in_(crashed_jobs), job.c.cohort_id == claim.cohort_id)
            .values(crashes=job.c.crashes + 1)
        )
    _event(conn, claim, "crashed" if failure else "released", reason)
    conn.execute(sa.select(func.pg_notify("dispatch", "")))
    return True


def return_job(conn: sa.Connection, claim: Claim, job_id: int, delay_seconds: float) -> bool:
    """in cohort -> unplanned: a line to try again later. False: it is not bound here any more (an earlier call whose
    answer was lost did it). Raises FenceLost."""
    fence = sa.select(cohort.c.id).where(*_fence(claim)).with_for_update(read=True)
    if conn.execute(fence).one_or_none() is None:
        raise FenceLost(f"cohort={claim.cohort_id} attempt={claim.attempt}")
    done = conn.execute(
        sa.update(job)
        .where(job.c.id == job_id, job.c.cohort_id == claim.cohort_id)
        .values(cohort_id=None, predicted_cached_tokens=None, not_before=later(delay_seconds), tries=job.c.tries + 1)
    )
    return done.rowcount == 1


_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED, BatchStatus.FAILED)


def _fence(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        cohort.c.id == claim.cohort_id,
        cohort.c.attempt == claim.attempt,
        cohort.c.instance_boot_id == claim.boot_id,
        cohort.c.state == CohortState.RUNNING,
    )


_EVENT = Frozen(
    sa.insert(cohort_event).values(
        {name: sa.bindparam(name) for name in ("cohort_id", "attempt", "kind", "instance_boot_id", "detail")}
    )
)


def _event(conn: sa.Connection, claim: Claim, kind: str, detail: str | None) -> None:
    _EVENT.run(
        conn,
        cohort_id=claim.cohort_id,
        attempt=claim.attempt,
        kind=kind,
        instance_boot_id=claim.boot_id,
        detail=detail,
    )
