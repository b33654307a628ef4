"""Changes of a batch that has not ended: its class, its pause, its deadline; and who decides over the deadline."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from service.core.model import Priority
from service.store import pauses
from service.store.batches import OPEN_STATUSES
from service.store.tables import batch

# A worker may have read the old deadline a moment ago, and end lines by it.
_MARGIN = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a producer wants otherwise; None: as it is."""

    priority: Priority | None = None
    paused: bool | None = None
    completion_window: str | None = None
    window_seconds: int | None = None  # of `completion_window`


class ChangeOutcome(StrEnum):
    """What became of a Change."""

    DONE = "done"
    ENDED = "ended"  # the batch is terminal
    EXPIRING = "expiring"  # its deadline has passed, and cannot be moved any more
    PAST = "past"  # the new deadline would lie in the past


def change_batch(conn: sa.Connection, batch_id: str, change: Change) -> ChangeOutcome:
    """One conditional UPDATE; nothing is written unless DONE.

    A deadline counts from the batch's creation. The row is locked first, so that the clock is read after whoever else
    decides over the deadline (`lock_due`). A pause is in force when this transaction has committed: what is out for
    an instance by then finishes, nothing more goes out.
    """
    conn.execute(sa.select(batch.c.id).where(batch.c.id == batch_id).with_for_update(key_share=True))
    now = sa.func.clock_timestamp()
    expires_at = batch.c.created_at + timedelta(seconds=change.window_seconds or 0)
    values: dict[str, Any] = {"priority": batch.c.priority}
    guards = [batch.c.id == batch_id, batch.c.status.in_(OPEN_STATUSES)]
    if change.priority is not None:
        values["priority"] = int(change.priority)
    if change.paused is not None:
        values["paused"] = change.paused
    if change.window_seconds is not None:
        values |= {"completion_window": change.completion_window, "expires_at": expires_at}
        guards += [batch.c.expires_at > now + _MARGIN, expires_at > now + _MARGIN]
    if conn.execute(sa.update(batch).where(*guards).values(values)).rowcount != 1:
        return _why(conn, batch_id, expires_at)
    conn.execute(sa.select(sa.func.pg_notify("dispatch", "")))
    if change.paused:
        pauses.await_dispatches(conn)
    return ChangeOutcome.DONE


def _why(conn: sa.Connection, batch_id: str, expires_at: sa.ColumnElement[Any]) -> ChangeOutcome:
    soon = sa.func.clock_timestamp() + _MARGIN
    is_open, is_expiring = batch.c.status.in_(OPEN_STATUSES), batch.c.expires_at <= soon
    row = conn.execute(sa.select(is_open, is_expiring).where(batch.c.id == batch_id)).one_or_none()
    if row is None or not row[0]:
        return ChangeOutcome.ENDED
    return ChangeOutcome.EXPIRING if row[1] else ChangeOutcome.PAST


def lock_due(conn: sa.Connection, batch_id: str) -> bool:
    """Hold the batch until this transaction ends; whether its deadline has passed, which no change undoes any more."""
    conn.execute(sa.select(batch.c.id).where(batch.c.id == batch_id).with_for_update())
    return bool(conn.scalar(sa.select(batch.c.expires_at <= sa.func.clock_timestamp()).where(batch.c.id == batch_id)))
