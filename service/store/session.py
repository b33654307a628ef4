"""The way to the database: one pooled engine per process, transactions that retry what Postgres asks to be retried."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from service.errors import DatabaseUnreachable, SettingError

log = logging.getLogger(__name__)
T = TypeVar("T")

# Postgres: 40001 serialization_failure, 40P01 deadlock_detected. Nothing was written; the same work may be done again.
_RETRYABLE = {"40001", "40P01"}
_MAX_TRIES = 5
_PING_AFTER_SECONDS = 1.0

# Postgres is down, restarting or cut off: nothing is wrong with the statement, and it may be tried again later.
DATABASE_AWAY = (OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError)

# A peer that is cut off without a word is noticed within half a minute, not after TCP's two hours.
SOCKET_OPTIONS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # ms
}


class Database:
    """A pooled connection to Postgres. One per process; threads share it."""

    def __init__(self, url: str, *, pool_size: int = 8, application_name: str = "trunkline") -> None:
        try:
            parsed = sa.make_url(url).set(drivername="postgresql+psycopg")
        except sa.exc.ArgumentError as error:
            raise SettingError("DATABASE_URL is not a database URL.") from error
        self.url = parsed
        # prepare_threshold=None: auto-prepared plans over arrays and stale statistics dropped a 35,000 rows/s
        # update to 765 (DESIGN.md section 4).
        self.engine = sa.create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_recycle=1800,
            connect_args={
                "prepare_threshold": None,
                **SOCKET_OPTIONS,
                "application_name": application_name,
                # A client that froze in mid-transaction must not hold its row locks against everybody else.
                "options": "-c timezone=UTC -c idle_in_transaction_session_timeout=15000",
            },
        )

        _ping_idle(self.engine)
        _hide_parameters(self.engine)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """One transaction: committed at the end, rolled back on an error. Not retried; see `run`."""
        with self.engine.begin() as conn:
            yield conn

    def run(self, work: Callable[[sa.Connection], T]) -> T:
        """`work` in one transaction, done again on a deadlock or a serialization failure (it must be repeatable)."""
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                with self.engine.begin() as conn:
                    return work(conn)
            except DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                if state not in _RETRYABLE or attempt == _MAX_TRIES:
                    raise
                log.info("transaction retried: sqlstate=%s attempt=%d", state, attempt)
                time.sleep(random.uniform(0.01, 0.05) * attempt)
        raise AssertionError("unreachable")

    def connect_raw(self, purpose: str) -> psycopg.Connection:
        """A connection of its own, outside the pool and in autocommit, for locks of a session and for LISTEN."""
        url = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True, application_name=f"trunkline {purpose}", **SOCKET_OPTIONS)

    def check(self) -> None:
        """Raise DatabaseUnreachable, naming what Postgres said, unless a connection can be made."""
        try:
            with self.engine.connect() as conn:
                conn.execute(sa.text("select 1"))
        except OperationalError as error:
            raise DatabaseUnreachable(first_line(error)) from error

    def close(self) -> None:
        self.engine.dispose()


def first_line(error: BaseException) -> str:
    """The first line of a driver's message: it names host and cause, and no secret."""
    source = getattr(error, "orig", None) or error
    lines = str(source).strip().splitlines()
    return f"({lines[0].strip()})" if lines else ""


def _ping_idle(engine: sa.Engine) -> None:
    """As SQLAlchemy's pool_pre_ping does, for connections that were idle long enough to have died unseen. Asking each
    time costs 0.3 ms, of which a single job would pay six."""

    @event.listens_for(engine, "checkin")
    def note_time(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        if time.monotonic() - record.info.get("idle_since", time.monotonic()) < _PING_AFTER_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except psycopg.Error as error:
            raise sa.exc.InvalidatePoolError("a connection died while it was idle") from error


def _hide_parameters(engine: sa.Engine) -> None:
    @event.listens_for(engine, "handle_error")
    def hide(context: sa.engine.ExceptionContext) -> None:
        # Statement parameters hold prompts and outputs: they never reach a log or a traceback.
        if isinstance(context.sqlalchemy_exception, sa.exc.StatementError):
            context.sqlalchemy_exception.hide_parameters = True
            context.sqlalchemy_exception.params = None
