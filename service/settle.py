"""Settle: end the lines of a batch that was cancelled or expired, then export it."""

from __future__ import annotations

import sqlalchemy as sa

from service.core.model import BatchStatus, LineErrorCode, Outcome
from service.export import CANCELLED, EXPIRED, export_batch
from service.store import batches, control, outputs, results
from service.store.batches import Batch
from service.store.changes import lock_due
from service.store.control import ControlTask
from service.work import Work

_LOOK_AGAIN_SECONDS = 1.0


def run_cancel(work: Work, task: ControlTask) -> None:
    """The handler of CANCEL: lines that do not run end at once, those in flight get the grace, then the rest ends.

    While lines are in flight the task is given back and comes again, so it holds no thread.
    """
    batch = _load(work, task)
    if batch is None or batch.status != BatchStatus.CANCELLING:
        work.database.run(lambda conn: control.finish_task(conn, task))
        return
    if batch.in_progress_at is None:
        _end_unstarted(work, task, BatchStatus.CANCELLED)
        return
    _end(work, task, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED, only_idle=True)
    if _waits_for_lines(work, task):
        return
    _end(work, task, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED, only_idle=False)
    export_batch(work, task, batch, CANCELLED)


def run_expire(work: Work, task: ControlTask) -> None:
    """The handler of EXPIRE: every line without a result ends, those in flight too; both files, then expired."""

    def stop_intake(conn: sa.Connection) -> Batch | None:
        """Behind a chunk of intake under way, and behind a PATCH that moves the deadline: it may be later by now."""
        work.hold(conn, task)
        return batches.load_batch(conn, task.subject) if lock_due(conn, task.subject) else None

    batch = work.database.run(stop_intake)
    if batch is None or batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        work.database.run(lambda conn: control.finish_task(conn, task))
        return
    if batch.status == BatchStatus.VALIDATING:
        _end_unstarted(work, task, BatchStatus.EXPIRED)
        return
    _end(work, task, Outcome.EXPIRED, LineErrorCode.BATCH_EXPIRED, only_idle=False)
    export_batch(work, task, batch, EXPIRED)


def _load(work: Work, task: ControlTask) -> Batch | None:
    return work.database.run(lambda conn: batches.load_batch(conn, task.subject))


def _end_unstarted(work: Work, task: ControlTask, status: BatchStatus) -> None:
    """A batch that never left `validating` has no lines and gets no files."""

    def end(conn: sa.Connection) -> None:
        work.hold(conn, task)
        batches.move_batch(conn, task.subject, status)
        control.finish_task(conn, task)

    work.database.run(end)


def _end(work: Work, task: ControlTask, outcome: Outcome, code: LineErrorCode, *, only_idle: bool) -> None:
    def end_some(conn: sa.Connection) -> int:
        work.hold(conn, task)
        return results.end_jobs(conn, task.subject, outcome=outcome, error_code=code, only_idle=only_idle)

    while work.database.run(end_some):
        work.pause()


def _waits_for_lines(work: Work, task: ControlTask) -> bool:
    """Whether lines are in flight and their grace lasts; the task is then given back."""

    def look(conn: sa.Connection) -> bool:
        work.hold(conn, task)
        if not outputs.unfinished_jobs(conn, task.subject):
            return False
        if outputs.grace_is_over(conn, task.subject, work.settings.cancel_grace_seconds):
            return False
        control.reschedule_task(conn, task, _LOOK_AGAIN_SECONDS)
        return True

    return work.database.run(look)
