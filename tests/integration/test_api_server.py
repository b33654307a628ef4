"""The API as a whole: envelope, ids of requests, keys and tenants, models, health, start-up and end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, running, serve_api, steady  # noqa: F401 - two are fixtures
from control_fixtures import MODELS, jsonl, request
from seeds import add_boot

from service.api.app import build, create_app
from service.api.auth import check_reachable_with_key
from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.connections import Connections
from service.errors import SchemaBehind, SettingError
from service.fleet import Models
from service.ports import free_port
from service.settings import Settings, child_environment
from service.store import tenants
from service.store.blobs import Blobs
from service.store.session import Database
from service.store.tables import api_key, tenant

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/batches/", 404, "not_found"),
        ("POST", "/v1/files/", 404, "not_found"),
        ("GET", "/v1/jobs/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("PUT", "/v1/batches", 405, "method_not_allowed"),
        ("GET", "/v1/batches/batch_1/cancel", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ],
)
def test_routes_that_are_none(steady: Api, method: str, path: str, status: int, code: str) -> None:
    answer = steady.http.request(method, path, follow_redirects=False)
    check_refused(answer, status, code)
    assert ("allow" in answer.headers) == (status == 405)


def test_every_answer_has_its_own_request_id(steady: Api) -> None:
    ids = [steady.http.get(path).headers["x-request-id"] for path in ("/healthz", "/v1/models", "/v1/batches", "/no")]
    assert len(set(ids)) == 4
    named = steady.http.get("/healthz", headers={"x-request-id": "mine"})
    assert named.headers["x-request-id"] != "mine"
    assert steady.sdk().models.list()._request_id is not None


def test_what_nobody_expected_is_a_500_in_the_envelope_and_no_prompt_in_the_log(
    settings: Settings, database: Database, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_api(settings, database, broker_url) as api:
        made = api.create()
        with database.transaction() as conn:
            conn.execute(sa.text("update batch set status = 'a secret prompt'"))
        with caplog.at_level(logging.DEBUG):
            check_refused(api.http.get(f"/v1/batches/{made['id']}"), 500, "internal_error")
    assert "ValueError" in caplog.text
    assert "a secret prompt" not in caplog.text


def test_nothing_that_a_client_sends_is_logged(
    settings: Settings, database: Database, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_api(settings, database, broker_url) as api, caplog.at_level(logging.DEBUG, logger="service"):
        api.upload(jsonl([request("a", text="a secret prompt")]))
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a secret prompt"}]}
        api.http.post("/v1/jobs?q=a+secret+prompt", json={"endpoint": CHAT, "body": body})
        api.as_tenant("a-secret-key").get("/v1/batches?after=a%20secret%20prompt")
    mine = [record.getMessage() for record in caplog.records if record.name.startswith("service")]
    assert any("POST /v1/jobs status=202" in message for message in mine)
    assert not any("secret" in message for message in mine)


def test_with_no_key_everything_is_the_default_tenants(api: Api) -> None:
    api.create()
    assert api.as_tenant("whatever").get("/v1/batches").json()["data"]
    with api.database.transaction() as conn:
        row = conn.execute(sa.select(tenant)).one()
    assert (row.name, len(row.salt)) == ("default", 16)


def test_once_a_key_exists_it_is_required(api: Api) -> None:
    key = api.make_key("acme")
    assert key.startswith("tl-")
    for client in (api.http, api.as_tenant("wrong"), api.as_tenant(key[:-1]), api.as_tenant(key.upper())):
        for method, path in (
            ("GET", "/v1/batches"),
            ("POST", "/v1/files"),
            ("GET", "/v1/models"),
            ("POST", "/v1/jobs"),
        ):
            answer = client.request(method, path)
            check_refused(answer, 401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError) as refused:
        api.sdk("wrong").batches.list()
    assert refused.value.code == "invalid_api_key"
    assert api.sdk(key).batches.list().data == []
    for path in ("/healthz", "/readyz"):
        assert api.http.get(path).status_code == 200


def test_a_revoked_key_opens_nothing_and_the_door_stays_shut(api: Api) -> None:
    key = api.make_key("acme", "laptop")
    with api.database.transaction() as conn:
        (shown,) = tenants.list_keys(conn)
        assert (shown.tenant, shown.label, shown.revoked_at) == ("acme", "laptop", None)
        assert tenants.revoke_key(conn, shown.id)
        assert not tenants.revoke_key(conn, shown.id)
        kept = conn.execute(sa.select(api_key)).one()
    assert key.encode() not in kept.hash
    check_refused(api.as_tenant(key).get("/v1/batches"), 401, "invalid_api_key")
    check_refused(api.http.get("/v1/batches"), 401, "invalid_api_key")


def test_tenants_see_nothing_of_each_other(api: Api) -> None:
    ours, theirs = api.as_tenant(api.make_key("ours")), api.as_tenant(api.make_key("theirs"))
    file_id = api.upload(client=ours)
    batch_id = api.create(file_id, client=ours)["id"]
    body = {"model": "tiny", "messages": []}
    job_id = ours.post("/v1/jobs", json={"endpoint": CHAT, "body": body}).json()["id"]
    for method, path, param in (
        ("GET", f"/v1/files/{file_id}", "file_id"),
        ("GET", f"/v1/files/{file_id}/content", "file_id"),
        ("DELETE", f"/v1/files/{file_id}", "file_id"),
        ("GET", f"/v1/batches/{batch_id}", "batch_id"),
        ("GET", f"/v1/batches/{batch_id}/results", "batch_id"),
        ("POST", f"/v1/batches/{batch_id}/cancel", "batch_id"),
        ("GET", f"/v1/jobs/{job_id}", "job_id"),
        ("POST", f"/v1/jobs/{job_id}/cancel", "job_id"),
    ):
        check_refused(theirs.request(method, path), 404, "not_found", param)
    taken = theirs.post("/v1/batches", json=api.create_body(file_id))
    check_refused(taken, 404, "not_found", "input_file_id")
    for path in ("files", "batches", "jobs"):
        assert theirs.get(f"/v1/{path}").json()["data"] == []
        assert len(ours.get(f"/v1/{path}").json()["data"]) == 1
    headers = {"idempotency-key": "k"}
    mine = ours.post("/v1/batches", json=api.create_body(file_id), headers=headers).json()
    other = theirs.post("/v1/batches", json=api.create_body(api.upload(client=theirs)), headers=headers).json()
    assert mine["id"] != other["id"]


def test_without_a_key_only_loopback_names_are_answered(api: Api) -> None:
    port = httpx.URL(api.url).port
    for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert api.http.get("/v1/batches", headers={"host": name}).status_code == 200
    rebound = api.http.get("/v1/batches", headers={"host": f"evil.example:{port}"})
    check_refused(rebound, 401, "invalid_api_key")
    key = api.make_key("acme")
    named = {"host": "trunkline.example", "authorization": f"Bearer {key}"}
    assert api.http.get("/v1/batches", headers=named).status_code == 200


def test_bound_for_others_it_needs_a_key(settings: Settings, database: Database) -> None:
    check_reachable_with_key(settings, database)
    with pytest.raises(SettingError, match=r"TRUNKLINE_HOST is 0\.0\.0\.0.*`trunkline keys create`"):
        check_reachable_with_key(replace(settings, host="0.0.0.0"), database)
    with database.transaction() as conn:
        tenants.create_key(conn, "acme", "test")
    check_reachable_with_key(replace(settings, host="0.0.0.0"), database)


def test_models_are_those_of_the_file_and_of_the_ready_instances(api: Api) -> None:
    names = [model.id for model in api.sdk().models.list()]
    assert names == ["other", "small", "tiny", "tiny-legal"]
    with api.database.transaction() as conn:
        add_boot(conn)
    listed = {model["id"]: model for model in api.http.get("/v1/models").json()["data"]}
    assert listed["small"] == {
        "id": "small", "object": "model", "created": 0, "owned_by": "trunkline", "root": "tiny", "instances": 1,
    }  # fmt: skip
    assert listed["other"]["instances"] == 0
    assert api.sdk().models.retrieve("tiny").id == "tiny"
    check_refused(api.http.get("/v1/models/org/unknown"), 404, "model_not_found", "model")


def test_ready_says_each_part(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url) as api:
        assert api.http.get("/readyz").json() == {"status": "ok", "database": "up", "store": "up", "broker": "up"}
        store = api.settings.state_folder / "files"
        assert list(store.iterdir()) == []
        store.rmdir()
        store.write_text("no folder")
        down = api.http.get("/readyz")
        assert (down.status_code, down.json()["store"], down.json()["database"]) == (503, "down", "up")
        assert down.json()["error"]["code"] == "service_unavailable"
        answer = api.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}")})
        check_refused(answer, 503, "service_unavailable")
        store.unlink()
    with serve_api(settings, database, f"redis://127.0.0.1:{free_port()}/0") as api:
        degraded = api.http.get("/readyz")
        assert (degraded.status_code, degraded.json()["status"], degraded.json()["broker"]) == (200, "degraded", "down")


def test_a_database_that_is_down_is_503_on_every_call(settings: Settings, broker_url: str) -> None:
    away = Database(f"postgresql://trunkline:x@127.0.0.1:{free_port()}/none")
    connections = Connections(database_url="", broker_url=broker_url, secret_key="")
    publisher = Publisher(make_app(settings, broker_url, queue=CONTROL_QUEUE))
    app = create_app(settings, connections, MODELS, away, publisher, Blobs(settings.store_location))
    with running(app) as url:
        for method, path in (
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/files"),
            ("GET", "/v1/models"),
        ):
            answer = httpx.request(method, url + path)
            check_refused(answer, 503, "service_unavailable")
            assert answer.headers["retry-after"] == "5"
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503


def test_start_up_is_refused_with_one_sentence(settings: Settings, empty_database_url: str) -> None:
    with pytest.raises(SchemaBehind):
        build(replace(settings, database_url=empty_database_url))


@contextmanager
def process(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "service", "api"],
        env=child_environment(settings),
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def with_models(settings: Settings, database: Database) -> Settings:
    settings.state_folder.mkdir(parents=True, exist_ok=True)
    settings.models_path.write_text("[models.tiny]\n")
    return replace(settings, port=free_port())


def test_the_process_serves_and_a_signal_ends_it_though_a_long_poll_waits(with_models: Settings) -> None:
    with (
        process(with_models) as child,
        httpx.Client(base_url=f"http://127.0.0.1:{with_models.port}", timeout=90) as http,
    ):
        wait_for(http, child)
        body = {"model": "tiny", "messages": []}
        job_id = http.post("/v1/jobs", json={"endpoint": CHAT, "body": body}).json()["id"]
        with socket.create_connection(("127.0.0.1", with_models.port)) as waiting:
            waiting.sendall(f"GET /v1/jobs/{job_id}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            http.get("/healthz")
            started = time.monotonic()
            os.kill(child.pid, signal.SIGTERM)
            child.wait(timeout=40)
            assert time.monotonic() - started < 30
    assert child.returncode in (0, -signal.SIGTERM)


def test_a_taken_port_is_one_sentence(with_models: Settings) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", with_models.port))
        holder.listen()
        with process(with_models) as child:
            _, said = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "TRUNKLINE_PORT" in said.splitlines()[-1]
    assert "Traceback" not in said


def wait_for(http: httpx.Client, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < deadline:
        try:
            http.get("/healthz")
        except httpx.TransportError:
            continue
        else:
            return
    raise AssertionError("the process never answered")


def test_an_empty_registry_serves_no_model(settings: Settings, database: Database, broker_url: str) -> None:
    publisher = Publisher(make_app(settings, broker_url, queue=CONTROL_QUEUE))
    connections = Connections(database_url="", broker_url=broker_url, secret_key="")
    app = create_app(settings, connections, Models({}), database, publisher, Blobs(settings.store_location))
    with running(app) as url:
        assert httpx.get(f"{url}/v1/models").json() == {"object": "list", "data": []}
