"""Removal: the rows of a batch that its producer deleted, in chunks, so that no transaction holds much for long."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from service.store import control, deleting
from service.store.control import ControlTask
from service.work import Work

log = logging.getLogger(__name__)

_CHUNK_LINES = 1_000
_LOOK_AGAIN_SECONDS = 5.0


def run_delete(work: Work, task: ControlTask) -> None:
    """The handler of DELETE; idempotent. Results, jobs, line errors and progress go, the batch's own row last.

    While an instance still has a cohort with lines of this batch among others, the task is given back and comes again.
    Files stay: they are the tenant's, and have a delete of their own. Cohorts and their events mix batches, and stay.
    """

    def is_out(conn: sa.Connection) -> bool:
        work.hold(conn, task)
        if not deleting.is_out(conn, task.subject):
            return False
        control.reschedule_task(conn, task, _LOOK_AGAIN_SECONDS)
        return True

    def delete_some(conn: sa.Connection) -> int:
        work.hold(conn, task)
        return deleting.delete_lines(conn, task.subject, _CHUNK_LINES)

    def delete_rest(conn: sa.Connection) -> None:
        work.hold(conn, task)
        deleting.delete_batch(conn, task.subject)
        control.finish_task(conn, task)

    if work.database.run(is_out):
        return
    while work.database.run(delete_some):
        work.pause()
    work.database.run(delete_rest)
    log.info("batch %s is deleted", task.subject)
