"""Lines of an ended batch that were not answered well, as a new input file needs them."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from service.core.model import Outcome
from service.store.tables import job, job_result

_PAGE_LINES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLine:
    """A job without a good answer; `body` as it was stored."""

    line_no: int
    custom_id: str
    body: bytes


def lines_to_retry(conn: sa.Connection, batch_id: str, after: int, max_bytes: int) -> list[RetryLine]:
    """Failed, cancelled and expired lines, and those that never got a result, from behind physical line `after`:
    a page of up to `max_bytes` of bodies, but at least one line while there is one."""
    answered_well = sa.exists().where(job_result.c.job_id == job.c.id, job_result.c.outcome == Outcome.SUCCEEDED)
    page = (
        sa.select(job.c.id, job.c.line_no, job.c.custom_id, sa.func.octet_length(job.c.body).label("size"))
        .where(job.c.batch_id == batch_id, job.c.line_no > after, ~answered_well)
        .order_by(job.c.line_no)
        .limit(_PAGE_LINES)
        .subquery()
    )
    before = (sa.func.sum(page.c.size).over(order_by=page.c.line_no) - page.c.size).label("bytes_before")
    sized = sa.select(page, before).subquery()
    rows = conn.execute(
        sa.select(sized.c.line_no, sized.c.custom_id, job.c.body)
        .join(job, job.c.id == sized.c.id)
        .where(sized.c.bytes_before < max_bytes)
        .order_by(sized.c.line_no)
    )
    return [RetryLine(**row._mapping) for row in rows]
