"""What /metrics shows. Sums over results are read once and then only what came since; the rest is rows that are open.

Every result row carries the transaction that wrote it (`recorded_xid`, which only grows). Rows below the oldest
transaction that is still open are all there: so sums over [mark, that) are never read twice and miss none, and an
index on `recorded_xid` finds them. Only the first read of a process goes over the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BatchStatus, BootState, CohortState, Outcome
from service.store.tables import batch, batch_progress, cohort, instance_boot, job, job_result

NO_INSTANCE = ""  # of results that no engine gave: cancelled, expired


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Series:
    """What results are told apart by."""

    instance: str
    model: str
    outcome: str
    cause: str  # a MissCause; empty for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Over the results of one series. Tokens are of the results whose cached tokens are known, as in stats."""

    jobs: int = 0
    unknown_jobs: int = 0  # answered without a word on cached tokens
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    missing_tokens: int = 0  # predicted as cached and computed all the same
    completion_tokens: int = 0
    queue_ms: int = 0
    run_ms: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in _SUMS})


_SUMS = tuple(spec.name for spec in fields(Sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class BootGauge:
    """A boot that is not gone."""

    name: str
    model: str
    engine: str
    state: str
    running_jobs: int
    waiting_jobs: int
    kv_capacity_tokens: int | None
    key_agrees: bool | None
    heartbeat_age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGauge:
    """Open cohorts of one instance and priority class."""

    queue: str
    priority: int
    waiting_jobs: int  # planned, and not claimed by the worker
    in_flight_jobs: int  # claimed, and without a result
    cohorts: int
    cohort_jobs: int  # in all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGauge:
    """Open batches of one priority class."""

    priority: int
    batches: int
    unfinished_lines: int
    slack_seconds: float  # until the first of their deadlines; negative where that is past


def horizon(conn: sa.Connection) -> int:
    """The oldest transaction that is still open: rows below it are all there."""
    return int(conn.execute(sa.select(_HORIZON)).scalar_one())


_HORIZON = sa.cast(
    sa.cast(func.pg_snapshot_xmin(func.pg_current_snapshot()), sa.Text),
    sa.BigInteger,
)


def sums_between(conn: sa.Connection, start_xid: int, end_xid: int) -> dict[Series, Sums]:
    """Sums of the results recorded by transactions from `start_xid` on and below `end_xid`, a `horizon`."""
    known = job_result.c.cached_tokens.is_not(None)
    short = func.greatest(job_result.c.predicted_cached_tokens - job_result.c.cached_tokens, 0)
    columns: dict[str, sa.ColumnElement[int]] = {
        "jobs": func.count(),
        "unknown_jobs": func.count().filter(~known, job_result.c.outcome == Outcome.SUCCEEDED),
        "attempts": _sum(job_result.c.attempt),
        "missing_tokens": _sum(short),
        "queue_ms": _sum(job_result.c.queue_ms),
        "run_ms": _sum(job_result.c.run_ms),
    }
    for name in ("prompt_tokens", "cached_tokens", "predicted_cached_tokens", "completion_tokens"):
        columns[name] = func.coalesce(func.sum(job_result.c[name]).filter(known), 0)
    rows = conn.execute(
        sa.select(
            func.coalesce(instance_boot.c.name, NO_INSTANCE).label("instance"),
            func.coalesce(instance_boot.c.model, "").label("model"),
            job_result.c.outcome,
            func.coalesce(job_result.c.miss_cause, "").label("cause"),
            *(sa.cast(column, sa.BigInteger).label(name) for name, column in columns.items()),
        )
        .select_from(job_result.outerjoin(instance_boot, instance_boot.c.id == job_result.c.instance_boot_id))
        .where(job_result.c.recorded_xid >= start_xid, job_result.c.recorded_xid < end_xid)
        .group_by(sa.text("1"), sa.text("2"), sa.text("3"), sa.text("4"))
    )
    return {
        Series(instance=row.instance, model=row.model, outcome=row.outcome, cause=row.cause): Sums(
            **{name: getattr(row, name) for name in _SUMS}
        )
        for row in rows
    }


def _sum(column: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return func.coalesce(func.sum(column), 0)


def boots(conn: sa.Connection) -> list[BootGauge]:
    """Every boot that is not gone, by name."""
    names = [spec.name for spec in fields(BootGauge) if spec.name != "heartbeat_age_seconds"]
    age = func.extract("epoch", func.now() - instance_boot.c.heartbeat_at)
    rows = conn.execute(
        sa.select(*(instance_boot.c[name] for name in names), sa.cast(age, sa.Double).label("heartbeat_age_seconds"))
        .where(instance_boot.c.state != BootState.GONE)
        .order_by(instance_boot.c.name)
    )
    return [BootGauge(**row._mapping) for row in rows]


def queues(conn: sa.Connection) -> list[QueueGauge]:
    """Open cohorts by queue and class. Results are looked up for running cohorts only, of which there are few."""
    ended = (
        sa.select(cohort.c.queue, cohort.c.priority, func.count().label("jobs"))
        .join(job, job.c.cohort_id == cohort.c.id)
        .where(cohort.c.state == CohortState.RUNNING, ~sa.exists().where(job_result.c.job_id == job.c.id))
        .group_by(cohort.c.queue, cohort.c.priority)
    )
    in_flight = {(row.queue, row.priority): row.jobs for row in conn.execute(ended)}
    waiting = cohort.c.state.in_((CohortState.READY, CohortState.DISPATCHED))
    rows = conn.execute(
        sa.select(
            cohort.c.queue,
            cohort.c.priority,
            sa.cast(func.coalesce(func.sum(cohort.c.n_jobs).filter(waiting), 0), sa.BigInteger).label("waiting_jobs"),
            func.count().label("cohorts"),
            sa.cast(func.sum(cohort.c.n_jobs), sa.BigInteger).label("cohort_jobs"),
        )
        .where(cohort.c.state.in_((CohortState.READY, CohortState.DISPATCHED, CohortState.RUNNING)))
        .group_by(cohort.c.queue, cohort.c.priority)
        .order_by(cohort.c.queue, cohort.c.priority)
    )
    return [QueueGauge(**row._mapping, in_flight_jobs=in_flight.get((row.queue, row.priority), 0)) for row in rows]


_OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


def open_batches(conn: sa.Connection) -> list[BatchGauge]:
    """Batches whose lines are not all ended, by class."""
    ended = (
        sa.select(
            func.sum(
                batch_progress.c.completed
                + batch_progress.c.failed
                + batch_progress.c.cancelled
                + batch_progress.c.expired
            )
        )
        .where(batch_progress.c.batch_id == batch.c.id)
        .scalar_subquery()
    )
    slack = func.extract("epoch", func.min(batch.c.expires_at) - func.now())
    left = func.coalesce(func.sum(batch.c.total - func.coalesce(ended, 0)), 0)
    rows = conn.execute(
        sa.select(
            batch.c.priority,
            func.count().label("batches"),
            sa.cast(left, sa.BigInteger).label("unfinished_lines"),
            sa.cast(slack, sa.Double).label("slack_seconds"),
        )
        .where(batch.c.status.in_(_OPEN))
        .group_by(batch.c.priority)
        .order_by(batch.c.priority)
    )
    return [BatchGauge(**row._mapping) for row in rows]
