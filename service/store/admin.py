"""Databases themselves: made when missing."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from service.store.session import Database

_DUPLICATE_DATABASE = "42P04"


def ensure_database(database: Database, name: str, *, template: str | None = None) -> None:
    """CREATE DATABASE unless it is there. `database` is a connection to another one of the same server."""
    quote = database.engine.dialect.identifier_preparer.quote
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        if conn.scalar(sa.text("select 1 from pg_database where datname = :name"), {"name": name}):
            return
        suffix = f" template {quote(template)}" if template else ""
        try:
            conn.execute(sa.text(f"create database {quote(name)}{suffix}"))
        except ProgrammingError as error:
            if getattr(error.orig, "sqlstate", None) != _DUPLICATE_DATABASE:
                raise


def drop_database(database: Database, name: str) -> None:
    """DROP DATABASE with whatever is still connected to it."""
    quote = database.engine.dialect.identifier_preparer.quote
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(sa.text(f"drop database if exists {quote(name)} with (force)"))
