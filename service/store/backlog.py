"""The backlog as the dispatcher sees it: jobs with no cohort, and the rows of a new plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.dialects.postgresql import aggregate_order_by

from service.core.model import BatchStatus, CohortState, Priority
from service.store.tables import batch, cohort, cohort_event, job, job_result


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """One job of the backlog: what planning needs, never its body."""

    job_id: int
    prefix_key: bytes
    prompt_tokens: int
    output_tokens: int
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCohort:
    """A cohort as planned. `job_ids`, `predicted_cached_tokens` and `first_of_group` run in planned order."""

    model: str
    queue: str
    sequence: int
    priority: int
    alone: bool
    body_bytes: int
    estimated_seconds: float
    job_ids: Sequence[int]
    predicted_cached_tokens: Sequence[int]
    first_of_group: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A cohort that failed twice: its jobs run on alone."""

    cohort_id: int
    model: str
    queue: str
    priority: int


def models_waiting(conn: sa.Connection) -> list[str]:
    """Models with at least one unplanned job, cheaply: one index probe per model."""
    first = sa.select(func.min(job.c.model).label("model")).where(job.c.cohort_id.is_(None)).cte("m", recursive=True)
    following = sa.select(
        sa.select(func.min(job.c.model)).where(job.c.cohort_id.is_(None), job.c.model > first.c.model).scalar_subquery()
    ).where(first.c.model.is_not(None))
    walk = first.union_all(following)
    return list(conn.execute(sa.select(walk.c.model).where(walk.c.model.is_not(None))).scalars())


def waiting_bulk(conn: sa.Connection, model: str, limit: int) -> tuple[int, list[WaitingJob]]:
    """The highest priority class with a backlog to plan, and up to `limit` of its oldest unplanned jobs.

    A batch that intake still works on is left for later until it has taken in a window's worth: planning its first
    lines without the rest would part what belongs together.
    """
    is_whole = sa.or_(batch.c.intake_done, batch.c.intake_line >= limit)
    rows = conn.execute(
        sa.select(batch.c.priority, func.array_agg(aggregate_order_by(batch.c.id, batch.c.id)).label("ids"))
        .where(batch.c.status == BatchStatus.IN_PROGRESS, ~batch.c.paused, is_whole)
        .group_by(batch.c.priority)
        .order_by(batch.c.priority.desc())
    ).all()
    for row in rows:
        jobs: list[WaitingJob] = []
        for batch_id in row.ids:  # ids sort by time; one index range each, and no walk over what is planned
            if len(jobs) < limit:
                jobs += _waiting(conn, model, limit - len(jobs), job.c.batch_id == batch_id)
        if jobs:
            return int(row.priority), jobs
    return int(Priority.NORMAL), []


def waiting_singles(conn: sa.Connection, model: str, limit: int) -> list[tuple[int, WaitingJob]]:
    """Unplanned single jobs with their class, the most urgent first."""
    rows = conn.execute(
        sa.select(*_WAITING, job.c.priority)
        .where(job.c.model == model, job.c.batch_id.is_(None), *_UNPLANNED)
        .order_by(job.c.priority.desc(), job.c.id)
        .limit(limit)
    )
    return [(int(row.priority), _job(row)) for row in rows]


def insert_cohorts(conn: sa.Connection, planned: Sequence[NewCohort]) -> list[int]:
    """Write a plan: cohort rows in state ready, and their jobs bound to them. A job that was bound, ended, cancelled
    or paused since the backlog was read stays out. Returns the ids, in the order given."""
    if not planned:
        return []
    rows = [
        {
            "model": item.model,
            "queue": item.queue,
            "sequence": item.sequence,
            "priority": item.priority,
            "alone": item.alone,
            "n_jobs": len(item.job_ids),
            "body_bytes": item.body_bytes,
            "estimated_seconds": item.estimated_seconds,
            "state": CohortState.READY.value,
        }
        for item in planned
    ]
    insert = sa.insert(cohort).returning(cohort.c.id, sort_by_parameter_order=True)
    ids = [int(cohort_id) for cohort_id in conn.execute(insert, rows).scalars()]
    bound = _bind(conn, ids, planned)
    short = [
        {"cohort": cohort_id, "n": bound.get(cohort_id, 0)}
        for cohort_id, item in zip(ids, planned, strict=True)
        if bound.get(cohort_id, 0) != len(item.job_ids)
    ]
    if short:
        conn.execute(
            sa.update(cohort).where(cohort.c.id == sa.bindparam("cohort")).values(n_jobs=sa.bindparam("n")), short
        )
    conn.execute(
        sa.insert(cohort_event), [{"cohort_id": cohort_id, "attempt": 0, "kind": "planned"} for cohort_id in ids]
    )
    return ids


def next_sequence(conn: sa.Connection) -> int:
    """One above every sequence number in use, so that a new plan goes behind what is planned already."""
    return int(conn.execute(sa.select(func.coalesce(func.max(cohort.c.sequence), 0) + 1)).scalar_one())


def last_keys(conn: sa.Connection, boots: Sequence[tuple[int, str]]) -> dict[str, bytes]:
    """For (boot id, queue) pairs: queue -> the last prefix key that is planned for it, or ran on that boot. There its
    next run goes on."""
    keys = {}
    for boot_id, queue in boots:
        probes = (
            sa.and_(cohort.c.queue == queue, cohort.c.state == CohortState.READY),
            cohort.c.instance_boot_id == boot_id,
        )
        found = [row for which in probes for row in conn.execute(_last_cohort(which))]
        if not found:
            continue
        last = max(found, key=lambda row: (row.sequence, row.id))
        key = conn.execute(
            sa.select(job.c.prefix_key)
            .where(job.c.cohort_id == last.id)
            .order_by(job.c.cohort_position.desc())
            .limit(1)
        ).scalar_one_or_none()
        if key is not None:
            keys[queue] = key
    return keys


def _last_cohort(which: sa.ColumnElement[bool]) -> sa.Select[Any]:
    bulk = cohort.c.priority < Priority.INTERACTIVE
    return sa.select(cohort.c.id, cohort.c.sequence).where(which, bulk).order_by(cohort.c.sequence.desc()).limit(1)


def unplan_ready(conn: sa.Connection, model: str, priority: int | None = None) -> int:
    """Dissolve cohorts of a class (None: of all bulk classes) that were planned and never tried, so that their jobs
    are planned anew, with later ones or over another set of instances. Returns how many jobs went back."""
    of_class = cohort.c.priority < Priority.INTERACTIVE if priority is None else cohort.c.priority == priority
    ids = (
        conn.execute(
            sa.select(cohort.c.id)
            .where(
                cohort.c.model == model,
                cohort.c.state == CohortState.READY,
                cohort.c.attempt == 0,
                ~cohort.c.alone,
                of_class,
            )
            .order_by(cohort.c.id)
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    if not ids:
        return 0
    freed = conn.execute(
        sa.update(job).where(job.c.cohort_id.in_(ids)).values(cohort_id=None, predicted_cached_tokens=None)
    )
    conn.execute(sa.delete(cohort_event).where(cohort_event.c.cohort_id.in_(ids)))
    conn.execute(sa.delete(cohort).where(cohort.c.id.in_(ids)))
    return freed.rowcount


def suspects(conn: sa.Connection, limit: int) -> list[Suspect]:
    """Cohorts of several jobs whose lease expired or whose engine died twice."""
    rows = conn.execute(
        sa.select(cohort.c.id, cohort.c.model, cohort.c.queue, cohort.c.priority)
        .where(cohort.c.state == CohortState.READY, cohort.c.failures >= 2, ~cohort.c.alone)
        .order_by(cohort.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return [Suspect(cohort_id=r.id, model=r.model, queue=r.queue, priority=r.priority) for r in rows]


def isolate(conn: sa.Connection, suspect: Suspect) -> int:
    """ready -> dead: each job without a result becomes a cohort of its own that runs beside nothing else. Returns
    how many."""
    jobs = conn.execute(
        sa.select(*_WAITING)
        .where(job.c.cohort_id == suspect.cohort_id, ~_HAS_RESULT)
        .order_by(job.c.cohort_position)
        .with_for_update(of=job)
    ).all()
    conn.execute(sa.update(job).where(job.c.id.in_([row.id for row in jobs])).values(cohort_id=None))
    conn.execute(
        sa.update(cohort).where(cohort.c.id == suspect.cohort_id).values(state=CohortState.DEAD, finished_at=func.now())
    )
    sequence = next_sequence(conn)
    insert_cohorts(
        conn,
        [
            NewCohort(
                model=suspect.model,
                queue=suspect.queue,
                sequence=sequence + position,
                priority=suspect.priority,
                alone=True,
                body_bytes=row.body_bytes,
                estimated_seconds=0.0,
                job_ids=[row.id],
                predicted_cached_tokens=[0],
                first_of_group=[True],
            )
            for position, row in enumerate(jobs)
        ],
    )
    conn.execute(
        sa.insert(cohort_event).values(cohort_id=suspect.cohort_id, attempt=0, kind="split", detail=f"{len(jobs)} jobs")
    )
    return len(jobs)


_HAS_RESULT = sa.exists().where(job_result.c.job_id == job.c.id)
_UNPLANNED = (
    job.c.cohort_id.is_(None),
    sa.or_(job.c.not_before.is_(None), job.c.not_before <= func.now()),
    ~_HAS_RESULT,
)
_WAITING = [
    job.c.id,
    job.c.prefix_key,
    job.c.prompt_tokens,
    job.c.predicted_output_tokens,
    func.octet_length(job.c.body).label("body_bytes"),
]

_PLAN_COLUMNS: dict[str, type[sa.types.TypeEngine[Any]]] = {
    "job_id": sa.BigInteger,
    "cohort_id": sa.BigInteger,
    "position": sa.Integer,
    "predicted": sa.Integer,
    "first": sa.Boolean,
}


def _waiting(conn: sa.Connection, model: str, limit: int, which: sa.ColumnElement[bool]) -> list[WaitingJob]:
    rows = conn.execute(
        sa.select(*_WAITING).where(job.c.model == model, which, *_UNPLANNED).order_by(job.c.id).limit(limit)
    )
    return [_job(row) for row in rows]


def _job(row: sa.Row[*tuple[Any, ...]]) -> WaitingJob:
    return WaitingJob(
        job_id=row.id,
        prefix_key=row.prefix_key,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.predicted_output_tokens,
        body_bytes=row.body_bytes,
    )


def _bind(conn: sa.Connection, ids: list[int], planned: Sequence[NewCohort]) -> dict[int, int]:
    """One UPDATE for all jobs of a plan; how many each cohort got."""
    rows = [
        (int(job_id), cohort_id, position, int(predicted), bool(first))
        for cohort_id, item in zip(ids, planned, strict=True)
        for position, (job_id, predicted, first) in enumerate(
            zip(item.job_ids, item.predicted_cached_tokens, item.first_of_group, strict=True)
        )
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(_PLAN_COLUMNS)
    arrays = [
        sa.cast(list(values), pg.ARRAY(kind)) for values, kind in zip(columns, _PLAN_COLUMNS.values(), strict=True)
    ]
    plan = func.unnest(*arrays).table_valued(*_PLAN_COLUMNS).render_derived(name="plan")
    admitted = sa.or_(
        job.c.batch_id.is_(None),
        sa.exists().where(batch.c.id == job.c.batch_id, batch.c.status == BatchStatus.IN_PROGRESS, ~batch.c.paused),
    )
    bound = (
        sa.update(job)
        .where(job.c.id == plan.c.job_id, job.c.cohort_id.is_(None), admitted, ~_HAS_RESULT)
        .values(
            cohort_id=plan.c.cohort_id,
            cohort_position=plan.c.position,
            predicted_cached_tokens=plan.c.predicted,
            first_of_group=plan.c.first,
        )
        .returning(job.c.cohort_id)
        .cte("bound")
    )
    counts = conn.execute(sa.select(bound.c.cohort_id, func.count()).group_by(bound.c.cohort_id)).all()
    return {int(row[0]): int(row[1]) for row in counts}
