"""`POST /v1/batches/plan`: the same refusals as a create, every line error, and a forecast on the ready instances."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import psutil
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api  # noqa: F401 - `api` is a fixture
from control_fixtures import jsonl, request
from seeds import add_boot

from service.settings import Settings
from service.store import instances
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import batch
from trunkline import AsyncClient, Client, Plan

pytestmark = pytest.mark.embedded_only

FIELDS = [
    "object", "lines", "valid", "errors", "models", "prefix_groups", "prompt_tokens", "shared_tokens", "bound",
    "predicted_hit_rate", "round_robin_hit_rate", "estimated_seconds", "fits_window", "instances",
]  # fmt: skip
UNKNOWN = ("predicted_hit_rate", "round_robin_hit_rate", "estimated_seconds", "fits_window")
GROUPS = ["alpha " * 150, "beta " * 150, "gamma " * 150]


def grouped(lines: int) -> bytes:
    """Prompts that begin alike, in turn of three groups."""
    return jsonl(request(f"c{n}", text=f"{GROUPS[n % 3]} question {n}") for n in range(lines))


def plan(api: Api, data: bytes | None = None, **fields: Any) -> dict[str, Any]:
    body = api.create_body(None if data is None else api.upload(data), **fields)
    answer = api.http.post("/v1/batches/plan", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert list(found) == FIELDS
    assert found["object"] == "plan"
    return found


def add_boots(api: Api, *names: str, rates: bool = True) -> None:
    with api.database.transaction() as conn:
        for pid, name in enumerate(names, 1):
            boot_id = add_boot(conn, name, pid=pid)
            if rates:
                instances.set_rates(conn, boot_id, 10_000.0, 1_000.0)


@pytest.fixture
def lasting(settings: Settings, database: Database, broker_url: str) -> Any:
    """An API for which a boot stays ready however slow this machine is."""
    with serve_api(settings, database, broker_url, stale_boot_seconds=600.0) as running_api:
        yield running_api


def test_a_plan_is_what_the_batch_then_is(lasting: Api) -> None:
    add_boots(lasting, "one", "two")
    data = grouped(60)
    found = plan(lasting, data)
    assert (found["lines"], found["valid"], found["errors"], found["models"]) == (60, 60, None, ["tiny"])
    batch_id = lasting.desk().take_in(data)
    stored = lasting.desk().batch(batch_id)
    planned = sum(row.prompt_tokens for row in lasting.desk().jobs(batch_id))
    assert (found["prefix_groups"], found["prompt_tokens"]) == (stored.prefix_groups, planned) == (3, planned)
    assert found["bound"] == pytest.approx((stored.bound_tokens or 0) / planned)
    assert found["shared_tokens"] > stored.bound_tokens
    # Every group on one instance nearly reaches the bound; dealt out in turn, every instance computes all of them.
    assert found["round_robin_hit_rate"] < found["predicted_hit_rate"] <= found["bound"]
    assert found["estimated_seconds"] > 0
    assert found["fits_window"] is True
    assert found["instances"] == [
        {"name": name, "model": "tiny", "engine": "simulated", "block_size": 32, "kv_capacity_tokens": 4096}
        for name in ("one", "two")
    ]


def test_twice_the_work_takes_longer_and_a_short_window_does_not_fit(lasting: Api) -> None:
    add_boots(lasting, "one")
    once, twice = plan(lasting, grouped(600)), plan(lasting, grouped(1_200), completion_window="24h")
    assert twice["estimated_seconds"] > 1.3 * once["estimated_seconds"]
    # At 1,000 tokens a second the answers alone (256 each where nothing is said) take longer than a minute.
    rows = [json.loads(line) for line in grouped(600).splitlines()]
    for row in rows:
        del row["body"]["max_tokens"]
    late = plan(lasting, jsonl(rows), completion_window="1m")
    assert late["estimated_seconds"] > 120
    assert late["fits_window"] is False


def test_without_a_ready_instance_only_what_the_file_holds_is_known(api: Api) -> None:
    found = plan(api, grouped(6))
    assert found["instances"] == []
    assert [found[name] for name in UNKNOWN] == [None] * 4
    assert (found["prefix_groups"], found["models"]) == (3, ["tiny"])
    assert found["bound"] > 0


def test_rates_that_are_not_known_leave_the_time_open(lasting: Api) -> None:
    add_boots(lasting, "one", rates=False)
    found = plan(lasting, grouped(30))
    assert found["predicted_hit_rate"] > 0
    assert (found["estimated_seconds"], found["fits_window"]) == (None, None)


def test_a_model_without_instances_leaves_the_whole_open(lasting: Api) -> None:
    add_boots(lasting, "one")
    found = plan(lasting, jsonl([request("a"), request("b", model="other"), request("c", model="small")]))
    assert found["models"] == ["other", "tiny"]
    assert [instance["name"] for instance in found["instances"]] == ["one"]
    assert [found[name] for name in UNKNOWN] == [None] * 4


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_every_line_error_is_there_as_the_batch_has_them(api: Api, policy: str) -> None:
    lines = [b"{", *jsonl(request(f"c{n}") for n in range(3)).splitlines(), *[b"[]"] * 110]
    data = b"\n".join(lines)
    found = plan(api, data, queue={"on_invalid_line": policy})
    assert (found["lines"], found["valid"]) == (114, 3)
    errors = found["errors"]["data"]
    assert len(errors) == 101
    assert errors[100]["code"] == "too_many_errors"
    stored = api.desk().batch(api.desk().take_in(data))
    assert stored.status == "failed"
    assert errors == stored.errors


@pytest.mark.parametrize(
    ("data", "code", "lines"),
    [(b"\n \n", "empty_batch", 0), (jsonl(request(f"c{n}") for n in range(4)), "too_many_tasks", 3)],
)
def test_errors_of_the_whole_file(
    settings: Settings, database: Database, broker_url: str, data: bytes, code: str, lines: int
) -> None:
    with serve_api(settings, database, broker_url, max_lines=3) as small:
        found = plan(small, data)
    assert [error["code"] for error in found["errors"]["data"]] == [code]
    assert found["lines"] == found["valid"] == lines


def test_nothing_is_created(api: Api) -> None:
    plan(api)
    with api.database.transaction() as conn:
        for table in (batch, control_task):
            assert conn.scalar(sa.select(sa.func.count()).select_from(table)) == 0


def test_what_a_create_refuses_a_plan_refuses(api: Api) -> None:
    good = api.create_body()
    bad: list[dict[str, Any]] = [
        {**good, "endpoint": None},
        {**good, "endpoint": "/v1/no"},
        {**good, "completion_window": "0h"},
        {**good, "metadata": {"a": 1}},
        {**good, "input_file_id": 7},
        {**good, "input_file_id": f"file-{'0' * 32}"},
        {**good, "queue": {"priority": "now"}},
        {**good, "output_expires_after": {"anchor": "created_at", "seconds": 1}},
    ]
    for body in bad:
        refused = api.http.post("/v1/batches", json=body)
        planned = api.http.post("/v1/batches/plan", json=body)
        error = refused.json()["error"]
        check_refused(planned, refused.status_code, error["code"], error["param"])
    check_refused(api.http.post("/v1/batches/plan", content=b"{"), 400, "invalid_json")
    check_refused(api.http.get("/v1/batches/plan"), 404, "not_found", "batch_id")


def test_a_file_of_another_tenant_is_not_there(api: Api) -> None:
    file_id = api.upload()
    other = api.as_tenant(api.make_key("other"))
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    check_refused(other.post("/v1/batches/plan", json=body), 404, "not_found", "input_file_id")


def test_both_clients_plan_before_they_run(lasting: Api) -> None:
    add_boots(lasting, "one")
    bodies = [{"messages": [{"role": "user", "content": f"{GROUPS[0]} {n}"}]} for n in range(5)]
    queue = {"on_invalid_line": "skip"}
    with Client(f"{lasting.url}/v1") as client:
        found = client.plan(bodies, model="tiny", queue=queue)
        assert (found.valid, found.prefix_groups, found.line_errors, found.instances[0].name) == (5, 1, [], "one")
        assert found.predicted_hit_rate is not None
        (file,) = list(client.files())
        assert client.plan(file, completion_window="1h") == found
        assert client.batch(file).input_file_id == file.id

    async def ask() -> Plan:
        async with AsyncClient(f"{lasting.url}/v1") as client:
            return await client.plan([*bodies, {"messages": "no"}], model="tiny")

    wrong = asyncio.run(ask())
    assert (wrong.lines, wrong.valid, wrong.line_errors[0].line) == (6, 5, 6)


def planners() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "service.batchplan" in child.cmdline()]


def wait_for(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_one_plan_of_a_tenant_at_once_and_the_rest_goes_on(api: Api) -> None:
    body = api.create_body(api.upload(grouped(3_000)))
    answers: list[httpx.Response] = []
    first = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{api.url}/v1/batches/plan", json=body, timeout=120))
    )
    first.start()
    wait_for(planners, "no process plans")
    for planner in planners():
        planner.suspend()
    busy = api.http.post("/v1/batches/plan", json=body)
    check_refused(busy, 429, "rate_limit_exceeded")
    assert busy.headers["retry-after"] == "5"
    assert api.http.get("/v1/batches").status_code == 200
    with api.database.engine.connect() as conn:
        busy_sessions = sa.text(
            "select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle'"
            " and pid <> pg_backend_pid()"
        )
        assert conn.execute(busy_sessions).scalar_one() == 0
    for planner in planners():
        planner.resume()
    first.join()
    assert answers[0].status_code == 200, answers[0].text
    assert plan(api)["valid"] == 3


def test_a_client_that_goes_away_ends_the_planning(api: Api) -> None:
    body = api.create_body(api.upload(grouped(3_000)))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{api.url}/v1/batches/plan", json=body, timeout=0.3)
    wait_for(lambda: not planners(), "it plans on")
    assert plan(api)["valid"] == 3


def test_a_file_that_takes_too_long(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, plan_seconds=0.001) as hasty:
        answer = hasty.http.post("/v1/batches/plan", json=hasty.create_body(hasty.upload(grouped(3_000))))
        check_refused(answer, 400, "plan_too_long", "input_file_id")
        assert planners() == []


def test_a_process_that_dies_is_an_internal_error(api: Api) -> None:
    body = api.create_body(api.upload(grouped(3_000)))
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{api.url}/v1/batches/plan", json=body, timeout=60))
    )
    asking.start()
    wait_for(planners, "no process plans")
    for planner in planners():
        planner.kill()
    asking.join()
    check_refused(answers[0], 500, "internal_error")
