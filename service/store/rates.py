"""Results of a boot as the fit of its engine's speed reads them: the newest so many, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from service.core.timeline import UNKNOWN_TOKENS, MeasuredRun
from service.store.tables import instance_boot, job_result

_DEFAULT_SEQUENCES = 64  # of an engine that does not say: as the planner takes it
_BOOTS_PER_INSTANCE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedBoot:
    """A boot that has results, alive or gone."""

    boot_id: int
    name: str
    engine: str
    model: str
    max_num_seqs: int | None
    jobs_in_flight: int


def recorded_up_to(conn: sa.Connection, boot_id: int) -> int:
    """The newest transaction that recorded a result of the boot; 0 where there is none."""
    newest = sa.select(sa.func.max(job_result.c.recorded_xid)).where(job_result.c.instance_boot_id == boot_id)
    return conn.execute(newest).scalar_one() or 0


def results_after(conn: sa.Connection, boot_id: int, recorded_xid: int, limit: int) -> int:
    """How many results of the boot are newer than that transaction, counted up to `limit`."""
    newer = (
        sa.select(job_result.c.job_id)
        .where(job_result.c.instance_boot_id == boot_id, job_result.c.recorded_xid > recorded_xid)
        .order_by(job_result.c.recorded_xid)  # in the index's order, or a scan of the table may seem the shorter way
        .limit(limit)
        .subquery()
    )
    return conn.execute(sa.select(sa.func.count()).select_from(newer)).scalar_one()


def read_run(
    conn: sa.Connection, boot_id: int, *, max_num_seqs: int | None, jobs_in_flight: int, limit: int
) -> MeasuredRun:
    """The newest `limit` results of a boot that came from its engine.

    A job's end is its start and the time that the worker measured: when the row was written says less.
    """
    newest = (
        sa.select(job_result)
        .where(job_result.c.instance_boot_id == boot_id)
        .order_by(job_result.c.recorded_xid.desc(), job_result.c.job_id.desc())
        .limit(limit)
        .subquery()
    )
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens")
    rows = conn.execute(
        sa.select(
            sa.cast(sa.extract("epoch", newest.c.started_at), sa.Double).label("started"),
            newest.c.run_ms,
            *(sa.func.coalesce(newest.c[name], UNKNOWN_TOKENS) for name in tokens),
        )
    ).all()
    table = np.array([tuple(row) for row in rows if row.started is not None and row.run_ms], dtype=np.float64)
    table = table.reshape(-1, 5)
    return MeasuredRun(
        started_seconds=table[:, 0],
        ended_seconds=table[:, 0] + table[:, 1] / 1000,
        prompt_tokens=table[:, 2].astype(np.int64),
        cached_tokens=table[:, 3].astype(np.int64),
        completion_tokens=table[:, 4].astype(np.int64),
        max_num_seqs=max_num_seqs or _DEFAULT_SEQUENCES,
        is_cut=len(rows) >= limit,
        is_open=jobs_in_flight > 0,
    )


def boots_with_results(conn: sa.Connection) -> list[list[RatedBoot]]:
    """For each instance by name: its newest boots that have results and ran one engine with the same arguments, the
    newest first. An instance that was set up anew counts as what it is now."""
    has_results = sa.exists().where(job_result.c.instance_boot_id == instance_boot.c.id)
    rows = conn.execute(
        sa.select(instance_boot).where(has_results).order_by(instance_boot.c.name, instance_boot.c.id.desc())
    )
    found: dict[str, list[sa.Row[Any]]] = {}
    for row in rows:
        alike = found.setdefault(row.name, [])
        if not alike or (len(alike) < _BOOTS_PER_INSTANCE and _kind(alike[0]) == _kind(row)):
            alike.append(row)
    return [[_rated(row) for row in alike] for alike in found.values()]


def _kind(row: sa.Row[Any]) -> tuple[Any, ...]:
    return (row.engine, row.engine_version, row.model, row.engine_arguments, row.devices, row.max_num_seqs)


def _rated(row: sa.Row[Any]) -> RatedBoot:
    return RatedBoot(
        boot_id=row.id,
        name=row.name,
        engine=row.engine,
        model=row.model,
        max_num_seqs=row.max_num_seqs,
        jobs_in_flight=row.running_jobs + row.waiting_jobs,
    )


def read_runs(conn: sa.Connection, boots: Sequence[RatedBoot], limit: int) -> list[MeasuredRun]:
    """Up to `limit` results in sum of boots that are given the newest first."""
    runs: list[MeasuredRun] = []
    for boot in boots:
        left = limit - sum(len(run) for run in runs)
        if left <= 0:
            break
        runs.append(
            read_run(conn, boot.boot_id, max_num_seqs=boot.max_num_seqs, jobs_in_flight=boot.jobs_in_flight, limit=left)
        )
    return runs
