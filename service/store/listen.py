"""LISTEN and NOTIFY: notifications of one channel, on a connection of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import sqlalchemy as sa
from psycopg import sql

from service.store.frozen import Frozen
from service.store.session import Database


@contextmanager
def listening(database: Database, channel: str) -> Iterator[psycopg.Connection]:
    """A connection that hears `channel`. Raises psycopg.OperationalError, also later, when Postgres goes away."""
    with database.connect_raw(f"listen {channel}") as conn:
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        yield conn


_NOTIFY = Frozen(
    sa.select(sa.func.pg_notify(sa.bindparam("channel", type_=sa.Text), sa.bindparam("payload", type_=sa.Text)))
)


def notify(conn: sa.Connection, channel: str, payload: str = "") -> None:
    """Tell whoever listens, when this transaction commits."""
    _NOTIFY.run(conn, channel=channel, payload=payload)


def notified(channel: str) -> sa.ColumnElement[str]:
    """The same as a column that a statement returns."""
    return sa.func.pg_notify(channel, "").label("notified")


def payloads(conn: psycopg.Connection, seconds: float) -> list[str]:
    """What was notified within `seconds`; returns with the first."""
    return [notice.payload for notice in conn.notifies(timeout=seconds, stop_after=1)]
