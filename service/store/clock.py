"""The database's clock, and the ids that are made from it."""

from __future__ import annotations

import os
from datetime import datetime, timedelta

import sqlalchemy as sa

from service.core.ids import RANDOM_BYTES, make_id
from service.store.frozen import Frozen

_NOW_MS = Frozen(sa.select(sa.cast(sa.func.floor(sa.extract("epoch", sa.func.now()) * 1000), sa.BigInteger)))

# Selected or returned by a statement, it makes its transaction one that does not wait for the disk when it commits. If
# Postgres crashes within a second or so the transaction may be as if it had never been, wholly: for steps that are then
# done again, under guards that tell. What is committed later with a wait is never there without it.
RELAXED = sa.func.set_config("synchronous_commit", "off", True).label("relaxed")


def ago(seconds: float) -> sa.ColumnElement[datetime]:
    """`seconds` before the start of this transaction."""
    return sa.func.now() - timedelta(seconds=seconds)


def later(seconds: float) -> sa.ColumnElement[datetime]:
    """`seconds` after the start of this transaction."""
    return sa.func.now() + timedelta(seconds=seconds)


def now_ms(conn: sa.Connection) -> int:
    """The start of this transaction in Unix milliseconds: the same instant that `func.now()` writes."""
    return int(_NOW_MS.run(conn).scalar_one())


def new_id(conn: sa.Connection, prefix: str) -> str:
    """A new public id; its time is the row's created_at, so ordering by id is ordering by (created_at, id)."""
    return make_id(prefix, now_ms(conn), os.urandom(RANDOM_BYTES))
