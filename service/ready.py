"""Waiting for the database at its schema, for processes that start beside the servers."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.connections import find_connections
from service.errors import DatabaseUnreachable, SchemaBehind, SettingError, TrunklineError
from service.migrate import check_schema
from service.settings import Settings
from service.store.session import Database

READY_SECONDS = 90.0
_POLL_SECONDS = 0.25


def wait_ready(
    settings: Settings, *, seconds: float = READY_SECONDS, while_waiting: Callable[[], None] = lambda: None
) -> None:
    """Return once the database is there at this version's schema. Raises what was last wrong with it.

    The broker is not waited for: work that it cannot announce is found by polling.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            _check(settings)
        except (SettingError, DatabaseUnreachable, SchemaBehind) as error:
            if time.monotonic() > deadline or not _may_change(settings, error):
                raise
            while_waiting()
            time.sleep(_POLL_SECONDS)
        else:
            return


def _check(settings: Settings) -> None:
    database = Database(find_connections(settings).database_url, pool_size=1)
    try:
        database.check()
        check_schema(database)
    finally:
        database.close()


def _may_change(settings: Settings, error: TrunklineError) -> bool:
    """A setting that is there and wrong stays wrong; an embedded server that is not there yet may come."""
    if not isinstance(error, SettingError):
        return True
    return settings.database_url is None or settings.broker_url is None
