"""Fixtures: real Postgres and broker for the session, a fresh migrated database for every test that asks for one.

TEST_DATABASE_URL and TEST_BROKER_URL, when both are set, run tests/integration a second time against those servers,
but for modules marked `embedded_only`: what they test is on this side of the database and the broker
(the user of the first must be allowed to create databases; the numbered database of the second is emptied).
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from server_kinds import EXTERNAL, Servers

from service import migrate
from service.embedded import EmbeddedServers
from service.settings import Settings, describe_settings
from service.store.admin import drop_database, ensure_database
from service.store.session import Database

HERE = Path(__file__).parent

# Whoever runs the tests may have a Trunkline of his own: nothing of it is touched.
for _name, *_ in describe_settings():
    os.environ.pop(_name, None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_integration = (HERE / "integration") in metafunc.definition.path.parents
    is_once = metafunc.definition.get_closest_marker("embedded_only") is not None
    if "servers" in metafunc.fixturenames and is_integration and all(EXTERNAL) and not is_once:
        metafunc.parametrize("servers", ["embedded", "external"], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (HERE / "unit") in item.path.parents:
            item.add_marker(pytest.mark.disable_socket)
        if "servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session")
def state_base() -> Iterator[Path]:
    """Not below pytest's own folder: as root nobody else may enter that, and Postgres runs as somebody else."""
    folder = Path(tempfile.mkdtemp(prefix="trunkline test "))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, state_base: Path) -> Iterator[Servers]:
    """Embedded Postgres and Valkey, or the external pair."""
    if getattr(request, "param", "embedded") == "external":
        database_url, broker_url = EXTERNAL
        assert database_url
        assert broker_url
        yield from _with_template("external", database_url, broker_url)
        return
    settings = Settings(state_folder=state_base / "servers")
    processes = EmbeddedServers(settings, durable=False)
    embedded = processes.start()
    try:
        yield from _with_template("embedded", embedded.database_url, embedded.broker_url)
    finally:
        processes.stop()


def _with_template(kind: str, database_url: str, broker_url: str) -> Iterator[Servers]:
    template = f"trunkline_template_{secrets.token_hex(4)}"
    servers = Servers(kind=kind, database_url=database_url, broker_url=broker_url, template=template)
    base = Database(database_url, pool_size=1)
    ensure_database(base, template)
    migrate.upgrade(servers.url_of(template))
    yield servers
    drop_database(base, template)
    base.close()


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    """A database with nothing in it."""
    yield from _fresh(servers, template=None)


@pytest.fixture
def database_url(servers: Servers) -> Iterator[str]:
    """A migrated database of this test alone."""
    yield from _fresh(servers, template=servers.template)


def _fresh(servers: Servers, template: str | None) -> Iterator[str]:
    base = Database(servers.database_url, pool_size=1)
    name = f"trunkline_test_{secrets.token_hex(6)}"
    ensure_database(base, name, template=template)
    yield servers.url_of(name)
    drop_database(base, name)
    base.close()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def broker_url(servers: Servers) -> str:
    """The session's broker, emptied."""
    client = redis.Redis.from_url(servers.broker_url)
    client.flushdb()
    client.close()
    return servers.broker_url


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Short leases, a state folder of its own, and this test's servers where the test uses them."""
    asked = request.fixturenames
    uses_servers = {"database", "database_url", "broker_url", "servers"} & set(asked)
    return Settings(
        state_folder=tmp_path / "state folder",
        database_url=request.getfixturevalue("database_url") if uses_servers else None,
        broker_url=request.getfixturevalue("broker_url") if uses_servers else None,
        secret_key="test-secret",
        lease_seconds=3.0,
        heartbeat_seconds=0.5,
        stale_boot_seconds=2.0,
        republish_seconds=1.0,
        task_lease_seconds=3.0,
        sweep_seconds=0.5,
        cancel_grace_seconds=2.0,
        drain_seconds=3.0,
        dispatch_poll_seconds=0.1,
    )
