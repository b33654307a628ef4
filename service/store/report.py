"""What became of one batch, for `GET /v1/batches/{id}/report`: a handful of passes over its results, no row kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func

from service.core.errorcount import ErrorSample
from service.core.model import Outcome
from service.store import batches, stats
from service.store.batches import Batch, Progress
from service.store.stats import MissStats
from service.store.tables import instance_boot, job, job_result, line_error

_SLOWEST = 10
_MOST_SAMPLES = 500  # different messages that are looked at, the commonest first
_COMPARED_BYTES = 2_000  # of an engine's answer: what differs behind these counts as the same
_MOST_ANSWER_BYTES = 1 << 20  # a longer one is no error message; it is counted without being read


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRun:
    """What one instance did for the batch. Tokens are of lines whose cached tokens are known."""

    name: str
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    run_seconds: float  # summed over its lines, which run side by side
    started_at: datetime | None  # of the first line
    finished_at: datetime | None  # of the last

    @property
    def hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLine:
    """One of the lines that took longest at their engine."""

    line_no: int
    custom_id: str
    run_ms: int
    instance: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """One batch, at one moment."""

    batch: Batch
    progress: Progress
    instances: list[InstanceRun]  # by name
    misses: list[MissStats]
    planned_prompt_tokens: int  # of its jobs, as tokenised at intake
    errors: list[ErrorSample]
    slowest: list[SlowLine]


def read_report(conn: sa.Connection, tenant_id: int, batch_id: str) -> BatchReport | None:
    """None for an id that is not there, and for another tenant's. Call first in a transaction: all parts of the report
    are of one snapshot, while lines go on ending."""
    conn.execute(sa.text("set transaction isolation level repeatable read, read only"))
    batch = batches.get_batch(conn, tenant_id, batch_id)
    if batch is None:
        return None
    return BatchReport(
        batch=batch,
        progress=batches.progress(conn, batch_id),
        instances=_instances(conn, batch_id),
        misses=stats.miss_stats(conn, batch_id),
        planned_prompt_tokens=stats.planned_tokens(conn, batch_id),
        errors=[*_answered_errors(conn, batch_id), *_unanswered_errors(conn, batch_id), *_refused(conn, batch_id)],
        slowest=_slowest(conn, batch_id),
    )


def _instances(conn: sa.Connection, batch_id: str) -> list[InstanceRun]:
    is_known = job_result.c.cached_tokens.is_not(None)
    by_boot = (
        sa.select(
            job_result.c.instance_boot_id,
            func.count().label("jobs"),
            func.sum(job_result.c.prompt_tokens).filter(is_known).label("prompt_tokens"),
            func.sum(job_result.c.cached_tokens).label("cached_tokens"),
            func.sum(job_result.c.run_ms).label("run_ms"),
            func.min(job_result.c.started_at).label("started_at"),
            func.max(job_result.c.finished_at).label("finished_at"),
        )
        .where(job_result.c.batch_id == batch_id, job_result.c.instance_boot_id.is_not(None))
        .group_by(job_result.c.instance_boot_id)
        .subquery("by_boot")
    )
    sums = [func.coalesce(func.sum(by_boot.c[name]), 0).label(name) for name in _SUMMED]
    rows = conn.execute(
        sa.select(
            instance_boot.c.name,
            *sums,
            func.min(by_boot.c.started_at).label("started_at"),
            func.max(by_boot.c.finished_at).label("finished_at"),
        )
        .join(by_boot, by_boot.c.instance_boot_id == instance_boot.c.id)
        .group_by(instance_boot.c.name)
        .order_by(instance_boot.c.name)
    )
    return [_instance(row) for row in rows]


_SUMMED = ("jobs", "prompt_tokens", "cached_tokens", "run_ms")


def _instance(row: Any) -> InstanceRun:
    return InstanceRun(
        name=row.name,
        jobs=int(row.jobs),
        prompt_tokens=int(row.prompt_tokens),
        cached_tokens=int(row.cached_tokens),
        run_seconds=int(row.run_ms) / 1000,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def _slowest(conn: sa.Connection, batch_id: str) -> list[SlowLine]:
    top = (
        sa.select(job_result.c.job_id, job_result.c.run_ms, job_result.c.instance_boot_id)
        .where(job_result.c.batch_id == batch_id, job_result.c.run_ms.is_not(None))
        .order_by(job_result.c.run_ms.desc(), job_result.c.job_id)
        .limit(_SLOWEST)
        .subquery("top")
    )
    rows = conn.execute(
        sa.select(job.c.line_no, job.c.custom_id, top.c.run_ms, instance_boot.c.name.label("instance"))
        .select_from(top)
        .join(job, job.c.id == top.c.job_id)
        .outerjoin(instance_boot, instance_boot.c.id == top.c.instance_boot_id)
        .order_by(top.c.run_ms.desc(), top.c.job_id)
    )
    return [SlowLine(**row._mapping) for row in rows]


def _masked(text: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """A text with every number in it as #: messages that differ in their numbers only are one message.

    Escapes (a doubled backslash, or three octal digits for a byte that is no ASCII) stay as they are.
    """
    return func.regexp_replace(text, r"(\\\\|\\[0-7]{3})|[0-9]+", r"\1#", "g")


def _failed(batch_id: str) -> list[sa.ColumnElement[bool]]:
    return [job_result.c.batch_id == batch_id, job_result.c.outcome == Outcome.FAILED]


def _answered_errors(conn: sa.Connection, batch_id: str) -> list[ErrorSample]:
    """Answers of engines, counted by status and by what they say; of each kind one is read."""
    start = func.encode(func.substring(job_result.c.response, 1, _COMPARED_BYTES), "escape")
    kinds = (
        sa.select(
            job_result.c.status_code,
            func.count().label("n"),
            func.min(job_result.c.job_id).label("job_id"),
        )
        .where(*_failed(batch_id), job_result.c.status_code.is_not(None))
        .group_by(job_result.c.status_code, func.md5(_masked(start)))
        .order_by(sa.desc("n"), sa.asc("job_id"))
        .limit(_MOST_SAMPLES)
        .subquery("kinds")
    )
    is_short = func.octet_length(job_result.c.response) <= _MOST_ANSWER_BYTES
    rows = conn.execute(
        sa.select(kinds.c.status_code, kinds.c.n, sa.case((is_short, job_result.c.response)).label("response"))
        .join(job_result, job_result.c.job_id == kinds.c.job_id)
        .order_by(kinds.c.n.desc(), kinds.c.job_id)
    )
    return [ErrorSample(count=row.n, status_code=row.status_code, response=row.response) for row in rows]


def _unanswered_errors(conn: sa.Connection, batch_id: str) -> list[ErrorSample]:
    rows = conn.execute(
        sa.select(
            job_result.c.error_code,
            func.count().label("n"),
            func.min(job_result.c.error_message).label("message"),
        )
        .where(*_failed(batch_id), job_result.c.status_code.is_(None))
        .group_by(job_result.c.error_code, _masked(job_result.c.error_message))
        .order_by(sa.desc("n"), sa.asc("message"))
        .limit(_MOST_SAMPLES)
    )
    return [ErrorSample(count=row.n, code=row.error_code, message=row.message) for row in rows]


def _refused(conn: sa.Connection, batch_id: str) -> Sequence[ErrorSample]:
    """Lines that never became jobs, by their validation error."""
    rows = conn.execute(
        sa.select(line_error.c.code, func.count().label("n"), func.min(line_error.c.message).label("message"))
        .where(line_error.c.batch_id == batch_id)
        .group_by(line_error.c.code, _masked(line_error.c.message))
        .order_by(sa.desc("n"), sa.asc("message"))
        .limit(_MOST_SAMPLES)
    )
    return [ErrorSample(count=row.n, skipped_for=row.code, message=row.message) for row in rows]
