"""Control work: rows of `control_task`, each leased and fenced by its attempt number like a cohort.

A message on the queue `control` carries the id of a row and is a hint; the row decides. Life of a row: ready ->
running (claim: attempt + 1, a lease) -> done, or ready again (after an error, with a backoff; or to come back later),
or dead after `MAX_FAILURES`. A running row whose lease expired may be claimed by anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from service.core.model import BatchStatus, TaskKind, TaskState
from service.errors import FenceLost
from service.store.clock import later
from service.store.control_tables import control_task
from service.store.tables import batch, batch_progress

MAX_FAILURES = 8

_LONGEST_GAP = 12  # times the shortest, between two hints for one task that nobody takes
_OPEN = (TaskState.READY, TaskState.RUNNING)
# Rows of one batch in `batch_progress` above which they are folded into one; a poll reads fewer than this.
_COMPACT_ABOVE_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTask:
    """A claimed piece of control work. `attempt` fences every write made on its behalf."""

    id: int
    kind: TaskKind
    subject: str  # a batch id; of WEBHOOK the id of an event
    attempt: int
    failures: int

    @property
    def is_exhausted(self) -> bool:
        """Its last leases were lost too often (it kills its worker): end it instead of running it."""
        return self.failures >= MAX_FAILURES


def create_task(conn: sa.Connection, kind: TaskKind, subject: str, *, is_hinted: bool = False) -> int:
    """The id of the open task of this kind for `subject`, created in the caller's transaction where there is none.
    `is_hinted`: the caller sends the hint himself, after the commit, so the sweeper waits before it sends another."""
    published_at = sa.func.now() if is_hinted else sa.null()
    insertion = (
        insert(control_task)
        .values(kind=kind, subject=subject, state=TaskState.READY, published_at=published_at)
        .on_conflict_do_nothing()
        .returning(control_task.c.id)
    )
    existing = sa.select(control_task.c.id).where(
        control_task.c.kind == kind, control_task.c.subject == subject, control_task.c.state.in_(_OPEN)
    )
    while True:  # twice at most in practice: the open one may end between the two statements
        task_id: int | None = conn.scalar(insertion)
        if task_id is None:
            task_id = conn.scalar(existing)
        if task_id is not None:
            return task_id


def claim_task(conn: sa.Connection, task_id: int, lease_seconds: float) -> ControlTask | None:
    """Take a ready task, or a running one whose lease expired (which counts as a failure). None: nothing to do."""
    expired = sa.and_(control_task.c.state == TaskState.RUNNING, control_task.c.lease_expires_at < sa.func.now())
    due = sa.and_(control_task.c.state == TaskState.READY, control_task.c.not_before <= sa.func.now())
    row = conn.execute(
        sa.update(control_task)
        .where(control_task.c.id == task_id, sa.or_(due, expired))
        .values(
            state=TaskState.RUNNING,
            attempt=control_task.c.attempt + 1,
            failures=control_task.c.failures + sa.case((expired, 1), else_=0),
            lease_expires_at=later(lease_seconds),
        )
        .returning(*_CLAIMED)
    ).one_or_none()
    return None if row is None else _task(row)


def claim_next_task(conn: sa.Connection, lease_seconds: float) -> ControlTask | None:
    """The oldest task that waits, whatever the hint in hand named: of several hints for one task those that come too
    late do other work, instead of standing before its hint. Not webhooks, which have a place of their own."""
    due = (control_task.c.state == TaskState.READY, control_task.c.not_before <= sa.func.now())
    task_id = conn.scalar(
        sa.select(control_task.c.id)
        .where(*due, control_task.c.kind != TaskKind.WEBHOOK)
        .order_by(control_task.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    return None if task_id is None else claim_task(conn, task_id, lease_seconds)


def renew_task(conn: sa.Connection, task: ControlTask, lease_seconds: float) -> None:
    """Extend the lease. In a transaction with other writes it is their fence: raises FenceLost to a newer attempt."""
    _update_held(conn, task, lease_expires_at=later(lease_seconds))


def finish_task(conn: sa.Connection, task: ControlTask) -> None:
    """Done. Raises FenceLost."""
    _update_held(conn, task, state=TaskState.DONE, finished_at=sa.func.now(), lease_expires_at=None)


def reschedule_task(conn: sa.Connection, task: ControlTask, delay_seconds: float) -> None:
    """Give the task back, to be claimed again after `delay_seconds`; no failure. Raises FenceLost."""
    _update_held(
        conn,
        task,
        state=TaskState.READY,
        not_before=later(delay_seconds),
        published_at=None,
        lease_expires_at=None,
    )


def fail_task(conn: sa.Connection, task: ControlTask, error: str) -> TaskState:
    """Record a failure: ready again after a backoff, or dead after `MAX_FAILURES`. Raises FenceLost.

    `error` names a class and a place, never the content of a request. The caller fails the batch of a dead task in
    the same transaction.
    """
    # The backoff is 2, 4, 8 ... 128 s: four minutes in all, long enough for a file store to come back.
    failures = task.failures + 1
    if failures >= MAX_FAILURES:
        _update_held(
            conn,
            task,
            state=TaskState.DEAD,
            failures=failures,
            last_error=error,
            finished_at=sa.func.now(),
            lease_expires_at=None,
        )
        return TaskState.DEAD
    _update_held(
        conn,
        task,
        state=TaskState.READY,
        failures=failures,
        last_error=error,
        not_before=later(2.0**failures),
        published_at=None,
        lease_expires_at=None,
    )
    return TaskState.READY


def unpublished_tasks(conn: sa.Connection, older_than_seconds: float, limit: int = 1000) -> list[int]:
    """Ids whose hint is due, the oldest first; those of webhooks, which may be very many, are in `due_webhooks`."""
    return list(
        conn.scalars(
            sa.select(control_task.c.id)
            .where(hint_is_due(older_than_seconds), control_task.c.kind != TaskKind.WEBHOOK)
            .order_by(control_task.c.id)
            .limit(limit)
        )
    )


def hint_is_due(older_than_seconds: float) -> sa.ColumnElement[bool]:
    """Ready, or running with an expired lease; and never published, or longer than that ago. The gaps double up to
    twelve times that: where nobody reads the queue, copies of one hint must not pile up before those of others."""
    waited = control_task.c.published_at - sa.func.greatest(control_task.c.created_at, control_task.c.not_before)
    least, most = (timedelta(seconds=older_than_seconds * times) for times in (1, _LONGEST_GAP))
    gap = sa.func.greatest(least, sa.func.least(most, waited))
    unheard = sa.or_(control_task.c.published_at.is_(None), control_task.c.published_at < sa.func.now() - gap)
    ready = sa.and_(control_task.c.state == TaskState.READY, control_task.c.not_before <= sa.func.now())
    expired = sa.and_(control_task.c.state == TaskState.RUNNING, control_task.c.lease_expires_at < sa.func.now())
    return sa.and_(sa.or_(ready, expired), unheard)


def mark_published(conn: sa.Connection, task_ids: Sequence[int]) -> None:
    """Remember when their hints were sent; call after the send."""
    ordered = sa.select(control_task.c.id).where(control_task.c.id.in_(task_ids)).order_by(control_task.c.id)
    conn.execute(
        sa.update(control_task)
        .where(control_task.c.id.in_(ordered.with_for_update()))
        .values(published_at=sa.func.now())
    )


def due_finalizing(conn: sa.Connection) -> list[int]:
    """Move every in_progress batch whose lines all ended to finalizing; the ids of their new EXPORT tasks.

    One statement, so that two reapers are harmless. A batch with an open EXPIRE task is left to it. Call this before
    `due_expiries`: a batch that ended in time completes.
    """
    ended = (
        sa.select(sa.func.coalesce(sa.func.sum(_ENDED_LINES), 0))
        .where(batch_progress.c.batch_id == batch.c.id)
        .scalar_subquery()
    )
    expiring = sa.exists().where(
        control_task.c.kind == TaskKind.EXPIRE,
        control_task.c.subject == batch.c.id,
        control_task.c.state.in_(_OPEN),
    )
    # A worker records `expired` at the deadline, before this process has noticed it: then the batch expires.
    is_late = sa.exists().where(batch_progress.c.batch_id == batch.c.id, batch_progress.c.expired > 0)
    is_whole = sa.and_(batch.c.intake_done, ended >= batch.c.total)
    moved = (
        sa.update(batch)
        .where(batch.c.status == BatchStatus.IN_PROGRESS, is_whole, ~expiring, ~is_late)
        .values(status=BatchStatus.FINALIZING, finalizing_at=sa.func.now())
        .returning(batch.c.id)
        .cte("moved")
    )
    return _create_tasks(conn, TaskKind.EXPORT, sa.select(moved.c.id))


def due_expiries(conn: sa.Connection) -> list[int]:
    """Create an EXPIRE task for every open batch past its deadline; the ids of the new ones."""
    overdue = sa.select(batch.c.id).where(
        batch.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)), batch.c.expires_at <= sa.func.now()
    )
    return _create_tasks(conn, TaskKind.EXPIRE, overdue)


def compact_progress(conn: sa.Connection, above_rows: int = _COMPACT_ABOVE_ROWS) -> int:
    """Fold the progress rows of a batch into one where there are more than `above_rows`; the number of batches.

    One statement: a reader sees all the old rows or the new one. Rows that another sweeper holds are skipped.
    """
    crowded = (
        sa.select(batch_progress.c.batch_id)
        .join(batch, batch.c.id == batch_progress.c.batch_id)
        .where(batch.c.status.in_(_WITH_PROGRESS))
        .group_by(batch_progress.c.batch_id)
        .having(sa.func.count() > above_rows)
        .scalar_subquery()
    )
    locked = (
        sa.select(batch_progress.c.id)
        .where(batch_progress.c.batch_id.in_(crowded))
        .order_by(batch_progress.c.id)
        .with_for_update(skip_locked=True)
    )
    gone = sa.delete(batch_progress).where(batch_progress.c.id.in_(locked)).returning(*batch_progress.c).cte("gone")
    totals = [column.name for column in batch_progress.c if column.name not in ("id", "batch_id")]
    folded = sa.select(gone.c.batch_id, *(sa.func.sum(gone.c[name]) for name in totals)).group_by(gone.c.batch_id)
    insertion = insert(batch_progress).from_select(["batch_id", *totals], folded).returning(batch_progress.c.id)
    return len(conn.execute(insertion).all())


_WITH_PROGRESS = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING)

_CLAIMED = (
    control_task.c.id,
    control_task.c.kind,
    control_task.c.subject,
    control_task.c.attempt,
    control_task.c.failures,
)

_ENDED_LINES = (
    batch_progress.c.completed + batch_progress.c.failed + batch_progress.c.cancelled + batch_progress.c.expired
)


def _task(row: sa.Row[tuple[int, str, str, int, int]]) -> ControlTask:
    return ControlTask(
        id=row.id, kind=TaskKind(row.kind), subject=row.subject, attempt=row.attempt, failures=row.failures
    )


def _update_held(conn: sa.Connection, task: ControlTask, **values: object) -> None:
    changed = conn.execute(
        sa.update(control_task)
        .where(
            control_task.c.id == task.id,
            control_task.c.attempt == task.attempt,
            control_task.c.state == TaskState.RUNNING,
        )
        .values(**values)
    )
    if changed.rowcount != 1:
        raise FenceLost(f"(task {task.id}, attempt {task.attempt})")


def _create_tasks(conn: sa.Connection, kind: TaskKind, subjects: sa.Select[tuple[str]]) -> list[int]:
    column = subjects.selected_columns[0]
    rows = subjects.with_only_columns(sa.literal(kind.value), column, sa.literal(TaskState.READY.value))
    return list(
        conn.scalars(
            insert(control_task)
            .from_select(["kind", "subject", "state"], rows)
            .on_conflict_do_nothing()
            .returning(control_task.c.id)
        )
    )
