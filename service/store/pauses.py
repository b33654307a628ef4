"""Pauses: what is planned for a paused batch is taken out of its cohorts before they go to an instance.

A cohort mixes batches, so a pause acts on jobs. The choke point is the dispatch: whatever brought a cohort to `ready`
(a plan, a drain, an expired lease), it passes there. A pause and a dispatch are put in order by an advisory lock that
dispatches share: a dispatch under way commits before the pause is answered, a later one sees the pause.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BatchStatus, CohortState
from service.store.tables import batch, cohort, job, job_result

_PAUSE_LOCK = 0x7061757365  # "pause"


def await_dispatches(conn: sa.Connection) -> None:
    """Call last in a transaction that pauses, after its UPDATE: what was being dispatched is out when this returns,
    and nobody dispatches before this transaction has ended."""
    conn.execute(sa.select(func.pg_advisory_xact_lock(_PAUSE_LOCK)))


def hold_back(conn: sa.Connection, queue: str, model: str) -> frozenset[str]:
    """Call first in a transaction that dispatches from a queue: until it ends no pause is answered.

    in cohort -> unplanned for the jobs of paused batches in ready cohorts; returns the ids of those batches, whose
    backlog must be read anew. A cohort that held nothing else is done. A suspect of two engine deaths is planned like
    any other job when its batch goes on; its deaths stay counted.
    """
    conn.execute(sa.select(func.pg_advisory_xact_lock_shared(_PAUSE_LOCK)))
    is_paused = sa.and_(batch.c.status == BatchStatus.IN_PROGRESS, batch.c.paused)
    paused = list(conn.execute(sa.select(batch.c.id).where(is_paused)).scalars())
    if not paused:
        return frozenset()
    ready = (
        sa.select(cohort.c.id)
        .where(cohort.c.queue == queue, cohort.c.model == model, cohort.c.state == CohortState.READY)
        .order_by(cohort.c.id)
        .with_for_update()
    )
    cohort_ids = list(conn.execute(ready).scalars())
    rows = conn.execute(
        sa.select(job.c.id, job.c.batch_id, job.c.cohort_id)
        .where(job.c.cohort_id.in_(cohort_ids), job.c.batch_id.in_(paused), _UNANSWERED)
        .order_by(job.c.id)
        .with_for_update()
    ).all()
    if rows:
        taken_out = sa.update(job).where(job.c.id.in_([row.id for row in rows]))
        conn.execute(taken_out.values(cohort_id=None, predicted_cached_tokens=None, first_of_group=None))
        _shrink(conn, sorted({int(row.cohort_id) for row in rows}))
    return frozenset(str(row.batch_id) for row in rows)


def _shrink(conn: sa.Connection, cohort_ids: Sequence[int]) -> None:
    """Correct the number of jobs of each cohort; one that has nothing left to run is done."""
    rows = conn.execute(
        sa.select(job.c.cohort_id, func.count().label("bound"), func.count().filter(_UNANSWERED).label("unanswered"))
        .where(job.c.cohort_id.in_(cohort_ids))
        .group_by(job.c.cohort_id)
    )
    counted = {int(row.cohort_id): (int(row.bound), int(row.unanswered)) for row in rows}
    for cohort_id in cohort_ids:
        bound, unanswered = counted.get(cohort_id, (0, 0))
        ended = {} if unanswered else {"state": CohortState.DONE, "finished_at": func.now()}
        conn.execute(sa.update(cohort).where(cohort.c.id == cohort_id).values(n_jobs=bound, **ended))


_UNANSWERED = ~sa.exists().where(job_result.c.job_id == job.c.id)
