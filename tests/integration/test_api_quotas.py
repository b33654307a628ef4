"""Quotas of a tenant: 429 at a create, token_limit_exceeded at validation, and the command that sets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api  # noqa: F401 - `api` is a fixture
from client_steps import answer_job, complete, run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.control import run_task
from service.core.model import BatchStatus, LineErrorCode, Outcome
from service.settings import Settings
from service.store import quotas
from service.store.quotas import Quota
from service.store.session import Database
from service.store.tables import cohort, job, tenant

WIDE = Quota(lines=10**9, tokens=10**12)
JOB = {"endpoint": "/v1/chat/completions", "body": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}}


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def standing(api: Api, name: str = "default") -> quotas.Standing:
    with api.database.transaction() as conn:
        tenant_id = conn.scalar(sa.select(tenant.c.id).where(tenant.c.name == name))
        assert tenant_id is not None
        return quotas.standing(conn, tenant_id, WIDE)


def allow(api: Api, name: str = "default", **values: int | None) -> None:
    with api.database.transaction() as conn:
        assert quotas.set_tenant(conn, name, values)


def create(api: Api, n: int, client: httpx.Client | None = None, **fields: Any) -> str:
    file_id = api.upload(jsonl(request(f"c{i}", text=f"line {i}") for i in range(n)), client)
    return str(api.create(file_id, client, **fields)["id"])


def tokens_of(desk: Desk, batch_id: str) -> int:
    return sum(row.prompt_tokens for row in desk.jobs(batch_id))


def test_what_is_queued_falls_as_lines_end(api: Api, desk: Desk) -> None:
    first, second = create(api, 10), create(api, 30)
    assert (standing(api).lines, standing(api).tokens) == (0, 0)  # not validated yet
    run_open_tasks(desk)
    sums = [tokens_of(desk, batch_id) for batch_id in (first, second)]
    assert (standing(api).lines, standing(api).tokens) == (40, sum(sums))
    desk.answer(second, [f"c{n}" for n in range(15)])
    assert standing(api).lines == 25
    assert standing(api).tokens == pytest.approx(sums[0] + sums[1] / 2, abs=2)
    complete(desk, first)
    assert standing(api).lines == 15
    desk.cancel(second)
    run_open_tasks(desk)
    assert (standing(api).lines, standing(api).tokens) == (0, 0)


def test_skipped_lines_are_not_queued(api: Api, desk: Desk) -> None:
    data = b"no json\n" * 6 + jsonl(request(f"c{n}") for n in range(4))
    made = api.create(api.upload(data), queue={"on_invalid_line": "skip"})
    run_open_tasks(desk)
    assert (standing(api).lines, standing(api).tokens) == (4, tokens_of(desk, made["id"]))


def test_single_jobs_count_while_no_instance_has_them(api: Api) -> None:
    ids = [api.http.post("/v1/jobs", json=JOB).json()["id"] for _ in range(3)]
    tokens = standing(api).tokens
    assert (standing(api).lines, tokens % 3) == (3, 0)
    answer_job(api.database, ids[0], {})
    with api.database.transaction() as conn:
        made = sa.insert(cohort).values(model="tiny", queue="q", sequence=1, n_jobs=1, priority=3, state="dispatched")
        cohort_id = conn.scalar(made.returning(cohort.c.id))
        conn.execute(sa.update(job).where(job.c.public_id == ids[0]).values(cohort_id=cohort_id))
    api.http.post(f"/v1/jobs/{ids[1]}/cancel")
    assert (standing(api).lines, standing(api).tokens) == (1, tokens // 3)


@pytest.mark.parametrize("limit", ["lines", "tokens"])
def test_a_full_queue_refuses_batches_jobs_and_retries(api: Api, desk: Desk, limit: str) -> None:
    ended = create(api, 2)
    running = create(api, 5)
    run_open_tasks(desk)
    desk.end(ended, Outcome.FAILED, LineErrorCode.ENGINE_CRASH)
    desk.finalize()
    run_open_tasks(desk)
    full = {"max_queued_lines": 5} if limit == "lines" else {"max_queued_tokens": tokens_of(desk, running)}
    allow(api, **full)
    body = api.create_body(api.upload())
    for path, sent in (("/v1/batches", body), ("/v1/jobs", JOB), (f"/v1/batches/{ended}/retry", {})):
        refused = api.http.post(path, json=sent)
        check_refused(refused, 429, "queue_full")
        assert int(refused.headers["retry-after"]) <= 120
        assert refused.headers["x-should-retry"] == "false"
    with pytest.raises(openai.RateLimitError) as told:
        api.sdk().batches.create(**body)
    assert told.value.code == "queue_full"
    assert told.value.request.headers["x-stainless-retry-count"] == "0"
    desk.answer(running, ["c0"])
    assert api.http.post("/v1/batches", json=body).status_code == 200


def test_a_quota_is_the_tenants_own(api: Api, desk: Desk) -> None:
    clients = {name: api.as_tenant(api.make_key(name)) for name in ("full", "free")}
    made = api.create(api.upload(client=clients["full"]), clients["full"])
    run_open_tasks(desk)
    allow(api, "full", max_queued_lines=3)
    for name, status in (("full", 429), ("free", 200)):
        file_id = api.upload(client=clients[name])
        assert clients[name].post("/v1/batches", json=api.create_body(file_id)).status_code == status
    allow(api, "full", max_queued_lines=None)
    assert clients["full"].post("/v1/batches", json=api.create_body(made["input_file_id"])).status_code == 200
    for client in clients.values():
        client.close()


def test_a_refused_create_keeps_no_key(api: Api) -> None:
    body, headers = api.create_body(api.upload()), {"Idempotency-Key": "k"}
    allow(api, max_queued_lines=0)
    check_refused(api.http.post("/v1/batches", json=body, headers=headers), 429, "queue_full")
    allow(api, max_queued_lines=None)
    assert api.http.post("/v1/batches", json=body, headers=headers).status_code == 200


def errors_of(api: Api, batch_id: str) -> list[tuple[str, int | None, str | None]]:
    seen = api.http.get(f"/v1/batches/{batch_id}").json()
    assert seen["status"] == "failed"
    assert seen["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    return [(error["code"], error["line"], error["param"]) for error in seen["errors"]["data"]]


EXCEEDED = [("token_limit_exceeded", None, None)]


def test_a_file_with_more_lines_than_are_left_fails(api: Api, desk: Desk) -> None:
    first = create(api, 3)
    run_open_tasks(desk)
    allow(api, max_queued_lines=6)
    too_large, fits = create(api, 4), create(api, 3)
    run_open_tasks(desk)
    assert errors_of(api, too_large) == EXCEEDED
    assert [desk.batch(batch_id).status for batch_id in (first, fits)] == [BatchStatus.IN_PROGRESS] * 2


def test_a_file_with_more_tokens_than_are_left_fails_to_the_token(api: Api, desk: Desk) -> None:
    first = create(api, 5)
    run_open_tasks(desk)
    tokens = tokens_of(desk, first)
    allow(api, max_queued_tokens=2 * tokens)
    fits = create(api, 5)
    run_open_tasks(desk)
    assert desk.batch(fits).status is BatchStatus.IN_PROGRESS
    desk.cancel(fits)
    run_open_tasks(desk)
    allow(api, max_queued_tokens=2 * tokens - 1)
    too_large = create(api, 5)
    run_open_tasks(desk)
    assert errors_of(api, too_large) == EXCEEDED


def test_the_tokens_of_a_long_file_are_estimated_from_a_sample(api: Api, desk: Desk) -> None:
    data = jsonl(request(f"c{n}", text="word " * (n % 40)) for n in range(3_000))
    first = str(api.create(api.upload(data))["id"])
    run_open_tasks(desk)
    tokens = tokens_of(desk, first)
    desk.cancel(first)
    run_open_tasks(desk)
    for share, status in ((0.95, BatchStatus.FAILED), (1.05, BatchStatus.IN_PROGRESS)):
        allow(api, max_queued_tokens=int(tokens * share))
        batch_id = str(api.create(api.upload(data))["id"])
        run_open_tasks(desk)
        assert desk.batch(batch_id).status is status, share
    assert desk.batch(batch_id).prompt_tokens == tokens


def test_two_files_validated_at_once_do_not_both_take_the_last_room(api: Api, desk: Desk) -> None:
    for _ in range(4):
        made = [create(api, 4) for _ in range(3)]
        allow(api, max_queued_lines=7)
        tasks = open_intakes(api)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda task_id: run_task(desk.work, task_id), tasks))
        states = [desk.batch(batch_id).status for batch_id in made]
        assert sorted(states) == [BatchStatus.FAILED, BatchStatus.FAILED, BatchStatus.IN_PROGRESS]
        begun = made[states.index(BatchStatus.IN_PROGRESS)]
        desk.cancel(begun)
        run_open_tasks(desk)
        allow(api, max_queued_lines=None)


def open_intakes(api: Api) -> list[int]:
    with api.database.transaction() as conn:
        statement = sa.text("select id from control_task where kind = 'intake' and state = 'ready' order by id")
        return list(conn.execute(statement).scalars())


def test_the_settings_hold_for_who_has_no_quota(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, max_queued_tokens=1) as api:
        create(api, 1)
        run_open_tasks(api.desk())
        (made,) = api.http.get("/v1/batches").json()["data"]
        assert errors_of(api, made["id"]) == EXCEEDED
        allow(api, max_queued_tokens=1_000)
        create(api, 1)
        run_open_tasks(api.desk())
        assert api.http.get("/v1/batches").json()["data"][0]["status"] == "in_progress"


# The command

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(api: Api) -> Cli:
    names = {"DATABASE_URL": api.settings.database_url, "BROKER_URL": api.settings.broker_url, "COLUMNS": "160"}
    environment = {**os.environ, **{name: value or "" for name, value in names.items()}}
    environment |= {"TRUNKLINE_STATE": str(api.settings.state_folder), "SECRET_KEY": "test-secret"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trunkline", "tenants", *arguments]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_command_lists_and_sets(api: Api, desk: Desk, cli: Cli) -> None:
    create(api, 3)
    run_open_tasks(desk)
    done = cli("set", "default", "--max-lines", "3", "--max-tokens", "2500", "--weight", "4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    check_refused(api.http.post("/v1/jobs", json=JOB), 429, "queue_full")
    (found,) = [json.loads(line) for line in cli("list", "--json").stdout.splitlines()]
    assert found == {
        "name": "default", "weight": 4, "lines": 3, "max_lines": 3, "has_own_lines": True,
        "tokens": standing(api).tokens, "max_tokens": 2500, "has_own_tokens": True,
    }  # fmt: skip
    assert cli("set", "default", "--max-lines", "default").returncode == 0
    listed = cli("list").stdout
    assert "10,000,000 (default)" in listed
    assert "2,500" in listed
    assert api.http.post("/v1/jobs", json=JOB).status_code == 202


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("set", "default"), "Say what to set"),
        (("set", "nobody", "--weight", "2"), "no tenant 'nobody'"),
        (("set", "default", "--max-lines", "-1"), "whole number"),
        (("set", "default", "--max-tokens", "many"), "whole number"),
    ],
)
def test_wrong_use_is_one_sentence(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
