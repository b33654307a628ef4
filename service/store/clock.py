"""The database's clock, and the ids that are made from it."""

from __future__ import annotations

import os
from datetime import datetime, timedelta

import sqlalchemy as sa

from service.core.ids import RANDOM_BYTES, make_id


def ago(seconds: float) -> sa.ColumnElement[datetime]:
    """`seconds` before the start of this transaction."""
    return sa.func.now() - timedelta(seconds=seconds)


def later(seconds: float) -> sa.ColumnElement[datetime]:
    """`seconds` after the start of this transaction."""
    return sa.func.now() + timedelta(seconds=seconds)


def now_ms(conn: sa.Connection) -> int:
    """The start of this transaction in Unix milliseconds: the same instant that `func.now()` writes."""
    statement = sa.select(sa.cast(sa.func.floor(sa.extract("epoch", sa.func.now()) * 1000), sa.BigInteger))
    return int(conn.execute(statement).scalar_one())


def new_id(conn: sa.Connection, prefix: str) -> str:
    """A new public id; its time is the row's created_at, so ordering by id is ordering by (created_at, id)."""
    return make_id(prefix, now_ms(conn), os.urandom(RANDOM_BYTES))
