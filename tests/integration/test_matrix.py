"""Which servers the integration tests run against, so that a run says what it did not cover."""

from __future__ import annotations

import pytest
import redis
import sqlalchemy as sa
from server_kinds import EXTERNAL, Servers

from service.store.session import Database


def test_the_servers_are_what_they_are_meant_to_be(servers: Servers) -> None:
    database = Database(servers.database_url, pool_size=1)
    with database.transaction() as conn:
        version = int(conn.scalar(sa.text("show server_version_num")) or 0)
    database.close()
    info = redis.Redis.from_url(servers.broker_url).info("server")
    assert version >= 150_000
    assert ("valkey_version" in info) == (servers.kind == "embedded")


def test_external_servers_are_covered() -> None:
    if not all(EXTERNAL):
        pytest.skip("TEST_DATABASE_URL and TEST_BROKER_URL are not set: Postgres 15 and Redis 7 are not tested here")
