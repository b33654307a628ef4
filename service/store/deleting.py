"""Deletes of ended batches: gone for its producer at once, its rows removed by control work, in chunks.

The open task of kind DELETE is the mark: who reads or retries a batch looks for it. The batch's row goes last, so a
delete that was interrupted goes on where it was.
"""

from __future__ import annotations

import sqlalchemy as sa

from service.core.model import CohortState, TaskKind, TaskState
from service.store.control_tables import control_task
from service.store.tables import batch, batch_progress, cohort, job, job_result, line_error

IS_DELETED = sa.exists().where(
    control_task.c.kind == TaskKind.DELETE,
    control_task.c.subject == batch.c.id,
    control_task.c.state.in_((TaskState.READY, TaskState.RUNNING)),
)


def lock_undeleted(conn: sa.Connection, batch_id: str, *, to_delete: bool) -> bool:
    """Hold the batch until this transaction ends: with `to_delete` against everybody, else only against a delete.
    False: it is deleted, or is being deleted."""
    held = sa.select(batch.c.id).where(batch.c.id == batch_id)
    if conn.execute(held.with_for_update(read=not to_delete)).one_or_none() is None:
        return False
    return bool(conn.scalar(sa.select(~IS_DELETED).where(batch.c.id == batch_id)))


def is_out(conn: sa.Connection, batch_id: str) -> bool:
    """Whether an instance has a cohort with jobs of this batch, ended ones too: it reads and writes their rows."""
    active = (CohortState.DISPATCHED, CohortState.RUNNING)
    found = sa.exists().where(cohort.c.state.in_(active), job.c.cohort_id == cohort.c.id, job.c.batch_id == batch_id)
    return bool(conn.scalar(sa.select(found)))


def delete_lines(conn: sa.Connection, batch_id: str, limit: int) -> int:
    """Remove up to `limit` jobs of the batch with their results; how many."""
    ids = list(conn.execute(sa.select(job.c.id).where(job.c.batch_id == batch_id).limit(limit)).scalars())
    if ids:
        conn.execute(sa.delete(job_result).where(job_result.c.job_id.in_(ids)))
        conn.execute(sa.delete(job).where(job.c.id.in_(ids)))
    return len(ids)


def delete_batch(conn: sa.Connection, batch_id: str) -> None:
    """Remove what is left of a batch that has no jobs any more."""
    for table in (line_error, batch_progress, batch):
        column = table.c.id if table is batch else table.c.batch_id
        conn.execute(sa.delete(table).where(column == batch_id))
