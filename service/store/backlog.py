"""The backlog as the dispatcher sees it: jobs with no cohort, and the rows of a new plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func
from sqlalchemy.dialects import postgresql as pg

from service.core.model import BatchStatus, CohortState, Priority
from service.store.clock import RELAXED
from service.store.frozen import Frozen
from service.store.tables import batch, cohort, cohort_event, job, job_result, tenant

SINGLES_CHANNEL = "single"  # NOTIFY: a single job waits, or a thread for one is free
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """One job of the backlog: what planning needs, never its body."""

    job_id: int
    prefix_key: bytes
    prompt_tokens: int
    output_tokens: int
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSingle:
    """A single job of the backlog."""

    job: WaitingJob
    model: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch whose jobs may run, as the dispatcher needs it."""

    id: str
    tenant_id: int
    weight: int  # the tenant's
    priority: int
    seconds_left: float  # until its deadline
    intake_done: bool
    intake_line: int  # the last line that intake has taken in
    expires_at: datetime

    @property
    def order(self) -> tuple[int, datetime]:
        """What its place in the backlog was made from; where a PATCH changed it, the place is another one."""
        return self.priority, self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPosition:
    """A place among the jobs that wait to be tried again."""

    not_before: datetime = _LONG_AGO
    job_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A job to be tried again."""

    batch_id: str
    job: WaitingJob
    position: RetryPosition


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


def open_batches(conn: sa.Connection, least_lines: int) -> list[OpenBatch]:
    """Batches whose jobs may run now, the earliest deadline first.

    A batch that intake still works on is left for later until it has taken in `least_lines`: planning its first lines
    without the rest would part what belongs together.
    """
    is_whole = sa.or_(batch.c.intake_done, batch.c.intake_line >= least_lines)
    seconds_left = sa.cast(func.extract("epoch", batch.c.expires_at - func.now()), sa.Double)
    rows = conn.execute(
        sa.select(batch.c.id, batch.c.tenant_id, tenant.c.weight, batch.c.priority, seconds_left.label("seconds_left"))
        .add_columns(batch.c.intake_done, batch.c.intake_line, batch.c.expires_at)
        .join(tenant, tenant.c.id == batch.c.tenant_id)
        .where(batch.c.status == BatchStatus.IN_PROGRESS, ~batch.c.paused, is_whole)
        .order_by(batch.c.expires_at, batch.c.id)
    )
    return [OpenBatch(**row._mapping) for row in rows]


def jobs_after(conn: sa.Connection, batch_id: str, model: str, after_id: int, limit: int) -> list[WaitingJob]:
    """Unplanned jobs of a batch in order of ids (which is file order), without those that wait to be tried again."""
    rows = conn.execute(
        sa.select(*_WAITING)
        .where(job.c.batch_id == batch_id, job.c.model == model, job.c.id > after_id)
        .where(job.c.cohort_id.is_(None), job.c.not_before.is_(None), ~_HAS_RESULT)
        .order_by(job.c.id)
        .limit(limit)
    )
    return [_job(row) for row in rows]


def jobs_to_retry(conn: sa.Connection, model: str, after: RetryPosition, limit: int) -> list[Retry]:
    """Bulk jobs of open batches that came back from an engine and whose time to be tried again has come, in the order
    of that time."""
    place = sa.tuple_(job.c.not_before, job.c.id)
    rows = conn.execute(
        sa.select(*_WAITING, job.c.batch_id, job.c.not_before)
        .join(batch, batch.c.id == job.c.batch_id)
        .where(batch.c.status == BatchStatus.IN_PROGRESS, ~batch.c.paused)
        .where(job.c.not_before.is_not(None), job.c.cohort_id.is_(None), job.c.not_before <= func.now(), ~_HAS_RESULT)
        .where(job.c.model == model, place > sa.tuple_(sa.literal(after.not_before), sa.literal(after.job_id)))
        .order_by(job.c.not_before, job.c.id)
        .limit(limit)
    )
    return [
        Retry(batch_id=row.batch_id, job=_job(row), position=RetryPosition(not_before=row.not_before, job_id=row.id))
        for row in rows
    ]


def jobs_by_batch(conn: sa.Connection, job_ids: Sequence[int]) -> list[tuple[str, int, int]]:
    """For jobs that were to be bound: (batch id, how many they are, how many of them still wait to be planned)."""
    still = sa.and_(job.c.cohort_id.is_(None), ~_HAS_RESULT)
    rows = conn.execute(
        sa.select(job.c.batch_id, func.count(), func.count().filter(still))
        .where(job.c.id == func.any(sa.cast(list(job_ids), pg.ARRAY(sa.BigInteger))), job.c.batch_id.is_not(None))
        .group_by(job.c.batch_id)
    )
    return [(str(row[0]), int(row[1]), int(row[2])) for row in rows]


def waiting_singles(conn: sa.Connection, models: Sequence[str], limit: int) -> list[WaitingSingle]:
    """Unplanned single jobs of these models, the most urgent first. Makes the transaction a relaxed one where there
    are any."""
    rows = _SINGLES.run(conn, models=list(models), limit=limit)
    return [WaitingSingle(job=_job(row), model=row.model, priority=row.priority) for row in rows]


def insert_cohorts(conn: sa.Connection, planned: Sequence[NewCohort]) -> list[int]:
    """Write a plan: cohort rows in state ready, and their jobs bound to them. A job that was bound, ended, cancelled
    or paused since the backlog was read stays out. Returns the ids, in the order given."""
    if not planned:
        return []
    rows = [{**cohort_row(item), "state": CohortState.READY.value} for item in planned]
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


def cohort_row(item: NewCohort) -> dict[str, Any]:
    """The columns of a cohort as planned; the state is the caller's."""
    return {
        "model": item.model,
        "queue": item.queue,
        "sequence": item.sequence,
        "priority": item.priority,
        "alone": item.alone,
        "n_jobs": len(item.job_ids),
        "body_bytes": item.body_bytes,
        "estimated_seconds": item.estimated_seconds,
    }


def next_sequence(conn: sa.Connection) -> int:
    """One above every sequence number in use, so that a new plan goes behind what is planned already."""
    return int(_NEXT_SEQUENCE.run(conn).scalar_one())


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

_SINGLES = Frozen(
    sa.select(*_WAITING, job.c.model, job.c.priority, RELAXED)
    .where(job.c.model == func.any(sa.bindparam("models", type_=pg.ARRAY(sa.Text))))
    .where(job.c.batch_id.is_(None), *_UNPLANNED)
    .order_by(job.c.priority.desc(), job.c.id)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_NEXT_SEQUENCE = Frozen(sa.select(func.coalesce(func.max(cohort.c.sequence), 0) + 1))

_PLAN_COLUMNS: dict[str, type[sa.types.TypeEngine[Any]]] = {
    "job_id": sa.BigInteger,
    "cohort_id": sa.BigInteger,
    "position": sa.Integer,
    "predicted": sa.Integer,
    "first": sa.Boolean,
}


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
