"""The lines of a batch one by one, with what is known of each: by line number, behind the number of a line."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import sqlalchemy as sa

from service.core.ids import line_id, unsent_line_id
from service.core.model import CohortState, MissCause, Outcome
from service.store.tables import cohort, instance_boot, job, job_result, line_error


class LineStatus(StrEnum):
    """Where a line stands; derived from the rows, stored nowhere."""

    QUEUED = "queued"
    RUNNING = "running"  # an instance has its cohort
    RETRYING = "retrying"  # waits for the time of its next try
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"  # invalid, under the policy skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One line. What was measured is None until the line has its result; None for unknown stays None."""

    public_id: str
    line_no: int
    custom_id: str | None
    status: LineStatus
    attempts: int = 0
    instance: str | None = None
    cohort_id: int | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    miss_cause: MissCause | None = None
    queue_ms: int | None = None
    run_ms: int | None = None


def request_lines(
    conn: sa.Connection, batch_id: str, *, is_terminal: bool, status: LineStatus | None, after: int, limit: int
) -> list[RequestLine]:
    """Up to `limit` lines behind physical line `after`; with `status` only those. Lines that intake has not reached are
    not there yet.

    `is_terminal` says what a line without a result is: a batch that failed over its output or its intake leaves some.
    """
    if limit <= 0:
        return []
    skipped = _skipped(conn, batch_id, after, limit) if status in (None, LineStatus.SKIPPED) else []
    taken_in = []
    if status is not LineStatus.SKIPPED:
        statement = _LINES.where(job.c.batch_id == batch_id, job.c.line_no > after)
        if status is not None:
            statement = statement.where(_is(status, is_terminal))
        rows = conn.execute(statement.order_by(job.c.line_no).limit(limit))
        taken_in = [_line(row, is_terminal) for row in rows]
    return list(islice(heapq.merge(taken_in, skipped, key=lambda line: line.line_no), limit))


def line_no_of_job(conn: sa.Connection, batch_id: str, job_id: int) -> int | None:
    """The physical line of a job of this batch; None where it is not one."""
    found = sa.select(job.c.line_no).where(job.c.id == job_id, job.c.batch_id == batch_id)
    return conn.scalar(found)


_HAS_RESULT = job_result.c.job_id.is_not(None)
_IS_OUT = cohort.c.state == CohortState.RUNNING
_IS_RETRYING = sa.and_(job.c.not_before.is_not(None), job.c.cohort_id.is_(None))

_LINES: sa.Select[Any] = (
    sa.select(
        job.c.id,
        job.c.line_no,
        job.c.custom_id,
        job.c.tries,
        job.c.predicted_cached_tokens,
        _IS_OUT.label("is_out"),
        _IS_RETRYING.label("is_retrying"),
        sa.func.nullif(sa.func.coalesce(job_result.c.cohort_id, job.c.cohort_id), 0).label("cohort_id"),
        sa.func.coalesce(job_result.c.attempt, cohort.c.attempt, 0).label("attempt"),
        instance_boot.c.name.label("instance"),
        job_result.c.outcome,
        job_result.c.predicted_cached_tokens.label("result_predicted_cached_tokens"),
        job_result.c.cached_tokens,
        job_result.c.prompt_tokens,
        job_result.c.completion_tokens,
        job_result.c.miss_cause,
        job_result.c.queue_ms,
        job_result.c.run_ms,
    )
    .outerjoin(job_result, job_result.c.job_id == job.c.id)
    .outerjoin(cohort, cohort.c.id == job.c.cohort_id)
    .outerjoin(
        instance_boot,
        instance_boot.c.id == sa.func.coalesce(job_result.c.instance_boot_id, cohort.c.instance_boot_id),
    )
)


def _is(status: LineStatus, is_terminal: bool) -> sa.ColumnElement[bool]:
    """The condition of `_status`, for the WHERE."""
    if status in (LineStatus.SUCCEEDED, LineStatus.FAILED, LineStatus.EXPIRED):
        # The batch is implied; it lets a rare outcome be sought among the batch's results alone.
        return sa.and_(job_result.c.outcome == status.value, job_result.c.batch_id == job.c.batch_id)
    if status is LineStatus.CANCELLED:
        is_cancelled = job_result.c.outcome == Outcome.CANCELLED
        return sa.or_(is_cancelled, ~_HAS_RESULT) if is_terminal else is_cancelled
    if is_terminal:
        return sa.false()
    is_out = sa.func.coalesce(_IS_OUT, sa.false())
    if status is LineStatus.RUNNING:
        return sa.and_(~_HAS_RESULT, is_out)
    if status is LineStatus.RETRYING:
        return sa.and_(~_HAS_RESULT, _IS_RETRYING)
    return sa.and_(~_HAS_RESULT, ~is_out, ~_IS_RETRYING)


def _status(row: sa.Row[Any], is_terminal: bool) -> LineStatus:
    if row.outcome is not None:
        return LineStatus(row.outcome)
    if is_terminal:
        return LineStatus.CANCELLED
    if row.is_out:
        return LineStatus.RUNNING
    return LineStatus.RETRYING if row.is_retrying else LineStatus.QUEUED


def _line(row: sa.Row[Any], is_terminal: bool) -> RequestLine:
    has_ended = row.outcome is not None
    return RequestLine(
        public_id=line_id(row.id),
        line_no=row.line_no,
        custom_id=row.custom_id,
        status=_status(row, is_terminal),
        attempts=row.attempt + row.tries,
        instance=row.instance,
        cohort_id=row.cohort_id,
        predicted_cached_tokens=row.result_predicted_cached_tokens if has_ended else row.predicted_cached_tokens,
        cached_tokens=row.cached_tokens,
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        miss_cause=MissCause(row.miss_cause) if row.miss_cause else None,
        queue_ms=row.queue_ms,
        run_ms=row.run_ms,
    )


def _skipped(conn: sa.Connection, batch_id: str, after: int, limit: int) -> list[RequestLine]:
    rows = conn.execute(
        sa.select(line_error.c.line_no, line_error.c.custom_id)
        .where(line_error.c.batch_id == batch_id, line_error.c.line_no > after)
        .order_by(line_error.c.line_no)
        .limit(limit)
    )
    return [
        RequestLine(
            public_id=unsent_line_id(batch_id, row.line_no),
            line_no=row.line_no,
            custom_id=row.custom_id,
            status=LineStatus.SKIPPED,
        )
        for row in rows
    ]
