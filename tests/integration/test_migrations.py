"""The revisions make exactly the tables of service/store/tables.py, and take them away again."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import sqlalchemy as sa

from service import migrate
from service.errors import DatabaseUnreachable, SchemaBehind
from service.ports import free_port
from service.store.session import Database


def test_upgrade_from_nothing_equals_the_tables_and_downgrade_leaves_nothing(empty_database_url: str) -> None:
    database = Database(empty_database_url, pool_size=1)
    with pytest.raises(SchemaBehind, match="found nothing"):
        migrate.check_schema(database)
    migrate.upgrade(empty_database_url)
    assert migrate.differences(database) == []
    migrate.check_schema(database)
    migrate.upgrade(empty_database_url)  # again: nothing to do

    migrate.downgrade(empty_database_url, "base")
    assert sa.inspect(database.engine).get_table_names() == ["alembic_version"]
    database.close()


def test_a_database_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(DatabaseUnreachable, match="check DATABASE_URL"):
        migrate.upgrade(f"postgresql://trunkline:wrong@127.0.0.1:{free_port()}/trunkline")


def test_many_processes_may_migrate_at_once(empty_database_url: str) -> None:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(migrate.upgrade, [empty_database_url] * 3))
    database = Database(empty_database_url, pool_size=1)
    migrate.check_schema(database)
    database.close()
