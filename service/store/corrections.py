"""Results that fell short of the plan, for the ledger: what it believed to be cached was not there.

They have an index of their own, which is next to empty as long as predictions hold: a look that finds nothing reads
one page of it. Behind a mark of (recorded_xid, job_id) for each boot. A transaction that commits behind the mark is
passed over: a correction that is missed leaves one prediction too high until the next job of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from service.store.tables import job, job_result


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mark:
    """A place in the order of recording."""

    recorded_xid: int = 0
    job_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the engine served of a job, which was less than predicted: the arguments of Ledger.correct."""

    boot_id: int
    key: bytes
    measured_cached_tokens: int
    prompt_tokens: int
    mark: Mark


def newest_mark(conn: sa.Connection) -> Mark:
    """Behind everything that is recorded: for a ledger that starts empty, and has nothing to be corrected."""
    current = sa.cast(sa.cast(sa.func.pg_snapshot_xmax(sa.func.pg_current_snapshot()), sa.Text), sa.BigInteger)
    return Mark(recorded_xid=conn.execute(sa.select(current - 1)).scalar_one(), job_id=2**63 - 1)


def corrections_after(conn: sa.Connection, marks: Mapping[int, Mark], limit: int) -> list[Correction]:
    """Results behind the mark of each boot that is named, in the order of recording; at most `limit` of a boot."""
    if not marks:
        return []
    wanted = _marks_table(marks)
    short = (
        sa.select(job_result.c.job_id, job_result.c.recorded_xid, job_result.c.cached_tokens)
        .where(
            job_result.c.instance_boot_id == wanted.c.boot_id,
            job_result.c.cached_tokens < job_result.c.predicted_cached_tokens,
            sa.tuple_(job_result.c.recorded_xid, job_result.c.job_id) > sa.tuple_(wanted.c.xid, wanted.c.job_id),
        )
        .order_by(job_result.c.recorded_xid, job_result.c.job_id)
        .limit(limit)
        .lateral("short")
    )
    rows = conn.execute(
        sa.select(wanted.c.boot_id, short, job.c.prefix_key, job.c.prompt_tokens)
        .select_from(wanted.join(short, sa.true()).join(job, job.c.id == short.c.job_id))
        .order_by(wanted.c.boot_id, short.c.recorded_xid, short.c.job_id)
    )
    return [
        Correction(
            boot_id=row.boot_id,
            key=row.prefix_key,
            measured_cached_tokens=row.cached_tokens,
            prompt_tokens=row.prompt_tokens,
            mark=Mark(recorded_xid=row.recorded_xid, job_id=row.job_id),
        )
        for row in rows
    ]


def _marks_table(marks: Mapping[int, Mark]) -> sa.TableValuedAlias:
    columns: Sequence[list[int]] = (
        list(marks),
        [mark.recorded_xid for mark in marks.values()],
        [mark.job_id for mark in marks.values()],
    )
    arrays = [sa.cast(sa.literal(values, ARRAY(sa.BigInteger)), ARRAY(sa.BigInteger)) for values in columns]
    return (
        sa.func.unnest(*arrays)
        .table_valued(*(sa.column(name, sa.BigInteger) for name in ("boot_id", "xid", "job_id")), name="wanted")
        .render_derived()
    )
