"""Where running batches stand: `queue.position` and `queue.eta_seconds`, by a look at a few rows of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func

from service.core.eta import OpenWork, Pace, measured_eta, rated_eta
from service.core.model import BatchStatus, BootState
from service.core.planrecords import Rates
from service.store.batches import Batch, Progress
from service.store.clock import ago
from service.store.tables import batch, instance_boot, job, job_result

_PACE_LINES = 256
_PACE_SECONDS = 300.0
_SAMPLED_JOBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """None: not in progress, paused, or not known."""

    position: int | None = None
    eta_seconds: float | None = None


def outlook_of(conn: sa.Connection, found: Sequence[Batch], sums: Mapping[str, Progress]) -> dict[str, Outlook]:
    """Of batches of one tenant, those that run; the others are absent.

    The position is among the tenant's own, by class and then by arrival: it says nothing of others. The time is that
    of the measured pace, which has in it whoever else is served; before there is any, only the first in line gets
    one, as if it were alone.
    """
    running = [item for item in found if item.status is BatchStatus.IN_PROGRESS and not item.paused]
    if not running:
        return {}
    places = _positions(conn, running)
    paces = _paces(conn, [item.id for item in running])
    outlooks = {}
    for item in running:
        place, pace = places.get(item.id), paces.get(item.id)
        open_lines = max(item.total - sums.get(item.id, Progress()).ended, 0)
        eta_seconds = None if pace is None else measured_eta(open_lines, pace)
        if eta_seconds is None and place == 1:
            eta_seconds = _rated(conn, item, open_lines)
        outlooks[item.id] = Outlook(position=place, eta_seconds=eta_seconds)
    return outlooks


def _positions(conn: sa.Connection, running: Sequence[Batch]) -> dict[str, int]:
    """From 1. Ids sort by arrival."""
    order = func.row_number().over(order_by=(batch.c.priority.desc(), batch.c.id))
    ranked = (
        sa.select(batch.c.id, order.label("place"))
        .where(
            batch.c.tenant_id == running[0].tenant_id,
            batch.c.status == BatchStatus.IN_PROGRESS,
            batch.c.paused.is_(False),
        )
        .subquery("ranked")
    )
    rows = conn.execute(sa.select(ranked).where(ranked.c.id.in_([item.id for item in running])))
    return {row.id: row.place for row in rows}


def _paces(conn: sa.Connection, batch_ids: Sequence[str]) -> dict[str, Pace]:
    """From the newest results of each, by the index of recording. No other condition: where the table was not analysed
    yet, one more makes sorting all the results of a batch look cheaper than the index."""
    newest = (
        sa.select(job_result.c.started_at, job_result.c.finished_at)
        .where(job_result.c.batch_id == batch.c.id)
        .order_by(job_result.c.recorded_xid.desc(), job_result.c.job_id.desc())
        .limit(_PACE_LINES)
        .lateral("newest")
    )
    rows = conn.execute(
        sa.select(
            batch.c.id,
            func.count().label("n"),
            _seconds_since(func.min(newest.c.finished_at)).label("ended"),
            _seconds_since(func.min(newest.c.started_at)).label("began"),
        )
        .join(newest, sa.true())
        .where(batch.c.id.in_(batch_ids), newest.c.finished_at > ago(_PACE_SECONDS))
        .group_by(batch.c.id)
    )
    return {row.id: _pace(row) for row in rows}


def _seconds_since(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.cast(sa.extract("epoch", func.clock_timestamp() - moment), sa.Double)


def _pace(row: Any) -> Pace:
    began = row.ended if row.began is None else row.began
    return Pace(
        lines=row.n,
        is_cut=row.n >= _PACE_LINES,
        first_ended_seconds_ago=row.ended,
        first_began_seconds_ago=min(began, _PACE_SECONDS),
    )


def _rated(conn: sa.Connection, item: Batch, open_lines: int) -> float | None:
    """By the rates of the ready instances; None where a model has none, or none that is rated."""
    sample = (
        sa.select(job.c.model, job.c.prompt_tokens, job.c.predicted_output_tokens)
        .where(job.c.batch_id == item.id)
        .order_by(job.c.line_no)
        .limit(_SAMPLED_JOBS)
        .subquery("sample")
    )
    means = conn.execute(
        sa.select(
            func.array_agg(sa.distinct(sample.c.model)).label("models"),
            sa.cast(func.avg(sample.c.prompt_tokens), sa.Double).label("prompt_tokens"),
            sa.cast(func.avg(sample.c.predicted_output_tokens), sa.Double).label("output_tokens"),
        )
    ).one()
    rates = None if means.models is None else _fleet_rates(conn, means.models)
    if rates is None:
        return None
    all_tokens = means.prompt_tokens * max(item.total, 1)
    shared = min((item.bound_tokens or 0) / all_tokens, 1.0) if all_tokens else 0.0
    work = OpenWork(
        lines=open_lines,
        prompt_tokens=means.prompt_tokens,
        output_tokens=means.output_tokens,
        shared_share=shared,
    )
    return rated_eta(work, rates)


def _fleet_rates(conn: sa.Connection, models: Sequence[str]) -> Rates | None:
    prefill, decode = instance_boot.c.prefill_tokens_per_second, instance_boot.c.decode_tokens_per_second
    row = conn.execute(
        sa.select(
            func.count(sa.distinct(instance_boot.c.model)).label("models"),
            func.sum(prefill).label("prefill"),
            func.sum(decode).label("decode"),
        ).where(instance_boot.c.model.in_(models), instance_boot.c.state == BootState.READY, prefill > 0, decode > 0)
    ).one()
    if row.models < len(models):
        return None
    return Rates(prefill_tokens_per_second=row.prefill, decode_tokens_per_second=row.decode)
