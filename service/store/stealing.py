"""Ready cohorts that move to another queue: stolen by an instance that ran dry, or left behind by one that is gone."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import CohortState, Priority
from service.store.dispatching import add_events
from service.store.tables import cohort, job

_NOT_COPIED = {"id", "n_jobs", "estimated_seconds", "body_bytes"}  # when a cohort is split
_COHORTS_LOOKED_AT = 64  # of a boot, for what its cache holds


@dataclass(frozen=True, slots=True)
class TailJob:
    """A job of a cohort that may be stolen or split: what choosing the place needs."""

    job_id: int
    prefix_key: bytes
    prompt_tokens: int
    predicted_cached_tokens: int
    output_tokens: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The last ready cohort of a queue; its jobs in planned order."""

    cohort_id: int
    estimated_seconds: float
    jobs: list[TailJob]


def tail_of(conn: sa.Connection, queue: str, model: str) -> Tail | None:
    """The last ready bulk cohort of a queue, locked: what an idle instance may take."""
    row = conn.execute(
        sa.select(cohort.c.id, cohort.c.estimated_seconds)
        .where(
            cohort.c.queue == queue,
            cohort.c.model == model,
            cohort.c.state == CohortState.READY,
            cohort.c.priority < Priority.INTERACTIVE,
            ~cohort.c.alone,
        )
        .order_by(cohort.c.priority, cohort.c.sequence.desc(), cohort.c.id.desc())
        .limit(1)
        .with_for_update(skip_locked=True)
    ).one_or_none()
    if row is None:
        return None
    jobs = conn.execute(
        sa.select(job.c.id, job.c.prefix_key, job.c.prompt_tokens, job.c.predicted_cached_tokens)
        .add_columns(job.c.predicted_output_tokens, job.c.cohort_position)
        .where(job.c.cohort_id == row.id)
        .order_by(job.c.cohort_position, job.c.id)
    ).all()
    return Tail(cohort_id=row.id, estimated_seconds=row.estimated_seconds, jobs=[TailJob(*item) for item in jobs])


def split_tail(conn: sa.Connection, tail: Tail, at: int) -> int:
    """The jobs from index `at` on become a ready cohort of their own behind it. Returns its id."""
    moved = [item.job_id for item in tail.jobs[at:]]
    share = len(moved) / len(tail.jobs)
    columns = [column for column in cohort.c if column.name not in _NOT_COPIED]
    new_id = conn.execute(
        sa.insert(cohort)
        .from_select(
            [*(column.name for column in columns), "n_jobs", "estimated_seconds", "body_bytes"],
            sa.select(
                *columns,
                sa.literal(len(moved)),
                cohort.c.estimated_seconds * share,
                sa.cast(cohort.c.body_bytes * share, sa.BigInteger),
            ).where(cohort.c.id == tail.cohort_id),
        )
        .returning(cohort.c.id)
    ).scalar_one()
    conn.execute(
        sa.update(job)
        .where(job.c.id.in_(moved))
        .values(cohort_id=new_id, cohort_position=job.c.cohort_position - (tail.jobs[at].position))
    )
    conn.execute(
        sa.update(cohort)
        .where(cohort.c.id == tail.cohort_id)
        .values(
            n_jobs=at,
            estimated_seconds=cohort.c.estimated_seconds * (1 - share),
            body_bytes=sa.cast(cohort.c.body_bytes * (1 - share), sa.BigInteger),
        )
    )
    add_events(conn, [(int(new_id), 0)], "split", None)
    return int(new_id)


def keys_run(conn: sa.Connection, boot_id: int, kv_tokens: int) -> list[bytes]:
    """Prefix keys, sorted, of the bulk jobs that a boot was given last: as many as its cache of `kv_tokens` holds."""
    last = (
        sa.select(cohort.c.id, cohort.c.sequence)
        .where(cohort.c.instance_boot_id == boot_id, cohort.c.priority < Priority.INTERACTIVE)
        .order_by(cohort.c.sequence.desc(), cohort.c.id.desc())
        .limit(_COHORTS_LOOKED_AT)
        .subquery()
    )
    new_tokens = job.c.prompt_tokens - func.coalesce(job.c.predicted_cached_tokens, 0) + job.c.predicted_output_tokens
    order = (last.c.sequence.desc(), last.c.id.desc(), job.c.cohort_position.desc())
    given = (
        sa.select(job.c.prefix_key, func.sum(new_tokens).over(order_by=order, rows=(None, 0)).label("tokens"))
        .join(last, job.c.cohort_id == last.c.id)
        .subquery()
    )
    return sorted(conn.execute(sa.select(given.c.prefix_key).where(given.c.tokens <= kv_tokens)).scalars())


def predict(conn: sa.Connection, tokens_by_job: dict[int, int]) -> None:
    """What these jobs should find in the cache where they will run."""
    rows = [{"job": job_id, "tokens": tokens} for job_id, tokens in tokens_by_job.items()]
    if rows:
        statement = sa.update(job).where(job.c.id == sa.bindparam("job"))
        conn.execute(statement.values(predicted_cached_tokens=sa.bindparam("tokens")), rows)


def rebind(conn: sa.Connection, cohort_id: int, queue: str, first_predicted: int | None) -> None:
    """Move a ready cohort to another queue (a steal, or its instance is gone). Its first job meets another cache:
    `first_predicted` is what it may find there, None where that is predicted otherwise."""
    conn.execute(
        sa.update(cohort)
        .where(cohort.c.id == cohort_id, cohort.c.state == CohortState.READY)
        .values(queue=queue, moved=True, dispatch_no=cohort.c.dispatch_no + 1)
    )
    if first_predicted is not None:
        first = (
            sa.select(job.c.id)
            .where(job.c.cohort_id == cohort_id)
            .order_by(job.c.cohort_position, job.c.id)
            .limit(1)
            .scalar_subquery()
        )
        conn.execute(sa.update(job).where(job.c.id == first).values(predicted_cached_tokens=first_predicted))
    add_events(conn, [(cohort_id, 0)], "stolen", None)


def ready_cohorts_of(conn: sa.Connection, queue: str, model: str) -> list[tuple[int, float]]:
    """(id, estimated seconds) of the ready cohorts of a queue, in order: what must move when its instance is gone."""
    rows = conn.execute(
        sa.select(cohort.c.id, cohort.c.estimated_seconds)
        .where(cohort.c.queue == queue, cohort.c.model == model, cohort.c.state == CohortState.READY)
        .order_by(cohort.c.priority.desc(), cohort.c.sequence, cohort.c.id)
    )
    return [(int(row.id), float(row.estimated_seconds)) for row in rows]
