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
_NO_SUSPECT = 2**63 - 1
_MAX_RESENDS = 6


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

    def take(self, cohorts: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of the first of (id, jobs) that there is room for."""
        taken: list[int] = []
        jobs = 0
        for cohort_id, n_jobs in cohorts[: self.most_cohorts]:
            if jobs >= self.jobs and len(taken) >= self.least_cohorts:
                break
            taken.append(cohort_id)
            jobs += n_jobs
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWork:
    """What is out for a boot and has no result."""

    jobs: int
    new_tokens: int  # of prompts: what the cache is not predicted to serve
    output_tokens: int  # predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The first or last job of a cohort."""

    cohort_id: int
    prefix_key: bytes
    prompt_tokens: int


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
    active_jobs: int
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
            sa.cast(func.coalesce(func.sum(cohort.c.n_jobs).filter(active), 0), sa.Integer).label("active_jobs"),
            func.coalesce(func.sum(seconds).filter(active), 0.0).label("active_seconds"),
        )
        .where(cohort.c.state.in_((CohortState.READY, *_ACTIVE)))
        .group_by(cohort.c.queue, cohort.c.model, cohort.c.priority)
    )
    return [QueueLoad(**row._mapping) for row in rows]


def open_work(conn: sa.Connection, boot_id: int) -> OpenWork:
    """Bulk jobs that are out for a boot and have no result: a few cohorts' worth of index probes."""
    new_tokens = job.c.prompt_tokens - func.coalesce(job.c.predicted_cached_tokens, 0)
    row = conn.execute(
        sa.select(
            func.count().label("jobs"),
            func.coalesce(func.sum(new_tokens), 0).label("new_tokens"),
            func.coalesce(func.sum(job.c.predicted_output_tokens), 0).label("output_tokens"),
        )
        .select_from(cohort)
        .join(job, job.c.cohort_id == cohort.c.id)
        .where(
            cohort.c.instance_boot_id == boot_id,
            cohort.c.state.in_(_ACTIVE),
            cohort.c.priority < Priority.INTERACTIVE,
            ~sa.exists().where(job_result.c.job_id == job.c.id),
        )
    ).one()
    return OpenWork(jobs=int(row.jobs), new_tokens=int(row.new_tokens), output_tokens=int(row.output_tokens))


def dispatch(
    conn: sa.Connection, *, boot_id: int, queue: str, model: str, room: Room, interactive: bool
) -> list[Message]:
    """ready -> dispatched for as many cohorts of a queue as there is room for, the most urgent first, in planned
    order. The caller commits, then publishes. Empty when the boot is no longer ready."""
    if room.most_cohorts <= 0 or not _lock_ready_boot(conn, boot_id):
        return []
    bulk = cohort.c.priority < Priority.INTERACTIVE
    alone_is_out = sa.exists().where(_other.c.instance_boot_id == boot_id, _other.c.state.in_(_ACTIVE), _other.c.alone)
    # Nobody overtakes a suspect: what comes behind it waits until the instance has run empty and it has had its turn.
    suspect = (
        sa.select(func.min(_other.c.sequence))
        .where(_other.c.queue == queue, _other.c.model == model, _other.c.state == CohortState.READY, _other.c.alone)
        .scalar_subquery()
    )
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
            cohort.c.sequence < func.coalesce(suspect, _NO_SUSPECT),
        )
        .order_by(cohort.c.priority.desc(), cohort.c.sequence, cohort.c.id)
        .limit(room.most_cohorts)
        .with_for_update(skip_locked=True)
    ).all()
    return _move(conn, room.take([(row.id, row.n_jobs) for row in rows]), boot_id, queue)


def dispatch_suspects(conn: sa.Connection, *, boot_id: int, queue: str, model: str) -> list[Message]:
    """ready -> dispatched for one cohort that runs alone, and only while nothing else is out for this boot."""
    if not _lock_ready_boot(conn, boot_id):
        return []
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
    add_events(conn, [(row.id, row.attempt) for row in rows], "expired", None)
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
        .where(cohort.c.id.in_(_unclaimed(older_than_seconds, cohort.c.resends < _MAX_RESENDS)))
        .values(dispatched_at=func.now(), resends=cohort.c.resends + 1)
        .returning(cohort.c.queue, cohort.c.id, cohort.c.dispatch_no)
    )
    return [Message(queue=row.queue, cohort_id=row.id, dispatch_no=row.dispatch_no) for row in rows]


def take_back_unheard(conn: sa.Connection, older_than_seconds: float) -> list[int]:
    """dispatched -> ready where message after message was sent in vain: the worker lives and does not hear the broker.
    Others may steal it then."""
    rows = conn.execute(
        sa.update(cohort)
        .where(cohort.c.id.in_(_unclaimed(older_than_seconds, cohort.c.resends >= _MAX_RESENDS)))
        .values(
            state=CohortState.READY,
            moved=True,
            dispatch_no=cohort.c.dispatch_no + 1,
            instance_boot_id=None,
            last_error="its worker took no message",
        )
        .returning(cohort.c.id, cohort.c.attempt)
    ).all()
    add_events(conn, [(row.id, row.attempt) for row in rows], "released", None)
    return [int(row.id) for row in rows]


def _unclaimed(older_than_seconds: float, which: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    """Locked in id order, and without waiting for a worker that froze while it claimed one."""
    dispatched = sa.and_(cohort.c.state == CohortState.DISPATCHED, cohort.c.dispatched_at < ago(older_than_seconds))
    ids = sa.select(cohort.c.id).where(dispatched, which).order_by(cohort.c.id)
    return ids.with_for_update(skip_locked=True).scalar_subquery()


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


def _lock_ready_boot(conn: sa.Connection, boot_id: int) -> bool:
    """True, and it stays ready until this transaction ends. False: it drains or is gone."""
    is_ready = sa.and_(instance_boot.c.id == boot_id, instance_boot.c.state == BootState.READY)
    found = conn.execute(sa.select(instance_boot.c.id).where(is_ready).with_for_update(read=True))
    return found.one_or_none() is not None


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
            resends=0,
        )
        .returning(cohort.c.id, cohort.c.dispatch_no, cohort.c.attempt)
    ).all()
    numbers = {int(row.id): int(row.dispatch_no) for row in rows}
    add_events(conn, [(row.id, row.attempt) for row in rows], "dispatched", boot_id)
    return [Message(queue=queue, cohort_id=i, dispatch_no=numbers[i]) for i in ids if i in numbers]


def add_events(conn: sa.Connection, cohorts: Sequence[tuple[int, int]], kind: str, boot_id: int | None) -> None:
    if cohorts:
        conn.execute(
            sa.insert(cohort_event),
            [
                {"cohort_id": cohort_id, "attempt": attempt, "kind": kind, "instance_boot_id": boot_id}
                for cohort_id, attempt in cohorts
            ],
        )
