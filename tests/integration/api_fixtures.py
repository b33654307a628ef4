"""What the tests of the API share: the application behind a real uvicorn on a free loopback port, and clients of it."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
from control_fixtures import MODELS, Desk, jsonl, request
from fastapi import FastAPI

from service.api.app import create_app
from service.api.server import bind, make_server
from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.connections import Connections
from service.fleet import Models
from service.settings import Settings
from service.store import tenants
from service.store.admin import drop_database, ensure_database
from service.store.blobs import Blobs
from service.store.session import Database
from service.tokenizing import Tokenizing
from service.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A running API, and what lies behind it."""

    url: str
    settings: Settings
    database: Database
    blobs: Blobs
    http: httpx.Client
    app: FastAPI

    @property
    def callers(self) -> int:
        """How many calls wait for a single job to end."""
        return int(self.app.state.context.waiter.callers)

    def sdk(self, key: str = "no key is configured", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def as_tenant(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"})

    def make_key(self, tenant: str, label: str = "test") -> str:
        with self.database.transaction() as conn:
            return tenants.create_key(conn, tenant, label)

    def upload(self, data: bytes | None = None, client: httpx.Client | None = None, **parts: Any) -> str:
        """The id of an uploaded file of three good lines, or of `data`."""
        content = jsonl(request(f"c{n}") for n in range(3)) if data is None else data
        answer = (client or self.http).post(
            "/v1/files", data={"purpose": "batch", **parts}, files={"file": ("in.jsonl", content)}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def create(self, file_id: str | None = None, client: httpx.Client | None = None, **fields: Any) -> dict[str, Any]:
        """A batch that was accepted."""
        answer = (client or self.http).post("/v1/batches", json=self.create_body(file_id, **fields))
        assert answer.status_code == 200, answer.text
        created: dict[str, Any] = answer.json()
        return created

    def create_body(self, file_id: str | None = None, **fields: Any) -> dict[str, Any]:
        return {
            "input_file_id": file_id or self.upload(),
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            **fields,
        }

    def desk(self, tenant: str = "default") -> Desk:
        """Control work for a tenant of this API, run when the test says so."""
        work = Work(
            settings=self.settings,
            database=self.database,
            blobs=self.blobs,
            models=MODELS,
            tokenizing=Tokenizing(MODELS),
        )
        with self.database.transaction() as conn:
            owner = tenants.ensure_tenant(conn, tenant)
        return Desk(work=work, tenant_id=owner.id)


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The application's URL while it is served."""
    server = make_server(app)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            # The socket listens already: a request that comes before the server is up waits for it.
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serve_api(
    settings: Settings, database: Database, broker_url: str, models: Models = MODELS, **changes: Any
) -> Iterator[Api]:
    """An API over these servers; `changes` are settings."""
    settings = replace(settings, **changes)
    blobs = Blobs(settings.store_location)
    connections = Connections(
        database_url=settings.database_url or "", broker_url=broker_url, secret_key=settings.secret_key or ""
    )
    publisher = Publisher(make_app(settings, broker_url, queue=CONTROL_QUEUE))
    app = create_app(settings, connections, models, database, publisher, blobs)
    with running(app) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield Api(url=url, settings=settings, database=database, blobs=blobs, http=http, app=app)


@pytest.fixture
def api(settings: Settings, database: Database, broker_url: str) -> Iterator[Api]:
    with serve_api(settings, database, broker_url) as running_api:
        yield running_api


@pytest.fixture(scope="module")
def steady(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One API for all the tests of a module that only look, or are refused: starting one takes longer than they do."""
    base = Database(servers.database_url, pool_size=1)
    name = f"trunkline_test_{secrets.token_hex(6)}"
    ensure_database(base, name, template=servers.template)
    url = servers.url_of(name)
    settings = Settings(
        state_folder=tmp_path_factory.mktemp("steady") / "state folder",
        database_url=url,
        broker_url=servers.broker_url,
        secret_key="test-secret",
    )
    database = Database(url)
    with serve_api(settings, database, servers.broker_url) as running_api:
        yield running_api
    database.close()
    drop_database(base, name)
    base.close()


def check_refused(answer: httpx.Response, status: int, code: str | None, param: str | None = None) -> None:
    """The answer is the error envelope, whole and nothing else, with the headers that go with its status."""
    assert answer.status_code == status, answer.text
    body = json.loads(answer.content)
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert answer.headers["x-request-id"].startswith("req_")
    kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert body["error"]["type"] == kinds.get(status, "invalid_request_error")
    if status == 409:
        assert answer.headers["x-should-retry"] == "false"
    if status == 429:
        assert "retry-after" in answer.headers or answer.headers["x-should-retry"] == "false"
