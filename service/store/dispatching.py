"""Cohorts as the dispatcher moves them: to an instance, from one to another, out again when a message was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BootState, CohortState, Priority
from service.store.clock import ago
from service.store.tables import cohort, cohort_event, instance_boot, job, job_result

_ACTIVE = (CohortState.DISPATCHED, CohortState.RUNNING)
_other = cohort.alias("other")
_NOT_COPIED = {"id", "n_jobs", "estimated_seconds", "body_bytes"}  # when a cohort is split


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is published after the commit: a hint that carries ids."""

    queue: str
    cohort_id: int
    dispatch_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much may be dispatched: cohorts until `jobs` are among them, at least and at most so many."""

    jobs: int
    least_cohorts: int
    most_cohorts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The first or last job of a cohort."""

    cohort_id: int
    prefix_key: bytes
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TailJob:
    """A job of a cohort that may be stolen or split: what choosing the place needs."""

    job_id: int
    prefix_key: bytes
    prompt_tokens: int
    predicted_cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The last ready cohort of a queue; its jobs in planned order."""

    cohort_id: int
    estimated_seconds: float
    jobs: list[TailJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """What waits and what is out for one queue."""

    queue: str
    model: str
    priority: int
    ready_cohorts: int
    ready_jobs: int
    ready_seconds: float
    active_cohorts: int
    active_seconds: float

    @property
    def seconds(self) -> float:
        return self.ready_seconds + self.active_seconds


def queue_loads(conn: sa.Connection) -> list[QueueLoad]:
    """One row per (queue, model, priority class) with open cohorts. Cohorts that must run alone count as ready only."""
    ready = cohort.c.state == CohortState.READY
    active = cohort.c.state.in_(_ACTIVE)
    seconds = cohort.c.estimated_seconds
    rows = conn.execute(
        sa.select(
            cohort.c.queue,
            cohort.c.model,
            cohort.c.priority,
            func.count().filter(ready).label("ready_cohorts"),
            sa.cast(func.coalesce(func.sum(cohort.c.n_jobs).filter(ready), 0), sa.Integer).label("ready_jobs"),
            func.coalesce(func.sum(seconds).filter(ready), 0.0).label("ready_seconds"),
            func.count().filter(active).label("active_cohorts"),
            func.coalesce(func.sum(seconds).filter(active), 0.0).label("active_seconds"),
        )
        .where(cohort.c.state.in_((CohortState.READY, *_ACTIVE)))
        .group_by(cohort.c.queue, cohort.c.model, cohort.c.priority)
    )
    return [QueueLoad(**row._mapping) for row in rows]


def open_jobs(conn: sa.Connection, boot_id: int) -> int:
    """Bulk jobs that are out for a boot and have no result: a few cohorts' worth of index probes."""
    return int(
        conn.execute(
            sa.select(func.count())
            .select_from(cohort)
            .join(job, job.c.cohort_id == cohort.c.id)
            .where(
                cohort.c.instance_boot_id == boot_id,
                cohort.c.state.in_(_ACTIVE),
                cohort.c.priority < Priority.INTERACTIVE,
                ~sa.exists().where(job_result.c.job_id == job.c.id),
            )
        ).scalar_one()
    )


def dispatch(
    conn: sa.Connection, *, boot_id: int, queue: str, model: str, room: Room, interactive: bool
) -> list[Message]:
    """ready -> dispatched for as many cohorts of a queue as there is room for, the most urgent first, in planned
    order. The caller commits, then publishes. Empty when the boot is no longer ready."""
    boot = conn.execute(
        sa.select(instance_boot.c.id)
        .where(instance_boot.c.id == boot_id, instance_boot.c.state == BootState.READY)
        .with_for_update(read=True)
    ).one_or_none()
    if boot is None or room.most_cohorts <= 0:
        return []
    bulk = cohort.c.priority < Priority.INTERACTIVE
    alone_is_out = sa.exists().where(_other.c.instance_boot_id == boot_id, _other.c.state.in_(_ACTIVE), _other.c.alone)
    rows = conn.execute(
        sa.select(cohort.c.id, cohort.c.n_jobs)
        .where(
            cohort.c.queue == queue,
            cohort.c.model == model,
            cohort.c.state == CohortState.READY,
            ~cohort.c.alone,
            cohort.c.failures < 2,  # a suspect is taken apart first
            ~bulk if interactive else bulk,
            ~alone_is_out,
        )
        .order_by(cohort.c.priority.desc(), cohort.c.sequence, cohort.c.id)
        .limit(room.most_cohorts)
        .with_for_update(skip_locked=True)
    ).all()
    chosen: list[int] = []
    jobs = 0
    for row in rows:
        if jobs >= room.jobs and len(chosen) >= room.least_cohorts:
            break
        chosen.append(row.id)
        jobs += row.n_jobs
    return _move(conn, chosen, boot_id, queue)


def dispatch_suspects(conn: sa.Connection, *, boot_id: int, queue: str, model: str) -> list[Message]:
    """ready -> dispatched for one cohort that runs alone, and only while nothing else is out for this boot."""
    busy = sa.exists().where(_other.c.instance_boot_id == boot_id, _other.c.state.in_(_ACTIVE))
    chosen = conn.execute(
        sa.select(cohort.c.id)
        .where(
            cohort.c.queue == queue,
            cohort.c.model == model,
            cohort.c.state == CohortState.READY,
            cohort.c.alone,
            ~busy,
        )
        .order_by(cohort.c.priority.desc(), cohort.c.sequence, cohort.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    ).scalars()
    return _move(conn, list(chosen), boot_id, queue)


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
        .add_columns(job.c.predicted_output_tokens)
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
    conn.execute(sa.update(job).where(job.c.id.in_(moved)).values(cohort_id=new_id))
    conn.execute(
        sa.update(cohort)
        .where(cohort.c.id == tail.cohort_id)
        .values(
            n_jobs=at,
            estimated_seconds=cohort.c.estimated_seconds * (1 - share),
            body_bytes=sa.cast(cohort.c.body_bytes * (1 - share), sa.BigInteger),
        )
    )
    _events(conn, [(int(new_id), 0)], "split", None)
    return int(new_id)


def rebind(conn: sa.Connection, cohort_id: int, queue: str, first_predicted: int | None) -> None:
    """Move a ready cohort to another queue (a steal, or its instance is gone). Its first job meets another cache:
    `first_predicted` is what it may find there, None where that is unknown."""
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
    _events(conn, [(cohort_id, 0)], "stolen", None)


def ready_cohorts_of(conn: sa.Connection, queue: str, model: str) -> list[int]:
    """Ready cohorts of a queue, in order: what must move when its instance is gone."""
    rows = conn.execute(
        sa.select(cohort.c.id)
        .where(cohort.c.queue == queue, cohort.c.model == model, cohort.c.state == CohortState.READY)
        .order_by(cohort.c.priority.desc(), cohort.c.sequence, cohort.c.id)
    )
    return [int(row.id) for row in rows]


def expire_leases(conn: sa.Connection) -> list[int]:
    """running -> ready for cohorts whose lease ran out; a failure each. State and lease are checked again inside
    the UPDATE, so a renewal that commits first wins."""
    late = sa.and_(cohort.c.state == CohortState.RUNNING, cohort.c.lease_expires_at < func.now())
    ids = sa.select(cohort.c.id).where(late).order_by(cohort.c.id).with_for_update(skip_locked=True)
    rows = conn.execute(
        sa.update(cohort)
        .where(cohort.c.id.in_(ids.scalar_subquery()), late)
        .values(
            state=CohortState.READY,
            moved=True,
            failures=cohort.c.failures + 1,
            dispatch_no=cohort.c.dispatch_no + 1,
            instance_boot_id=None,
            lease_expires_at=None,
            last_error="lease expired",
        )
        .returning(cohort.c.id, cohort.c.attempt)
    ).all()
    expired = [int(row.id) for row in rows]
    blame_alone(conn, expired)
    _events(conn, [(row.id, row.attempt) for row in rows], "expired", None)
    return expired


def blame_alone(conn: sa.Connection, cohort_ids: Sequence[int]) -> None:
    """A job that ran beside nothing else when its worker was lost counts that as an engine death: otherwise a job
    that takes the whole worker with it would run for ever."""
    if not cohort_ids:
        return
    alone = sa.select(cohort.c.id).where(cohort.c.id.in_(cohort_ids), cohort.c.alone)
    conn.execute(sa.update(job).where(job.c.cohort_id.in_(alone)).values(crashes=job.c.crashes + 1))


def lost_messages(conn: sa.Connection, older_than_seconds: float) -> list[Message]:
    """Cohorts dispatched a while ago that nobody claimed: their message was lost, or was never sent. Under the same
    dispatch number, so a late original is harmless; a boot that is gone gives its cohorts back instead.

    No worker has reason to leave one lying: what is out for a boot never exceeds its threads. That it claimed others
    meanwhile says nothing of this one (a queue that was emptied lost some and got new ones).
    """
    rows = conn.execute(
        sa.update(cohort)
        .where(cohort.c.state == CohortState.DISPATCHED, cohort.c.dispatched_at < ago(older_than_seconds))
        .values(dispatched_at=func.now())
        .returning(cohort.c.queue, cohort.c.id, cohort.c.dispatch_no)
    )
    return [Message(queue=row.queue, cohort_id=row.id, dispatch_no=row.dispatch_no) for row in rows]


def edges_of(conn: sa.Connection, cohort_ids: Sequence[int]) -> list[Edge]:
    """The first and the last job of each cohort: what the instance's cache will have met."""
    rows = conn.execute(
        sa.select(job.c.cohort_id, job.c.prefix_key, job.c.prompt_tokens)
        .join(cohort, cohort.c.id == job.c.cohort_id)
        .where(
            job.c.cohort_id.in_(cohort_ids),
            sa.or_(job.c.cohort_position == 0, job.c.cohort_position == cohort.c.n_jobs - 1),
        )
        .order_by(cohort.c.sequence, cohort.c.id, job.c.cohort_position)
    )
    return [Edge(cohort_id=r.cohort_id, prefix_key=r.prefix_key, prompt_tokens=r.prompt_tokens) for r in rows]


def _move(conn: sa.Connection, ids: list[int], boot_id: int, queue: str) -> list[Message]:
    if not ids:
        return []
    rows = conn.execute(
        sa.update(cohort)
        .where(cohort.c.id.in_(ids), cohort.c.state == CohortState.READY)
        .values(
            state=CohortState.DISPATCHED,
            instance_boot_id=boot_id,
            dispatch_no=cohort.c.dispatch_no + 1,
            dispatched_at=func.now(),
        )
        .returning(cohort.c.id, cohort.c.dispatch_no, cohort.c.attempt)
    ).all()
    numbers = {int(row.id): int(row.dispatch_no) for row in rows}
    _events(conn, [(row.id, row.attempt) for row in rows], "dispatched", boot_id)
    return [Message(queue=queue, cohort_id=i, dispatch_no=numbers[i]) for i in ids if i in numbers]


def _events(conn: sa.Connection, cohorts: Sequence[tuple[int, int]], kind: str, boot_id: int | None) -> None:
    if cohorts:
        conn.execute(
            sa.insert(cohort_event),
            [
                {"cohort_id": cohort_id, "attempt": attempt, "kind": kind, "instance_boot_id": boot_id}
                for cohort_id, attempt in cohorts
            ],
        )
