"""LISTEN and NOTIFY: notifications of one channel, on a connection of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import sqlalchemy as sa
from psycopg import sql

from service.store.session import Database


@contextmanager
def listening(database: Database, channel: str) -> Iterator[psycopg.Connection]:
    """A connection that hears `channel`. Raises psycopg.OperationalError, also later, when Postgres goes away."""
    with database.connect_raw(f"listen {channel}") as conn:
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        yield conn


def notify(conn: sa.Connection, channel: str, payload: str = "") -> None:
    """Tell whoever listens, when this transaction commits."""
    conn.execute(sa.select(sa.func.pg_notify(channel, payload)))


def payloads(conn: psycopg.Connection, seconds: float) -> list[str]:
    """What was notified within `seconds`; returns with the first."""
    return [notice.payload for notice in conn.notifies(timeout=seconds, stop_after=1)]
