"""What a batch's files are made of: ended jobs and refused lines, in line order, a page at a time."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from service.core.model import Outcome
from service.store.tables import batch, job, job_result, line_error

_PAGE_BYTES = 8 * 2**20  # of answers in memory at once: one may be as large as some thousands of others


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLine:
    """A job of a batch with its result."""

    line_no: int
    job_id: int
    custom_id: str
    outcome: Outcome
    status_code: int | None
    error_code: str | None
    error_message: str | None
    response: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """A line that never became a job (policy skip)."""

    line_no: int
    custom_id: str | None
    code: str
    message: str


def ended_lines(conn: sa.Connection, batch_id: str, after: int, limit: int) -> list[EndedLine]:
    """Lines with a result, from behind physical line `after`: up to `limit`, and up to 8 MiB of answers, but at least
    one while there is one."""
    page = (
        sa.select(
            job.c.line_no,
            job.c.id.label("job_id"),
            job.c.custom_id,
            job_result.c.outcome,
            job_result.c.status_code,
            job_result.c.error_code,
            job_result.c.error_message,
            sa.func.coalesce(sa.func.octet_length(job_result.c.response), 0).label("size"),
        )
        .join(job_result, job_result.c.job_id == job.c.id)
        .where(job.c.batch_id == batch_id, job.c.line_no > after)
        .order_by(job.c.line_no)
        .limit(limit)
        .subquery()
    )
    before = (sa.func.sum(page.c.size).over(order_by=page.c.line_no) - page.c.size).label("bytes_before")
    sized = sa.select(page, before).subquery()
    shown = [column for column in sized.c if column.name not in ("size", "bytes_before")]
    rows = conn.execute(
        sa.select(*shown, job_result.c.response)
        .join(job_result, job_result.c.job_id == sized.c.job_id)
        .where(sized.c.bytes_before < _PAGE_BYTES)
        .order_by(sized.c.line_no)
    )
    return [EndedLine(**{**row._mapping, "outcome": Outcome(row.outcome)}) for row in rows]


def refused_lines(conn: sa.Connection, batch_id: str, after: int, limit: int) -> list[RefusedLine]:
    """Refused lines, from behind physical line `after`."""
    rows = conn.execute(
        sa.select(line_error.c.line_no, line_error.c.custom_id, line_error.c.code, line_error.c.message)
        .where(line_error.c.batch_id == batch_id, line_error.c.line_no > after)
        .order_by(line_error.c.line_no)
        .limit(limit)
    )
    return [RefusedLine(**row._mapping) for row in rows]


def unfinished_jobs(conn: sa.Connection, batch_id: str) -> int:
    """How many jobs of the batch have no result."""
    unanswered = ~sa.exists().where(job_result.c.job_id == job.c.id)
    return conn.scalar(sa.select(sa.func.count()).where(job.c.batch_id == batch_id, unanswered)) or 0


def grace_is_over(conn: sa.Connection, batch_id: str, grace_seconds: float) -> bool:
    """Whether a cancel has waited for lines in flight as long as it may."""
    ends = batch.c.cancelling_at + sa.func.make_interval(0, 0, 0, 0, 0, 0, grace_seconds)
    return bool(conn.scalar(sa.select(ends <= sa.func.now()).where(batch.c.id == batch_id)))
