"""Alembic's entry: one run at a time (advisory lock), under a lock timeout and a statement timeout."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from service.store.control_tables import metadata

# Any number, the same for ever: whoever migrates this database waits for it.
_ADVISORY_LOCK = 7_235_114_001
# A migration that cannot get its lock quickly gives up instead of queueing everybody behind it.
_LOCK_TIMEOUT = "10s"
_STATEMENT_TIMEOUT = "15min"


def run(connection: sa.Connection) -> None:
    """All pending revisions in one transaction on a connection that `service.migrate` opened."""
    connection.execute(sa.text("select pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
    connection.commit()
    try:
        context.configure(
            connection=connection,
            target_metadata=metadata,
            compare_type=True,
            compare_server_default=True,
            transaction_per_migration=False,
        )
        with context.begin_transaction():
            connection.execute(sa.text(f"set local lock_timeout = '{_LOCK_TIMEOUT}'"))
            connection.execute(sa.text(f"set local statement_timeout = '{_STATEMENT_TIMEOUT}'"))
            context.run_migrations()
    finally:
        connection.rollback()
        connection.execute(sa.text("select pg_advisory_unlock(:key)"), {"key": _ADVISORY_LOCK})
        connection.commit()


run(context.config.attributes["connection"])
