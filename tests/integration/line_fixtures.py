"""A whole line for single jobs: the API in this process, a dispatcher and a worker beside it, and an engine over HTTP
whose answers the test chooses."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from api_fixtures import Api, serve_api
from server_kinds import Servers
from watchful_server import WatchfulServer, watchful
from worker_processes import Worker, running, wait_until

from service.fleet import load_models
from service.settings import Settings
from service.store.admin import drop_database, ensure_database
from service.store.session import Database

MODELS_TOML = (
    '[models.tiny]\naliases = ["small"]\n'
    'endpoints = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]\n\n[models.other]\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Its parts. Model `tiny` has one instance, `one`; model `other` has none."""

    api: Api
    engine: WatchfulServer
    broker_url: str
    folder: Path

    @contextmanager
    def another_api(self, **changes: Any) -> Iterator[Api]:
        """A second process of the API, as far as anybody can tell: it shares the tables and the broker."""
        models = load_models(self.api.settings.models_path)
        with serve_api(self.api.settings, self.api.database, self.broker_url, models, **changes) as other:
            yield other

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


@contextmanager
def line_of(servers: Servers, folder: Path, **changes: Any) -> Iterator[Line]:
    """Started, ready, and all of it gone afterwards. `changes` are settings."""
    base = Database(servers.database_url, pool_size=1)
    name = f"trunkline_test_{secrets.token_hex(6)}"
    ensure_database(base, name, template=servers.template)
    redis.Redis.from_url(servers.broker_url).flushdb()
    database = Database(servers.url_of(name))
    settings = Settings(
        state_folder=folder / "state folder",
        database_url=servers.url_of(name),
        broker_url=servers.broker_url,
        secret_key="test-secret",
        job_tries=1,
        drain_seconds=1.0,
    )
    settings = dataclasses.replace(settings, **changes)
    with ExitStack() as stack:
        stack.callback(base.close)
        stack.callback(drop_database, base, name)
        stack.callback(database.close)
        engine = stack.enter_context(watchful())
        settings.state_folder.mkdir()
        settings.models_path.write_text(MODELS_TOML)
        settings.instances_path.write_text(
            f'[instances.one]\nengine = "openai"\nmodel = "tiny"\nurl = "{engine.url}"\n'
            "options = { max_num_seqs = 8 }\n"
        )
        log = settings.state_folder / "dispatcher.log"
        stack.enter_context(running("-m", "service", "dispatch", settings=settings, log=log))
        worker = Worker(settings)
        stack.callback(worker.terminate)
        api = stack.enter_context(serve_api(settings, database, servers.broker_url, load_models(settings.models_path)))
        wait_until(lambda: _ready_instances(api) == 1, 60, lambda: worker.log + log.read_text())
        yield Line(api=api, engine=engine, broker_url=servers.broker_url, folder=settings.state_folder)


def _ready_instances(api: Api) -> int:
    listed = api.http.get("/v1/models").json()["data"]
    return sum(int(model["instances"]) for model in listed if model["id"] == "tiny")


@pytest.fixture(scope="module")
def whole_line(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """One for a module: it takes seconds to start."""
    with line_of(servers, tmp_path_factory.mktemp("line")) as line:
        yield line


@pytest.fixture
def line(whole_line: Line) -> Iterator[Line]:
    """The module's, with an engine that answers `{}`."""
    engine = whole_line.engine
    engine.reply = (200, b"{}")
    engine.let_go.set()
    engine.asked.clear()
    engine.aborted.clear()
    while engine.arrived.acquire(blocking=False):
        pass
    yield whole_line
    engine.let_go.set()
