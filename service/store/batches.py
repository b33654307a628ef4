"""Batches: create, read, page, count, and the one conditional UPDATE behind every arrow between two statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from service.core.ids import BATCH_PREFIX
from service.core.lifecycle import sources_of
from service.core.model import TERMINAL_BATCH_STATUSES, BatchStatus, CohortState, Priority
from service.store import webhooks
from service.store.clock import new_id
from service.store.deleting import IS_DELETED
from service.store.tables import batch, batch_progress, cohort, job, job_result

OPEN_STATUSES = [status for status in BatchStatus if status not in TERMINAL_BATCH_STATUSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A row of `batch`."""

    id: str
    tenant_id: int
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str | None
    status: BatchStatus
    metadata: dict[str, str] | None
    errors: list[dict[str, Any]] | None
    priority: Priority
    on_invalid_line: str
    line_order: str
    model_policy: str
    paused: bool
    retry_of: str | None
    output_expires_after_seconds: int | None
    total: int
    prompt_tokens: int | None
    prefix_groups: int | None
    bound_tokens: int | None
    intake_offset: int
    intake_line: int
    intake_done: bool
    output_file_id: str | None
    error_file_id: str | None
    created_at: datetime
    in_progress_at: datetime | None
    expires_at: datetime
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a producer says when it creates a batch; everything else has a default or comes later."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_seconds: int
    metadata: dict[str, str] | None = None
    priority: Priority = Priority.NORMAL
    on_invalid_line: str = "fail"
    line_order: str = "any"
    model_policy: str = "mixed"
    output_expires_after_seconds: int | None = None
    retry_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Sums over the batch's ended lines: counts by outcome, and tokens over the lines whose usage is known."""

    completed: int = 0
    failed: int = 0  # skipped lines too
    skipped: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    measured_prompt_tokens: int = 0  # of the lines that say how many were cached
    lines_unknown: int = 0  # those that do not

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the unfinished lines of a batch do right now."""

    running: int = 0
    retrying: int = 0  # waiting for the time of their next try


# The columns that `move_batch` may set beside the status and its clock.
_PROGRESS_COLUMNS = [column for column in batch_progress.c if column.name not in ("id", "batch_id")]


def _batch(row: sa.Row[Any]) -> Batch:
    values: dict[str, Any] = dict(row._mapping)
    values["status"] = BatchStatus(values["status"])
    values["priority"] = Priority(values["priority"])
    return Batch(**values)


def create_batch(conn: sa.Connection, tenant_id: int, new: NewBatch, batch_id: str | None = None) -> Batch:
    """Insert a batch in `validating`. The caller creates its intake task in the same transaction."""
    statement = (
        sa.insert(batch)
        .values(
            id=batch_id or new_id(conn, BATCH_PREFIX),
            tenant_id=tenant_id,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            status=BatchStatus.VALIDATING,
            metadata=sa.null() if new.metadata is None else new.metadata,
            priority=int(new.priority),
            on_invalid_line=new.on_invalid_line,
            line_order=new.line_order,
            model_policy=new.model_policy,
            output_expires_after_seconds=new.output_expires_after_seconds,
            retry_of=new.retry_of,
            expires_at=sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, new.window_seconds),
        )
        .returning(batch)
    )
    return _batch(conn.execute(statement).one())


def get_batch(conn: sa.Connection, tenant_id: int, batch_id: str) -> Batch | None:
    """None for an id that is not there or deleted, and for another tenant's."""
    statement = sa.select(batch).where(batch.c.id == batch_id, batch.c.tenant_id == tenant_id, ~IS_DELETED)
    row = conn.execute(statement).first()
    return None if row is None else _batch(row)


def load_batch(conn: sa.Connection, batch_id: str) -> Batch | None:
    """The batch whosever it is: for control work, which acts for all tenants."""
    row = conn.execute(sa.select(batch).where(batch.c.id == batch_id)).first()
    return None if row is None else _batch(row)


def list_batches(conn: sa.Connection, tenant_id: int, *, after: str | None, limit: int) -> list[Batch]:
    """Newest first. Ids sort by time, so a cursor still works when its batch is gone."""
    statement = sa.select(batch).where(batch.c.tenant_id == tenant_id, ~IS_DELETED)
    if after is not None:
        statement = statement.where(batch.c.id < after)
    rows = conn.execute(statement.order_by(batch.c.id.desc()).limit(limit))
    return [_batch(row) for row in rows]


def move_batch(conn: sa.Connection, batch_id: str, to: BatchStatus, **columns: object) -> bool:
    """The one way a batch changes status: to `to`, from wherever an arrow leads there, its clock set to now.

    `columns` are set in the same UPDATE. False: no arrow leads from the status it has now, and nothing was written.
    The webhook of an end is written with it.
    """
    statement = (
        sa.update(batch)
        .where(batch.c.id == batch_id, batch.c.status.in_(sources_of(to)))
        .values({"status": to, f"{to.value}_at": sa.func.now(), **columns})
    )
    has_moved = conn.execute(statement).rowcount == 1
    if has_moved and to.is_terminal:
        webhooks.announce_batch(conn, batch_id, to)
    return has_moved


def request_cancel(conn: sa.Connection, batch_id: str) -> bool:
    """validating or in_progress -> cancelling. The caller creates the cancel task in the same transaction."""
    return move_batch(conn, batch_id, BatchStatus.CANCELLING)


def update_batch(conn: sa.Connection, batch_id: str, **columns: object) -> None:
    """Set columns other than the status (intake's place in the file, groups, bound)."""
    if "status" in columns:
        raise ValueError("a status changes in move_batch only")
    conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(columns))


def add_progress(conn: sa.Connection, batch_id: str, progress: Progress) -> None:
    """Append what one transaction ended. There is no hot counter to update."""
    values = {column.name: getattr(progress, column.name) for column in _PROGRESS_COLUMNS}
    conn.execute(sa.insert(batch_progress).values(batch_id=batch_id, **values))


def progress(conn: sa.Connection, batch_id: str) -> Progress:
    """The sums of one batch."""
    return progress_of(conn, [batch_id]).get(batch_id, Progress())


def progress_of(conn: sa.Connection, batch_ids: Sequence[str]) -> Mapping[str, Progress]:
    """The sums of several batches; one that has ended no line yet is absent."""
    if not batch_ids:
        return {}
    sums = [sa.cast(sa.func.sum(column), sa.BigInteger).label(column.name) for column in _PROGRESS_COLUMNS]
    statement = (
        sa.select(batch_progress.c.batch_id, *sums)
        .where(batch_progress.c.batch_id.in_(batch_ids))
        .group_by(batch_progress.c.batch_id)
    )
    found = {}
    for row in conn.execute(statement):
        values = dict(row._mapping)
        batch_id = values.pop("batch_id")
        found[batch_id] = Progress(**values)
    return found


def activity_of(conn: sa.Connection, batch_ids: Sequence[str]) -> Mapping[str, Activity]:
    """How many lines of each batch run or wait for a retry; a batch with neither is absent."""
    if not batch_ids:
        return {}
    unanswered = ~sa.exists().where(job_result.c.job_id == job.c.id)
    running = (
        sa.select(job.c.batch_id, sa.literal("running").label("doing"), sa.func.count().label("n"))
        .join(cohort, cohort.c.id == job.c.cohort_id)
        .where(cohort.c.state == CohortState.RUNNING, job.c.batch_id.in_(batch_ids), unanswered)
        .group_by(job.c.batch_id)
    )
    retrying = (
        sa.select(job.c.batch_id, sa.literal("retrying").label("doing"), sa.func.count().label("n"))
        .where(
            job.c.not_before.is_not(None),
            job.c.cohort_id.is_(None),
            job.c.batch_id.in_(batch_ids),
            unanswered,
        )
        .group_by(job.c.batch_id)
    )
    counts: dict[str, dict[str, int]] = {}
    for row in conn.execute(sa.union_all(running, retrying)):
        counts.setdefault(row.batch_id, {})[row.doing] = row.n
    return {batch_id: Activity(**values) for batch_id, values in counts.items()}


def reads_file(conn: sa.Connection, file_id: str) -> bool:
    """Whether a batch that is not terminal has this input file."""
    statement = sa.select(sa.exists().where(batch.c.input_file_id == file_id, batch.c.status.in_(OPEN_STATUSES)))
    return bool(conn.execute(statement).scalar_one())
