"""Ended lines of a batch in the order they were recorded, behind a cursor that loses none.

Transactions commit out of order, so "greater than the last one I saw" over a sequence or a time skips the row of a
slow transaction. Every row carries the id of the transaction that wrote it (`recorded_xid`, which only grows); a page
of a batch that still runs ends below the oldest transaction that is still open, so whatever is above the cursor later
was above it then. A terminal batch gets no more rows and needs no such limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from service.core.model import Outcome
from service.store.outputs import EndedLine, RefusedLine
from service.store.tables import job, job_result, line_error

_SKIPPED, _ANSWERED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """A place in the order of recording. Two kinds of rows, each with its own numbers, share one order."""

    xid: int = 0
    kind: int = 0  # 0: a skipped line, number = its line; 1: a result, number = its job
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One ended line and its place. A refused line never became a job."""

    position: Position
    line: EndedLine | RefusedLine


def recorded_lines(
    conn: sa.Connection, batch_id: str, *, after: Position, limit: int, max_bytes: int, is_terminal: bool
) -> list[Recorded]:
    """The lines after `after`: up to `limit`, and up to `max_bytes` of answers, but at least one.

    `is_terminal` must have been read before this call, not after.
    """
    if limit <= 0:
        return []
    found = _sized(batch_id, after, limit, is_terminal).subquery("found")
    statement = (
        sa.select(found, job_result.c.response)
        .outerjoin(job_result, sa.and_(found.c.kind == _ANSWERED, job_result.c.job_id == found.c.number))
        .where(found.c.bytes_before < max_bytes)
        .order_by(found.c.xid, found.c.kind, found.c.number)
    )
    return [_recorded(row) for row in conn.execute(statement)]


def _sized(batch_id: str, after: Position, limit: int, is_terminal: bool) -> sa.Select[Any]:
    """Everything of a page but the answers themselves, with the bytes of the answers before each line."""
    page = sa.union_all(
        _page(line_error, line_error.c.line_no, _SKIPPED, batch_id, after, limit, is_terminal),
        _page(job_result, job_result.c.job_id, _ANSWERED, batch_id, after, limit, is_terminal),
    ).subquery("page")
    order = (page.c.xid, page.c.kind, page.c.number)
    size = sa.func.coalesce(sa.func.octet_length(job_result.c.response), 0)
    return (
        sa.select(
            *order,
            (sa.func.sum(size).over(order_by=order) - size).label("bytes_before"),
            sa.func.coalesce(job.c.line_no, line_error.c.line_no).label("line_no"),
            sa.func.coalesce(job.c.custom_id, line_error.c.custom_id).label("custom_id"),
            job_result.c.outcome,
            job_result.c.status_code,
            job_result.c.error_code,
            job_result.c.error_message,
            line_error.c.code,
            line_error.c.message,
        )
        .outerjoin(job_result, sa.and_(page.c.kind == _ANSWERED, job_result.c.job_id == page.c.number))
        .outerjoin(job, job.c.id == job_result.c.job_id)
        .outerjoin(
            line_error,
            sa.and_(page.c.kind == _SKIPPED, line_error.c.batch_id == batch_id, line_error.c.line_no == page.c.number),
        )
        .order_by(*order)
        .limit(limit)
    )


def _page(
    table: sa.Table,
    number: sa.ColumnElement[int],
    kind: int,
    batch_id: str,
    after: Position,
    limit: int,
    is_terminal: bool,
) -> sa.Select[Any]:
    xid, this_kind = table.c.recorded_xid, sa.literal(kind)
    start = (sa.literal(part, sa.BigInteger) for part in (after.xid, after.kind, after.number))
    # The second condition is implied by the third; alone it can be answered from the index.
    conditions = [table.c.batch_id == batch_id, xid >= after.xid, sa.tuple_(xid, this_kind, number) > sa.tuple_(*start)]
    if not is_terminal:
        conditions.append(xid < _OLDEST_OPEN_XID)
    return (
        sa.select(xid.label("xid"), this_kind.label("kind"), sa.cast(number, sa.BigInteger).label("number"))
        .where(*conditions)
        .order_by(xid, number)
        .limit(limit)
    )


# Of the snapshot that the same statement reads by.
_OLDEST_OPEN_XID = sa.cast(sa.cast(sa.func.pg_snapshot_xmin(sa.func.pg_current_snapshot()), sa.Text), sa.BigInteger)


def _recorded(row: sa.Row[Any]) -> Recorded:
    position = Position(xid=row.xid, kind=row.kind, number=row.number)
    if row.kind == _SKIPPED:
        refused = RefusedLine(line_no=row.line_no, custom_id=row.custom_id, code=row.code, message=row.message)
        return Recorded(position=position, line=refused)
    ended = EndedLine(
        line_no=row.line_no,
        job_id=row.number,
        custom_id=row.custom_id,
        outcome=Outcome(row.outcome),
        status_code=row.status_code,
        error_code=row.error_code,
        error_message=row.error_message,
        response=row.response,
    )
    return Recorded(position=position, line=ended)
