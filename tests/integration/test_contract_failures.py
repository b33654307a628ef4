"""What every path of the OpenAPI document does when it is used well, used wrongly, and when the database goes away in
the middle: the envelope, a request id, and nothing half written."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, check_refused, serve_api
from both_sdks import KINDS, sdk_of
from client_steps import run_open_tasks
from control_fixtures import jsonl, request
from server_kinds import Servers

from service.api.openapi.document import document
from service.core.batchfile import MAX_LINE_BYTES
from service.core.model import Endpoint
from service.fleet import Model, Models
from service.settings import Settings
from service.store.admin import drop_database, ensure_database
from service.store.session import Database

pytestmark = pytest.mark.embedded_only

CHAT = "/v1/chat/completions"
PROMPTS = {CHAT: {"messages": []}, "/v1/completions": {"prompt": "a"}, "/v1/embeddings": {"input": "a"}}
JOB = {"endpoint": CHAT, "body": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
PATHS = document()["paths"]
OPERATIONS = [(method.upper(), path) for path, item in PATHS.items() for method in item]
WITH_JSON = [
    (method.upper(), path)
    for path, item in PATHS.items()
    for method, operation in item.items()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
] + [("POST", "/v1/batches/{batch_id}/retry")]
TABLES = ("file", "batch", "job", "job_result", "control_task", "idempotency_key", "cohort", "webhook_event")


class Leaving(Database):
    """A database that is away after so many transactions more, when told so. None: it stays."""

    transactions_left: int | None = None
    comes_back = False  # after one transaction that failed
    loses_commits = False  # what `run` committed is not answered

    def _count(self) -> None:
        if self.transactions_left is not None:
            if self.transactions_left == 0:
                self.transactions_left = None if self.comes_back else 0
                raise sa.exc.OperationalError("", None, Exception("server closed the connection unexpectedly"))
            self.transactions_left -= 1

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        self._count()
        with super().transaction() as conn:
            yield conn

    def run(self, work: Any) -> Any:
        self._count()
        made = super().run(work)
        if self.loses_commits:
            raise sa.exc.OperationalError("", None, Exception("server closed the connection unexpectedly"))
        return made


@pytest.fixture(scope="module")
def leaving(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API over such a database."""
    base = Database(servers.database_url, pool_size=1)
    name = f"trunkline_test_{secrets.token_hex(6)}"
    ensure_database(base, name, template=servers.template)
    database = Leaving(servers.url_of(name))
    settings = Settings(
        state_folder=tmp_path_factory.mktemp("leaving") / "state folder",
        database_url=servers.url_of(name),
        broker_url=servers.broker_url,
        secret_key="test-secret",
    )
    models = Models({"tiny": Model(name="tiny", endpoints=tuple(Endpoint))})
    with serve_api(settings, database, servers.broker_url, models) as api:
        yield api
    database.close()
    drop_database(base, name)
    base.close()


@contextmanager
def away(api: Api, after: int) -> Iterator[None]:
    database = api.database
    assert isinstance(database, Leaving)
    database.transactions_left = after
    try:
        yield
    finally:
        database.transactions_left = None


def ended_batch(api: Api) -> str:
    """Cancelled, with one line answered and two not."""
    desk = api.desk()
    batch_id = str(api.create(api.upload(jsonl(request(f"c{n}") for n in range(3))))["id"])
    run_open_tasks(desk)
    desk.answer(batch_id, ["c0"])
    desk.cancel(batch_id)
    run_open_tasks(desk)
    return batch_id


def good_request(api: Api, method: str, path: str) -> dict[str, Any]:
    """A request that succeeds."""
    fields: dict[str, Any] = {"method": method, "url": path}
    if "{file_id}" in path:
        fields["url"] = path.format(file_id=api.upload())
    if "{batch_id}" in path:
        is_open = method == "PATCH" or path.endswith("/cancel")
        fields["url"] = path.format(batch_id=api.create()["id"] if is_open else ended_batch(api))
    if "{job_id}" in path:
        fields["url"] = path.format(job_id=api.http.post("/v1/jobs", json=JOB).json()["id"])
    if "{name}" in path:
        fields["url"] = path.format(name="tiny")
    if (method, path) == ("POST", "/v1/files"):
        return {**fields, "data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n")}}
    if (method, path) in WITH_JSON:
        bodies: dict[str, Callable[[], dict[str, Any]]] = {
            "/v1/batches": api.create_body,
            "/v1/batches/plan": api.create_body,
            "/v1/jobs": lambda: JOB,
        }
        fields["json"] = {"model": "tiny", **PROMPTS[path]} if path in PROMPTS else bodies.get(path, dict)()
    return fields


def rows(api: Api) -> dict[str, list[str]]:
    with api.database.transaction() as conn:
        return {
            name: [str(row) for row in conn.execute(sa.text(f"select * from {name} order by 1"))] for name in TABLES
        }


def blobs(api: Api) -> set[str]:
    return {str(path) for path in (api.settings.state_folder / "files").rglob("*") if path.is_file()}


@pytest.mark.parametrize(("method", "path"), [item for item in OPERATIONS if item[1] not in PROMPTS])
def test_a_good_call_succeeds_with_an_id_of_its_own(leaving: Api, method: str, path: str) -> None:
    fields = good_request(leaving, method, path)
    answer = leaving.http.request(**fields, headers={"x-request-id": "mine"})
    assert answer.is_success, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    assert len(answer.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize(("method", "path"), [item for item in OPERATIONS if item[1].startswith("/v1/")])
def test_a_database_that_goes_away_is_503_and_nothing_is_half_written(leaving: Api, method: str, path: str) -> None:
    """At every transaction of the call: a 5xx means that nothing was made, and what was made is answered."""
    database = leaving.database
    assert isinstance(database, Leaving)
    has_succeeded, after = False, 0
    while not has_succeeded:
        fields = good_request(leaving, method, path)
        before, kept = rows(leaving), blobs(leaving)
        with away(leaving, after):
            answer = leaving.http.request(**fields)
            has_succeeded = database.transactions_left != 0 or answer.is_success
        if answer.is_success:
            break
        check_refused(answer, 503, "service_unavailable")
        assert 0 < int(answer.headers["retry-after"]) <= 120
        assert rows(leaving) == before, f"after {after} transactions"
        assert blobs(leaving) == kept
        after += 1
        if path in PROMPTS and after == 2:  # it is made, and waits for an engine
            return
    assert after >= 1


def test_a_submit_that_waits_is_answered_though_the_database_leaves_meanwhile(leaving: Api) -> None:
    with away(leaving, 2):  # the key, and the job
        made = leaving.http.post("/v1/jobs?wait=20", json=JOB)
    assert made.status_code == 202, made.text
    assert leaving.http.get(made.headers["location"]).json() == made.json()


def test_the_sdk_repeats_a_create_that_met_an_outage_and_makes_one_batch(leaving: Api) -> None:
    """The key was looked up, the batch was not written; the SDK comes again when `Retry-After` says."""
    database, body = leaving.database, leaving.create_body()
    assert isinstance(database, Leaving)
    before = leaving.http.get("/v1/batches?limit=1").json()["first_id"]
    database.comes_back = True
    try:
        with away(leaving, 1), sdk_of("sync", leaving.url) as sdk:
            answer = sdk.call("batches.with_raw_response.create", **body)
    finally:
        database.comes_back = False
    assert answer.http_request.headers["x-stainless-retry-count"] == "1"
    made = leaving.http.get("/v1/batches?limit=2").json()["data"]
    assert [item["id"] for item in made] == [answer.parse().id, before]


def test_a_retry_whose_commit_was_not_answered_is_found_whole_by_the_sdks_repeat(leaving: Api) -> None:
    database, url = leaving.database, f"/v1/batches/{ended_batch(leaving)}/retry"
    assert isinstance(database, Leaving)
    database.loses_commits = True
    try:
        lost = leaving.http.post(url, headers={"x-stainless-retry-count": "0"})
    finally:
        database.loses_commits = False
    check_refused(lost, 503, "service_unavailable")
    again = leaving.http.post(url, headers={"x-stainless-retry-count": "1"}).json()
    assert leaving.http.get("/v1/batches?limit=1").json()["data"] == [again]
    content = leaving.http.get(f"/v1/files/{again['input_file_id']}/content").content
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == ["c1", "c2"]


@pytest.mark.parametrize("path", PATHS)
def test_methods_that_a_path_does_not_have(leaving: Api, path: str) -> None:
    url = path.format(file_id="file-1", batch_id="batch_1", job_id="job_1", name="tiny")
    allowed = {method.upper() for method in PATHS[path]}
    for method in METHODS:
        if method not in allowed:
            if path == "/v1/batches/plan" and method in ("GET", "PATCH", "DELETE"):
                check_refused(leaving.http.request(method, url, json={}), 404, "not_found", "batch_id")
                continue
            answer = leaving.http.request(method, url)
            check_refused(answer, 405, "method_not_allowed")
            named = set(answer.headers["allow"].split(", "))
            assert named == allowed or (path.endswith("/plan") and named == {"POST", "GET", "PATCH", "DELETE"})


@pytest.mark.parametrize("path", PATHS)
def test_no_path_ends_in_a_slash(leaving: Api, path: str) -> None:
    url = path.format(file_id="file-1", batch_id="batch_1", job_id="job_1", name="tiny")
    for method in PATHS[path]:
        answer = leaving.http.request(method.upper(), f"{url}/", follow_redirects=False)
        named = path.startswith("/v1/models")  # of an empty name, and of one that ends so
        check_refused(answer, 404, "model_not_found" if named else "not_found", "model" if named else None)


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
def test_bodies_that_are_no_json_no_object_or_too_large(leaving: Api, method: str, path: str) -> None:
    fields = good_request(leaving, method, path)
    fields.pop("json")
    before = rows(leaving)
    for raw in (b"{", b"\xff", b"{} {}", b'{"a": NaN}', b"\xef\xbb\xbf{}"):
        check_refused(leaving.http.request(**fields, content=raw), 400, "invalid_json")
    for raw in (b"[]", b"null", b'"text"', b"1"):
        check_refused(leaving.http.request(**fields, content=raw), 400, "invalid_type")
    check_refused(leaving.http.request(**fields, content=b'{"a": 1, "a": 2}'), 400, "invalid_value", "a")
    check_refused(leaving.http.request(**fields, content=b" " * (MAX_LINE_BYTES + 70_000)), 413, "request_too_large")
    assert rows(leaving) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_sdk_reads_a_file_that_is_too_large(
    settings: Settings, database: Database, broker_url: str, kind: str
) -> None:
    with serve_api(settings, database, broker_url, max_file_bytes=1_000) as api, sdk_of(kind, api.url) as sdk:
        fits = sdk.call("files.create", file=("in.jsonl", b"x" * 1_000), purpose="batch")
        assert fits.bytes == 1_000
        error = sdk.refused("files.create", file=("in.jsonl", b"x" * 1_001), purpose="batch")
        assert isinstance(error, openai.APIStatusError)
        assert (error.status_code, error.code, error.param) == (413, "file_too_large", "file")
        assert error.type == "invalid_request_error"
        assert [item.id for item in sdk.items("files.list")] == [fits.id]


def test_the_limits_are_those_of_the_contract_and_have_no_upper_end() -> None:
    limits = Settings()
    assert (limits.max_file_bytes, limits.max_line_bytes, limits.max_lines) == (200_000_000, 8 * 2**20, 50_000)
    assert limits.max_window_days == 30
    assert Settings(max_file_bytes=10**15, max_lines=10**9).max_file_bytes == 10**15


def test_what_is_no_http_at_all_still_gets_the_envelope(leaving: Api) -> None:
    """The server's own refusals, of what never reaches the application; and a wish for another protocol is ignored."""
    wish = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "eA=="}
    assert leaving.http.get("/v1/files?limit=1", headers=wish).json()["object"] == "list"
    check_refused(leaving.http.get("/v1/none", headers=wish), 404, "not_found")
    port = httpx.URL(leaving.url).port
    for raw in (b"NO HTTP\r\n\r\n", b"GET /v1/files HTTP/1.1\r\nbad header\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(raw)
            said = connection.makefile("rb").read()
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert b"x-request-id: req_" in head.lower()
        error = json.loads(body)["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_http", None)


@pytest.mark.parametrize("shape", [b"x-long: " + b"a" * 70_000, b"\r\n".join([b"x-many: " + b"a" * 90] * 800)])
@pytest.mark.parametrize("is_whole", [True, False])
def test_headers_without_end_are_refused(leaving: Api, shape: bytes, is_whole: bool) -> None:
    """Before any key is asked for, nobody may fill the memory."""
    host, port = httpx.URL(leaving.url).host, httpx.URL(leaving.url).port
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n" + shape + (b"\r\n\r\n" if is_whole else b""))
        said = connection.makefile("rb").read()
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert leaving.http.get("/healthz", headers={"x-long": "a" * 30_000}).status_code == 200
