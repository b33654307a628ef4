"""Nobody sees anything of another tenant: every path of the OpenAPI document is tried with another's ids, so that a new
one cannot be forgotten."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_fixtures import Api, check_refused, steady  # noqa: F401 - a fixture
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.api.openapi.document import document
from service.settings import child_environment
from service.store.tables import batch

pytestmark = pytest.mark.embedded_only

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
SECRET = "words-of-ours"
OPERATIONS = [(method.upper(), path) for path, item in document()["paths"].items() for method in item]
WITH_ID = [(method, path) for method, path in OPERATIONS if "_id}" in path]
LISTS = sorted(
    path
    for path, item in document()["paths"].items()
    if "{" not in path and "Page" in json.dumps(item.get("get", {}).get("responses", {}))
)
# Every body that names what belongs to a tenant.
WITH_ID_IN_BODY = [
    (path, name)
    for path, item in document()["paths"].items()
    for name in item.get("post", {})
    .get("requestBody", {})
    .get("content", {})
    .get("application/json", {})
    .get("schema", {})
    .get("properties", {})
    if name.endswith("_id")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A tenant with a file, a cancelled batch and a job."""

    name: str
    http: httpx.Client
    desk: Desk
    ids: dict[str, str]


def party(api: Api) -> Party:
    name = f"tenant-{secrets.token_hex(6)}"
    http, desk = api.as_tenant(api.make_key(name)), api.desk(name)
    lines = jsonl(request(f"{name} {n}", text=SECRET) for n in range(3))
    file_id = api.upload(lines, http)
    batch_id = api.create(file_id, http)["id"]
    run_open_tasks(desk)
    desk.answer(batch_id, [f"{name} 0"])
    desk.answer(batch_id, [f"{name} 1"], status_code=400)
    assert http.post(f"/v1/batches/{batch_id}/cancel").status_code == 200
    run_open_tasks(desk)
    job_id = http.post("/v1/jobs", json={"endpoint": CHAT, "body": BODY}).json()["id"]
    return Party(name=name, http=http, desk=desk, ids={"file_id": file_id, "batch_id": batch_id, "job_id": job_id})


@pytest.fixture(scope="module")
def ours(steady: Api) -> Iterator[Party]:
    """The party whose things are asked for: nothing that the others do may change them."""
    made = party(steady)
    yield made
    made.http.close()


@pytest.fixture(scope="module")
def theirs(steady: Api) -> Iterator[Party]:
    name = f"tenant-{secrets.token_hex(6)}"
    with steady.as_tenant(steady.make_key(name)) as http:
        yield Party(name=name, http=http, desk=steady.desk(name), ids={})


def everything_of(api: Api, owner: Party) -> dict[str, Any]:
    """All rows that are the owner's, and what the API shows of them."""
    tables = ("file", "batch", "job", "idempotency_key")
    with api.database.transaction() as conn:
        rows = {
            table: [
                str(row)
                for row in conn.execute(
                    sa.text(f"select * from {table} where tenant_id = :id order by 1, 2"), {"id": owner.desk.tenant_id}
                )
            ]
            for table in tables
        }
    return {**rows, **{path: owner.http.get(path).json() for path in LISTS}}


def fill(path: str, ids: dict[str, str]) -> str:
    return path.format(**ids)


def test_the_document_has_the_paths_that_are_tried_here() -> None:
    assert len(WITH_ID) >= 13
    assert LISTS == ["/v1/batches", "/v1/files", "/v1/jobs"]
    assert WITH_ID_IN_BODY == [("/v1/batches", "input_file_id"), ("/v1/batches/plan", "input_file_id")]
    known = {"file_id", "batch_id", "job_id"}
    assert {path.split("{")[1].split("}")[0] for _, path in WITH_ID} == known


@pytest.mark.parametrize(("method", "path"), WITH_ID)
def test_another_tenants_id_is_404(steady: Api, ours: Party, theirs: Party, method: str, path: str) -> None:
    """As an id that nobody has; and its owner's things stay as they are. For the owner the same call is another."""
    before = everything_of(steady, ours)
    param = path.split("{")[1].split("}")[0]
    body: dict[str, Any] | None = {} if method in ("PATCH", "POST") else None
    strange = theirs.http.request(method, fill(path, ours.ids), json=body)
    check_refused(strange, 404, "not_found", param)
    nobodys = {name: value[:-32] + "0" * 32 for name, value in ours.ids.items()}
    unknown = theirs.http.request(method, fill(path, nobodys), json=body)
    assert unknown.json() == strange.json()
    assert everything_of(steady, ours) == before
    own = ours if method == "GET" else party(steady)
    assert own.http.request(method, fill(path, own.ids), json=body).status_code in (200, 202, 409)


@pytest.mark.parametrize(("path", "name"), WITH_ID_IN_BODY)
def test_another_tenants_id_in_a_body_is_404(steady: Api, ours: Party, theirs: Party, path: str, name: str) -> None:
    answer = theirs.http.post(path, json=steady.create_body(ours.ids["file_id"]))
    check_refused(answer, 404, "not_found", name)
    assert theirs.http.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("path", LISTS)
def test_lists_hold_ones_own_also_behind_anothers_id(ours: Party, theirs: Party, path: str) -> None:
    mine = ours.http.get(path).json()
    assert mine["data"]
    cursor = mine["first_id"][:-32] + "f" * 32
    for query in ("", f"?after={mine['first_id']}", f"?after={cursor}"):
        page = theirs.http.get(path + query).json()
        assert (page["data"], page["has_more"], page["first_id"]) == ([], False, None)


@pytest.mark.parametrize(("method", "path"), WITH_ID)
def test_no_key_and_a_wrong_key_see_not_even_that_it_is_there(steady: Api, ours: Party, method: str, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer tl-wrong"}, {"authorization": "Basic dDp0"}):
        answer = steady.http.request(method, fill(path, ours.ids), headers=headers)
        check_refused(answer, 401, "invalid_api_key")


def test_every_path_asks_for_a_key_unless_the_document_says_that_it_is_open(steady: Api, ours: Party) -> None:
    """`ours` has a key, so one is needed."""
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            answer = steady.http.request(method, fill(path, {**ours.ids, "name": "tiny"}))
            is_open = operation.get("security") == []
            assert answer.status_code == (200 if is_open else 401), (method, path)


def test_a_repeat_of_what_another_tenant_asked_for_is_ones_own(ours: Party, theirs: Party) -> None:
    """By key, and as the SDK repeats: the bodies are equal, the tenants are not."""
    fields = {"endpoint": CHAT, "body": {**BODY, "user": secrets.token_hex(4)}}
    for headers in (
        {"idempotency-key": "the same"},
        {"x-stainless-retry-count": "0"},
    ):
        first = ours.http.post("/v1/jobs", json=fields, headers=headers).json()["id"]
        again = {**headers, "x-stainless-retry-count": "1"}
        assert ours.http.post("/v1/jobs", json=fields, headers=again).json()["id"] == first
        other = theirs.http.post("/v1/jobs", json=fields, headers=again)
        assert (other.status_code, other.json()["id"] == first) == (202, False)
        assert theirs.http.get(f"/v1/jobs/{first}").status_code == 404


def test_reports_stats_and_metrics_show_no_other_tenant(steady: Api) -> None:
    """Two tenants with the same file, of which all lines of one fail: the other's figures are its own lines alone."""
    failing, fine = party(steady), party(steady)
    made = {}
    for who, status in ((failing, 400), (fine, 200)):
        batch_id = steady.create(who.ids["file_id"], who.http)["id"]
        run_open_tasks(who.desk)
        who.desk.answer(batch_id, [f"{who.name} {n}" for n in range(3)], status_code=status)
        who.desk.finalize()
        run_open_tasks(who.desk)
        made[who.name] = batch_id
    report = fine.http.get(f"/v1/batches/{made[fine.name]}/report").json()
    assert (report["top_errors"], report["lines"]["total"], report["lines"]["completed"]) == ([], 3, 3)
    shown = fine.http.get(f"/v1/batches/{made[fine.name]}").json()
    assert (shown["usage"]["input_tokens"], shown["request_counts"]["failed"]) == (30, 0)
    assert shown["queue"]["position"] is None
    seen = [fine.http.get(path).text for path in ("/metrics", "/v1/models", "/v1/batches", "/v1/jobs", "/v1/files")]
    seen += [fine.http.get(f"/v1/batches/{made[fine.name]}/{part}").text for part in ("report", "requests", "results")]
    hidden = [failing.name, made[failing.name], *failing.ids.values(), SECRET]
    assert not [word for word in hidden for text in seen if word in text]
    assert fine.name not in seen[0]


def test_positions_are_among_ones_own(steady: Api, theirs: Party) -> None:
    """However much others have before it, a tenant's only batch is its first."""
    other = party(steady)
    for _ in range(3):
        steady.create(other.ids["file_id"], other.http)
    run_open_tasks(other.desk)
    own = steady.create(steady.upload(client=theirs.http), theirs.http)
    run_open_tasks(theirs.desk)
    queue = theirs.http.get(f"/v1/batches/{own['id']}").json()["queue"]
    assert queue["position"] == 1
    with steady.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == own["id"]).values(status="completed"))


def trunkline(api: Api, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trunkline", *arguments],
        env={**child_environment(api.settings), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_keys_are_made_listed_and_revoked_from_the_command_line(steady: Api, ours: Party) -> None:
    name = f"tenant-{secrets.token_hex(6)}"
    made = trunkline(steady, "keys", "create", name, "--label", "a laptop")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    with steady.as_tenant(key) as http:
        assert http.get("/v1/files").json()["data"] == []
        (shown,) = [line for line in trunkline(steady, "keys", "list").stdout.splitlines() if name in line]
        assert "a laptop" in shown
        assert key not in shown
        key_id = shown.strip(" │").split()[0]
        assert trunkline(steady, "keys", "revoke", key_id).returncode == 0
        check_refused(http.get("/v1/files"), 401, "invalid_api_key")
    assert ours.http.get("/v1/files").status_code == 200
