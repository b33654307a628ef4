"""Boots of instances: who is alive, what its engine said of itself, and when it was last heard of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BootState, CohortState
from service.errors import InstanceHeld
from service.store.clock import ago
from service.store.dispatching import blame_alone
from service.store.tables import cohort, cohort_event, instance_boot, job, job_result

_FORMER_JOBS = 2_000  # more than a cache of millions of tokens held, in most fleets
_LIVE = (BootState.STARTING, BootState.READY, BootState.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFacts:
    """What was probed before a boot became ready; None where the engine does not say."""

    engine_version: str | None
    kv_capacity_tokens: int | None
    block_size: int | None
    max_num_seqs: int
    max_model_len: int | None
    honours_salt: bool
    honours_priority: bool
    reports_cached_tokens: bool
    key_agrees: bool | None
    alarm: str | None = None  # a core.alarm.Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBoot:
    """What a worker knows of its boot before its engine is up."""

    name: str
    queue: str
    host: str
    pid: int
    pid_started_at: float  # Unix seconds
    engine: str
    model: str
    devices: Sequence[int]
    engine_arguments: Sequence[str]
    adapters: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One life of an instance, as its row says."""

    id: int
    name: str
    queue: str
    host: str
    pid: int
    pid_started_at: float
    engine: str
    engine_version: str | None
    model: str
    adapters: tuple[str, ...]
    kv_capacity_tokens: int | None
    block_size: int | None
    max_num_seqs: int | None
    max_model_len: int | None
    key_agrees: bool | None
    alarm: str | None
    state: BootState
    running_jobs: int
    waiting_jobs: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    started_at: datetime
    heartbeat_at: datetime


def start_boot(
    conn: sa.Connection, boot: NewBoot, *, stale_after_seconds: float, is_dead: Callable[[str, int, float], bool]
) -> int:
    """A new boot of a queue, in the caller's transaction; its id.

    A predecessor that is silent for `stale_after_seconds`, or whose process `is_dead(host, pid, pid_started_at)`
    proves gone, or that is this very process, is marked gone and its cohorts are released; any other one keeps the
    queue, and InstanceHeld names it.
    """
    row = conn.execute(
        sa.select(instance_boot, (instance_boot.c.heartbeat_at < ago(stale_after_seconds)).label("is_silent"))
        .where(instance_boot.c.queue == boot.queue, instance_boot.c.state != BootState.GONE)
        .with_for_update()
    ).one_or_none()
    if row is not None:
        is_own = (row.host, row.pid, row.pid_started_at) == (boot.host, boot.pid, boot.pid_started_at)
        if not (is_own or row.is_silent or is_dead(row.host, row.pid, row.pid_started_at)):
            raise InstanceHeld(f"{boot.name}: process {row.pid} on {row.host} holds {boot.queue}.")
        mark_gone(conn, row.id, "replaced by its successor")
    values = {name: getattr(boot, name) for name in NewBoot.__dataclass_fields__} | _former_rates(conn, boot)
    insert = sa.insert(instance_boot).values(**values, state=BootState.STARTING).returning(instance_boot.c.id)
    return int(conn.execute(insert).scalar_one())


def _former_rates(conn: sa.Connection, boot: NewBoot) -> dict[str, float]:
    """The rates of the newest boot of this instance that ran the same engine, where it had any."""
    rates = (instance_boot.c.prefill_tokens_per_second, instance_boot.c.decode_tokens_per_second)
    same = [instance_boot.c[name] == getattr(boot, name) for name in ("name", "engine", "model", "devices")]
    newest = (
        sa.select(*rates)
        .where(*same, instance_boot.c.engine_arguments == list(boot.engine_arguments), rates[0].is_not(None))
        .order_by(instance_boot.c.id.desc())
        .limit(1)
    )
    row = conn.execute(newest).one_or_none()
    return {} if row is None else dict(row._mapping)


def former_keys(conn: sa.Connection, boot_id: int) -> list[bytes]:
    """Prefix keys of the last jobs that ran on the boot before this one in its queue: what its cache lost."""
    mine = sa.select(instance_boot.c.queue).where(instance_boot.c.id == boot_id).scalar_subquery()
    former = (
        sa.select(func.max(instance_boot.c.id))
        .where(instance_boot.c.queue == mine, instance_boot.c.id < boot_id)
        .scalar_subquery()
    )
    last = (
        sa.select(job_result.c.job_id)
        .where(job_result.c.instance_boot_id == former)
        .order_by(job_result.c.recorded_xid.desc(), job_result.c.job_id.desc())
        .limit(_FORMER_JOBS)
    )
    return list(conn.execute(sa.select(job.c.prefix_key).where(job.c.id.in_(last))).scalars())


def mark_ready(conn: sa.Connection, boot_id: int, facts: BootFacts) -> bool:
    """starting -> ready. False where the boot was marked gone meanwhile. Wakes the dispatcher."""
    values = {name: getattr(facts, name) for name in BootFacts.__dataclass_fields__}
    done = conn.execute(
        sa.update(instance_boot)
        .where(instance_boot.c.id == boot_id, instance_boot.c.state == BootState.STARTING)
        .values(state=BootState.READY, ready_at=func.now(), heartbeat_at=func.now(), **values)
    )
    conn.execute(sa.select(func.pg_notify("dispatch", "")))
    return done.rowcount == 1


def heartbeat(
    conn: sa.Connection, boot_id: int, running_jobs: int, waiting_jobs: int, *, alarm: str | None = None
) -> bool:
    """Say that this boot lives, and what its results prove to be wrong with it. False: it was marked gone, and must
    not go on under this id."""
    alarmed = {"key_agrees": False, "alarm": alarm} if alarm is not None else {}
    done = conn.execute(
        sa.update(instance_boot)
        .where(instance_boot.c.id == boot_id, instance_boot.c.state != BootState.GONE)
        .values(heartbeat_at=func.now(), running_jobs=running_jobs, waiting_jobs=waiting_jobs, **alarmed)
    )
    return done.rowcount == 1


def mark_draining(conn: sa.Connection, boot_id: int) -> None:
    """ready -> draining: the dispatcher gives it nothing new and plans its share elsewhere."""
    conn.execute(
        sa.update(instance_boot)
        .where(instance_boot.c.id == boot_id, instance_boot.c.state.in_((BootState.STARTING, BootState.READY)))
        .values(state=BootState.DRAINING)
    )
    conn.execute(sa.select(func.pg_notify("dispatch", "")))


def mark_gone(conn: sa.Connection, boot_id: int, reason: str) -> None:
    """Any -> gone, with everything it held released. A worker that drains releases its cohorts first; one that still
    runs here counts a failure, and what was dispatched and not claimed becomes stale by its dispatch number."""
    done = conn.execute(
        sa.update(instance_boot)
        .where(instance_boot.c.id == boot_id, instance_boot.c.state != BootState.GONE)
        .values(state=BootState.GONE, gone_at=func.now(), gone_reason=reason, running_jobs=0, waiting_jobs=0)
    )
    if done.rowcount == 0:
        return
    release_cohorts_of(conn, boot_id, reason)
    conn.execute(sa.select(func.pg_notify("dispatch", "")))


def release_cohorts_of(conn: sa.Connection, boot_id: int, reason: str) -> list[int]:
    """Cohorts dispatched to or running on a boot -> ready. A running one counts a failure: its worker did not
    release it itself. Locks in id order."""
    held = conn.execute(
        sa.select(cohort.c.id, cohort.c.state)
        .where(
            cohort.c.instance_boot_id == boot_id,
            cohort.c.state.in_((CohortState.DISPATCHED, CohortState.RUNNING)),
        )
        .order_by(cohort.c.id)
        .with_for_update()
    ).all()
    if not held:
        return []
    blame_alone(conn, [row.id for row in held if row.state == CohortState.RUNNING])
    rows = conn.execute(
        sa.update(cohort)
        .where(cohort.c.id.in_([row.id for row in held]))
        .values(
            failures=cohort.c.failures + sa.case((cohort.c.state == CohortState.RUNNING, 1), else_=0),
            state=CohortState.READY,
            moved=True,
            dispatch_no=cohort.c.dispatch_no + 1,
            instance_boot_id=None,
            lease_expires_at=None,
            last_error=reason,
        )
        .returning(cohort.c.id, cohort.c.attempt)
    ).all()
    events = [
        {"cohort_id": row.id, "attempt": row.attempt, "kind": "released", "instance_boot_id": boot_id, "detail": reason}
        for row in rows
    ]
    if events:
        conn.execute(sa.insert(cohort_event), events)
    return [row.id for row in rows]


def reap_boots(conn: sa.Connection, stale_after_seconds: float) -> list[int]:
    """Mark boots gone that were silent for long; their cohorts go back. A starting boot beats too."""
    silent = conn.execute(
        sa.select(instance_boot.c.id)
        .where(
            instance_boot.c.state != BootState.GONE,
            instance_boot.c.heartbeat_at < ago(stale_after_seconds),
        )
        .order_by(instance_boot.c.id)
        .with_for_update(skip_locked=True)
    ).scalars()
    gone = [int(boot_id) for boot_id in silent]
    for boot_id in gone:
        mark_gone(conn, boot_id, "no heartbeat")
    return gone


def release_stranded(conn: sa.Connection) -> list[int]:
    """Boots that are gone and still have cohorts out, which no guarded move leaves behind; what they held goes back."""
    out = cohort.c.state.in_((CohortState.DISPATCHED, CohortState.RUNNING))
    stranded = (
        conn.execute(
            sa.select(cohort.c.instance_boot_id)
            .join(instance_boot, instance_boot.c.id == cohort.c.instance_boot_id)
            .where(out, instance_boot.c.state == BootState.GONE)
            .distinct()
        )
        .scalars()
        .all()
    )
    return [cohort_id for boot_id in stranded for cohort_id in release_cohorts_of(conn, boot_id, "its boot is gone")]


def ready_boots(conn: sa.Connection, stale_after_seconds: float) -> list[Boot]:
    """Boots that take work now, by name."""
    fresh = instance_boot.c.heartbeat_at > ago(stale_after_seconds)
    rows = conn.execute(
        sa.select(*_BOOT_COLUMNS).where(instance_boot.c.state == BootState.READY, fresh).order_by(instance_boot.c.name)
    )
    return [_boot(row) for row in rows]


def list_boots(conn: sa.Connection) -> list[Boot]:
    """Every boot that is not gone, by name."""
    rows = conn.execute(
        sa.select(*_BOOT_COLUMNS).where(instance_boot.c.state.in_(_LIVE)).order_by(instance_boot.c.name)
    )
    return [_boot(row) for row in rows]


def set_rates(conn: sa.Connection, boot_id: int, prefill: float, decode: float) -> None:
    """Rates fitted from this boot's finished jobs, or lent by another's, tokens per second."""
    conn.execute(
        sa.update(instance_boot)
        .where(instance_boot.c.id == boot_id)
        .values(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode)
    )


_BOOT_COLUMNS = [instance_boot.c[name] for name in Boot.__dataclass_fields__]


def _boot(row: sa.Row[Any]) -> Boot:
    values = dict(row._mapping)
    return Boot(**{**values, "state": BootState(values["state"]), "adapters": tuple(values["adapters"])})
