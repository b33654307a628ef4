"""The schema: brought to this version's head, checked against it, and compared with the tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from service.errors import SchemaBehind
from service.store.control_tables import metadata
from service.store.session import Database


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to run from many processes at once. Raises DatabaseUnreachable."""
    database = Database(database_url, pool_size=1, application_name="trunkline-migrate")
    try:
        database.check()
        with database.engine.connect() as conn:
            config = _config()
            config.attributes["connection"] = conn
            command.upgrade(config, revision)
    finally:
        database.close()


def downgrade(database_url: str, revision: str) -> None:
    """Back to `revision`; "base" is an empty database."""
    database = Database(database_url, pool_size=1, application_name="trunkline-migrate")
    try:
        database.check()
        with database.engine.connect() as conn:
            config = _config()
            config.attributes["connection"] = conn
            command.downgrade(config, revision)
    finally:
        database.close()


def check_schema(database: Database) -> None:
    """Raise SchemaBehind unless the database is at the head of the revisions that this version ships."""
    expected = set(ScriptDirectory.from_config(_config()).get_heads())
    with database.engine.connect() as conn:
        found = set(MigrationContext.configure(conn).get_current_heads())
    if found != expected:
        raise SchemaBehind(f"(found {', '.join(sorted(found)) or 'nothing'}, expected {', '.join(sorted(expected))})")


def differences(database: Database) -> list[Any]:
    """What alembic would still change to make the database equal to service/store/tables.py."""
    options = {"compare_type": True, "compare_server_default": True}
    with database.engine.connect() as conn:
        return list(compare_metadata(MigrationContext.configure(conn, opts=options), metadata))


def _config() -> Config:
    spec = importlib.util.find_spec("migrations")
    assert spec is not None
    assert spec.origin is not None
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
