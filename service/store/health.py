"""What `trunkline doctor` asks of the database: servers, leader, overdue work, queues without a worker, accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func

from service.core.accounting import Counts
from service.core.model import BatchStatus, BootState, CohortState, TaskKind, TaskState
from service.store.clock import ago
from service.store.control_tables import control_task
from service.store.tables import batch, batch_progress, cohort, file, instance_boot

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
    """Pieces of control work due for so long that no control worker can be running, and those given up.

    Webhooks are left out: those to a receiver that hangs wait for each other.
    """
    late = sa.and_(control_task.c.state == TaskState.READY, control_task.c.not_before < ago(older_than_seconds))
    lost = sa.and_(control_task.c.state == TaskState.RUNNING, control_task.c.lease_expires_at < ago(older_than_seconds))
    row = conn.execute(
        sa.select(
            func.count().filter(sa.or_(late, lost)).label("waiting"),
            func.count().filter(control_task.c.state == TaskState.DEAD).label("dead"),
        ).where(control_task.c.kind != TaskKind.WEBHOOK)
    ).one()
    return OverdueTasks(waiting=row.waiting, dead=row.dead)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBatch:
    """One terminal batch: its accounting from its progress rows, and where its two files are in the store."""

    batch_id: str
    status: BatchStatus
    total: int
    counts: Counts
    output_path: str | None  # None: it has no such file, or no longer
    error_path: str | None
    files_bytes: int
    is_missing_files: bool  # its tenant deleted one, or they expired


def ended_batches(conn: sa.Connection, limit: int | None) -> list[EndedBatch]:
    """The newest batches that ended with their lines accounted for (a batch that failed validation has none), the
    newest first; all of them where `limit` is None."""
    newest = (
        sa.select(batch.c.id, batch.c.status, batch.c.total, batch.c.output_file_id, batch.c.error_file_id)
        .where(batch.c.status.not_in(_OPEN), batch.c.total > 0)
        .order_by(batch.c.id.desc())
        .limit(limit)
        .subquery("newest")
    )
    sums = (
        sa.select(
            batch_progress.c.batch_id,
            *(sa.cast(func.sum(batch_progress.c[kind]), sa.BigInteger).label(kind) for kind in _KINDS),
        )
        .where(batch_progress.c.batch_id.in_(sa.select(newest.c.id)))
        .group_by(batch_progress.c.batch_id)
        .subquery("sums")
    )
    output, error = file.alias("output"), file.alias("error")
    rows = conn.execute(
        sa.select(
            newest,
            *(func.coalesce(sums.c[kind], 0).label(kind) for kind in _KINDS),
            output.c.store_path.label("output_path"),
            error.c.store_path.label("error_path"),
            (func.coalesce(output.c.bytes, 0) + func.coalesce(error.c.bytes, 0)).label("files_bytes"),
        )
        .select_from(newest)
        .outerjoin(sums, sums.c.batch_id == newest.c.id)
        .outerjoin(output, output.c.id == newest.c.output_file_id)
        .outerjoin(error, error.c.id == newest.c.error_file_id)
        .order_by(newest.c.id.desc())
    )
    return [_ended(row) for row in rows]


_KINDS = ("completed", "failed", "cancelled", "expired")


def _ended(row: Any) -> EndedBatch:
    named = ((row.output_file_id, row.output_path), (row.error_file_id, row.error_path))
    return EndedBatch(
        batch_id=row.id,
        status=BatchStatus(row.status),
        total=row.total,
        counts=Counts(**{kind: getattr(row, kind) for kind in _KINDS}),
        output_path=row.output_path,
        error_path=row.error_path,
        files_bytes=row.files_bytes,
        is_missing_files=any(file_id is not None and path is None for file_id, path in named),
    )


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
