"""What `trunkline doctor` asks of the database: servers, leader, overdue work, queues without a worker, accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BatchStatus, BootState, CohortState, TaskState
from service.store.clock import ago
from service.store.control_tables import control_task
from service.store.tables import batch, batch_progress, cohort, instance_boot

_OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


def server_version(conn: sa.Connection) -> int:
    """Of Postgres, as a number: 150004 is 15.4."""
    return int(conn.execute(sa.select(func.current_setting("server_version_num"))).scalar_one())


def is_locked(conn: sa.Connection, key: int) -> bool:
    """Whether some session of this database holds the advisory lock of a 64-bit key."""
    held = sa.text(
        "select exists (select 1 from pg_locks where locktype = 'advisory' and objsubid = 1 and granted"
        " and database = (select oid from pg_database where datname = current_database())"
        " and classid = cast(:high as bigint)::oid and objid = cast(:low as bigint)::oid)"
    )
    return bool(conn.execute(held, {"high": key >> 32, "low": key & 0xFFFFFFFF}).scalar_one())


def waiting_jobs_models(conn: sa.Connection) -> list[str]:
    """Models with cohorts that wait for an instance."""
    ready = sa.select(cohort.c.model).where(cohort.c.state == CohortState.READY).distinct().order_by(cohort.c.model)
    return list(conn.execute(ready).scalars())


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueTasks:
    """Control work that nobody does."""

    waiting: int  # ready, and due for long
    dead: int  # given up after its failures


def overdue_tasks(conn: sa.Connection, older_than_seconds: float) -> OverdueTasks:
    """Pieces of control work due for so long that no control worker can be running, and those given up."""
    late = sa.and_(control_task.c.state == TaskState.READY, control_task.c.not_before < ago(older_than_seconds))
    lost = sa.and_(control_task.c.state == TaskState.RUNNING, control_task.c.lease_expires_at < ago(older_than_seconds))
    row = conn.execute(
        sa.select(
            func.count().filter(sa.or_(late, lost)).label("waiting"),
            func.count().filter(control_task.c.state == TaskState.DEAD).label("dead"),
        ).select_from(control_task)
    ).one()
    return OverdueTasks(waiting=row.waiting, dead=row.dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedCounts:
    """The accounting of one terminal batch, from its progress rows."""

    batch_id: str
    total: int
    completed: int
    failed: int
    cancelled: int
    expired: int


def ended_batches(conn: sa.Connection, limit: int) -> list[EndedCounts]:
    """The newest batches that ended with their lines accounted for (a batch that failed validation has none)."""
    newest = (
        sa.select(batch.c.id, batch.c.total)
        .where(batch.c.status.not_in(_OPEN), batch.c.total > 0)
        .order_by(batch.c.id.desc())
        .limit(limit)
        .subquery("newest")
    )
    kinds = ("completed", "failed", "cancelled", "expired")
    sums = [sa.cast(func.coalesce(func.sum(batch_progress.c[kind]), 0), sa.BigInteger).label(kind) for kind in kinds]
    rows = conn.execute(
        sa.select(newest.c.id.label("batch_id"), newest.c.total, *sums)
        .select_from(newest.outerjoin(batch_progress, batch_progress.c.batch_id == newest.c.id))
        .group_by(newest.c.id, newest.c.total)
    )
    return [EndedCounts(**row._mapping) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandedQueue:
    """Planned work of a queue that no live boot serves."""

    queue: str
    cohorts: int
    oldest_at: datetime


def stranded_queues(conn: sa.Connection) -> Sequence[StrandedQueue]:
    """Queues with open cohorts and no boot that is not gone."""
    served = sa.exists().where(instance_boot.c.queue == cohort.c.queue, instance_boot.c.state != BootState.GONE)
    rows = conn.execute(
        sa.select(cohort.c.queue, func.count().label("cohorts"), func.min(cohort.c.created_at).label("oldest_at"))
        .where(cohort.c.state.in_((CohortState.READY, CohortState.DISPATCHED, CohortState.RUNNING)), ~served)
        .group_by(cohort.c.queue)
        .order_by(cohort.c.queue)
    )
    return [StrandedQueue(**row._mapping) for row in rows]
