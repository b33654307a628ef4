"""Lines of a batch's input: taken in as job rows, chunk by chunk, or kept as line errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from service.core.batchfile import LineError
from service.core.model import BatchStatus
from service.store.batches import Batch
from service.store.tables import batch, job, line_error

_KEYS_PER_PAGE = 10_000

# Column and binary type of each value that COPY sends, in this order.
_COPIED = {
    "tenant_id": "int8",
    "batch_id": "text",
    "line_no": "int4",
    "custom_id": "text",
    "endpoint": "text",
    "model": "text",
    "body": "bytea",
    "prefix_key": "bytea",
    "prompt_tokens": "int4",
    "predicted_output_tokens": "int4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    """A valid line on its way into `job`. `model` is the served model, never an alias."""

    line_no: int
    custom_id: str
    model: str
    body: bytes
    prefix_key: bytes
    prompt_tokens: int
    predicted_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakePlace:
    """The byte and the physical line that the last committed chunk ended with."""

    offset: int
    line_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A job of a batch as its prefix groups are counted."""

    prefix_key: bytes
    prompt_tokens: int
    model: str


def lock_intake(conn: sa.Connection, batch_id: str) -> IntakePlace | None:
    """Hold the batch for one chunk of lines. None when it is not, or no longer, to be taken in.

    The deadline is read from the running clock, not from the transaction's start: EXPIRE locks the same row after
    the deadline, so no chunk can follow it.
    """
    row = conn.execute(
        sa.select(batch.c.intake_offset, batch.c.intake_line)
        .where(
            batch.c.id == batch_id,
            batch.c.status == BatchStatus.IN_PROGRESS,
            ~batch.c.intake_done,
            batch.c.expires_at > sa.func.clock_timestamp(),
        )
        .with_for_update()
    ).one_or_none()
    return None if row is None else IntakePlace(offset=row.intake_offset, line_no=row.intake_line)


def take_in(conn: sa.Connection, owner: Batch, lines: Sequence[NewLine], upto: IntakePlace) -> None:
    """COPY one chunk of jobs and move the batch's intake place, in the caller's transaction (see `lock_intake`)."""
    driver = conn.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(list(_COPIED.values()))
        for line in lines:
            copy.write_row(_values(owner, line))
    conn.execute(
        sa.update(batch).where(batch.c.id == owner.id).values(intake_offset=upto.offset, intake_line=upto.line_no)
    )
    notify_dispatcher(conn)


def notify_dispatcher(conn: sa.Connection) -> None:
    """There is work for it."""
    conn.execute(sa.select(sa.func.pg_notify("dispatch", "")))


def clear_line_errors(conn: sa.Connection, batch_id: str) -> None:
    """Forget an earlier, interrupted validation."""
    conn.execute(sa.delete(line_error).where(line_error.c.batch_id == batch_id))


def add_line_errors(conn: sa.Connection, batch_id: str, errors: Sequence[LineError]) -> None:
    """Keep lines that never become jobs (policy skip)."""
    rows = [
        {
            "batch_id": batch_id,
            "line_no": error.line_no,
            "custom_id": error.custom_id,
            "code": error.code.value,
            "message": error.message,
            "param": error.param,
        }
        for error in errors
    ]
    if rows:
        conn.execute(insert(line_error).on_conflict_do_nothing(), rows)


def count_line_errors(conn: sa.Connection, batch_id: str) -> int:
    return conn.scalar(sa.select(sa.func.count()).where(line_error.c.batch_id == batch_id)) or 0


def refused_lines(conn: sa.Connection, batch_id: str, *, after: int, upto: int) -> set[int]:
    """Numbers of the lines in (after, upto] that were refused."""
    return set(
        conn.scalars(
            sa.select(line_error.c.line_no).where(
                line_error.c.batch_id == batch_id, line_error.c.line_no > after, line_error.c.line_no <= upto
            )
        )
    )


def prompt_tokens_of(conn: sa.Connection, batch_id: str) -> int:
    """Of all the jobs of a batch."""
    return int(conn.scalar(sa.select(sa.func.sum(job.c.prompt_tokens)).where(job.c.batch_id == batch_id)) or 0)


def keys_in_order(conn: sa.Connection, batch_id: str) -> Iterator[list[KeyRow]]:
    """Keys of a batch in key order (the longest prompt last among equal keys), in pages from a server-side cursor."""
    query = sa.select(job.c.prefix_key, job.c.prompt_tokens, job.c.model).where(job.c.batch_id == batch_id)
    query = query.order_by(job.c.prefix_key, job.c.prompt_tokens, job.c.id)
    found = conn.execute(query, execution_options={"yield_per": _KEYS_PER_PAGE})
    for rows in found.partitions():
        yield [KeyRow(prefix_key=row.prefix_key, prompt_tokens=row.prompt_tokens, model=row.model) for row in rows]


_COPY = f"COPY job ({', '.join(_COPIED)}) FROM STDIN (FORMAT BINARY)"


def _values(owner: Batch, line: NewLine) -> tuple[object, ...]:
    return (
        owner.tenant_id,
        owner.id,
        line.line_no,
        line.custom_id,
        owner.endpoint,
        line.model,
        line.body,
        line.prefix_key,
        line.prompt_tokens,
        line.predicted_output_tokens,
    )
