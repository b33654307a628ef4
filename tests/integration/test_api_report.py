"""`GET /v1/batches/{id}/report` over the real API and real rows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused  # noqa: F401 - `api` is a fixture
from control_fixtures import Desk, jsonl, request
from seeds import add_boot

from service.core.model import LineErrorCode, MissCause, Outcome
from service.store import results
from service.store.tables import batch, batch_progress, instance_boot, job, job_result
from trunkline import AsyncClient, Batch, Client, NotFoundError, Report

FIELDS = [
    "object", "lines", "top_errors", "tokens", "hit_rate", "bound", "misses", "per_instance", "started_at",
    "finished_at", "slowest",
]  # fmt: skip


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def record(desk: Desk, batch_id: str, custom_id: str, **fields: Any) -> None:
    """A result row as a worker would have written it: 100 prompt tokens, 60 from the cache, 500 ms."""
    row: dict[str, Any] = {
        "outcome": Outcome.SUCCEEDED,
        "status_code": 200,
        "response": b"{}",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "predicted_cached_tokens": 80,
        "completion_tokens": 7,
        "reasoning_tokens": 2,
        "run_ms": 500,
        **fields,
    }
    with desk.database.transaction() as conn:
        job_id = conn.scalar(sa.select(job.c.id).where(job.c.batch_id == batch_id, job.c.custom_id == custom_id))
        row |= {"job_id": job_id, "batch_id": batch_id}
        conn.execute(sa.insert(job_result).values(**row, started_at=sa.func.now()))
        results.add_progress(conn, [row])


def report_of(api: Api, batch_id: str) -> dict[str, Any]:
    answer = api.http.get(f"/v1/batches/{batch_id}/report")
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    assert list(report) == FIELDS
    assert report["object"] == "report"
    return report


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "code": 400}}).encode()


def test_everything_that_a_report_says(api: Api, desk: Desk) -> None:
    rows = jsonl(request(f"c{n}", text="the same words " * 50) for n in range(6)) + b"{\n"
    batch_id = desk.take_in(rows, on_invalid_line="skip")
    with api.database.transaction() as conn:
        one, two = add_boot(conn, "one"), add_boot(conn, "two", pid=2)
    record(desk, batch_id, "c0", instance_boot_id=one, run_ms=900, miss_cause=MissCause.EVICTED)
    record(desk, batch_id, "c1", instance_boot_id=two, cached_tokens=0, miss_cause=MissCause.FIRST_OF_GROUP)
    record(desk, batch_id, "c2", instance_boot_id=two, cached_tokens=None)  # the engine does not say
    for name, tokens in (("c3", 5000), ("c4", 6000)):
        answer = refusal(f"the context is 4096 tokens, {tokens} were asked for")
        unknown = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"))
        failed = {"outcome": Outcome.FAILED, "status_code": 400, "response": answer, **unknown}
        record(desk, batch_id, name, instance_boot_id=one, **failed)
    report = report_of(api, batch_id)
    assert report["lines"] == {
        "total": 7, "completed": 3, "failed": 3, "skipped": 1, "cancelled": 0, "expired": 0, "unfinished": 1,
    }  # fmt: skip
    assert report["tokens"] == {
        "prompt_tokens": 300, "cached_tokens": 60, "predicted_cached_tokens": 400, "completion_tokens": 21,
        "reasoning_tokens": 6, "lines_unknown": 3,
    }  # fmt: skip
    assert report["hit_rate"] == pytest.approx(60 / 200)  # of the lines whose cached tokens are known
    assert report["top_errors"] == [
        {"code": None, "message": "the context is 4096 tokens, 5000 were asked for", "count": 2},
        {"code": "skipped_invalid_line", "message": report["top_errors"][1]["message"], "count": 1},
    ]
    assert report["top_errors"][1]["message"].startswith("invalid_json_line: ")
    assert report["misses"] == {
        "first_of_group": {"jobs": 1, "prompt_tokens": 100, "computed_tokens": 100, "short_tokens": 80},
        "evicted": {"jobs": 1, "prompt_tokens": 100, "computed_tokens": 40, "short_tokens": 20},
    }
    assert report["per_instance"] == [
        {
            "name": "one", "jobs": 3, "prompt_tokens": 100, "cached_tokens": 60, "hit_rate": 0.6, "run_seconds": 1.9,
        },
        {
            "name": "two", "jobs": 2, "prompt_tokens": 100, "cached_tokens": 0, "hit_rate": 0.0, "run_seconds": 1.0,
        },
    ]  # fmt: skip
    assert report["slowest"][0] == {"line": 1, "custom_id": "c0", "run_ms": 900, "instance": "one"}
    assert [row["line"] for row in report["slowest"]] == [1, 2, 3, 4, 5]
    stored = desk.batch(batch_id)
    planned = sum(row.prompt_tokens for row in desk.jobs(batch_id))
    assert report["bound"] == pytest.approx((stored.bound_tokens or 0) / planned)
    assert report["bound"] > 0
    assert report["started_at"] is not None
    assert report["finished_at"] is None  # it still runs


def test_a_report_at_the_end_says_when_and_the_batch_says_the_same_counts(api: Api, desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(3)))
    with api.database.transaction() as conn:
        boot = add_boot(conn)
    record(desk, batch_id, "c0", instance_boot_id=boot)
    crashed = {"outcome": Outcome.FAILED, "status_code": None, "response": None, "error_code": "engine_crash"}
    record(desk, batch_id, "c1", instance_boot_id=boot, **crashed)
    desk.end(batch_id, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED)
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(status="cancelled"))
    report = report_of(api, batch_id)
    assert report["started_at"] <= report["finished_at"]
    assert report["lines"]["unfinished"] == 0
    assert report["top_errors"] == [
        {"code": "engine_crash", "message": "The engine died each time it worked on this line.", "count": 1}
    ]  # cancelled lines are in `lines`; nothing went wrong with them
    found = api.sdk().batches.retrieve(batch_id)
    assert found.request_counts is not None
    assert found.request_counts.completed == report["lines"]["completed"] == 1
    assert found.request_counts.failed == report["lines"]["failed"] == 1


def test_a_batch_that_has_not_begun_reports_nothing(api: Api, desk: Desk) -> None:
    for status in ("validating", "failed"):
        batch_id, _ = desk.create(jsonl([request("a")]))
        with api.database.transaction() as conn:
            conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(status=status))
        report = report_of(api, batch_id)
        assert set(report["lines"].values()) == {0}
        assert set(report["tokens"].values()) == {0}
        empty = ("top_errors", "misses", "per_instance", "slowest", "hit_rate", "bound", "started_at", "finished_at")
        assert not any(report[name] for name in empty)


def test_who_may_not_see_a_report(api: Api, desk: Desk) -> None:
    batch_id, _ = desk.create(jsonl([request("a")]))
    other = api.as_tenant(api.make_key("other"))
    own = api.as_tenant(api.make_key("default"))
    assert own.get(f"/v1/batches/{batch_id}/report").status_code == 200
    check_refused(other.get(f"/v1/batches/{batch_id}/report"), 404, "not_found", "batch_id")
    for wrong in ("batch_0", f"batch_{'0' * 32}", "%00"):
        check_refused(own.get(f"/v1/batches/{wrong}/report"), 404, "not_found", "batch_id")


def test_other_batches_are_not_in_a_report(api: Api, desk: Desk) -> None:
    mine, other = (desk.take_in(jsonl([request("a")])) for _ in range(2))
    with api.database.transaction() as conn:
        boot = add_boot(conn)
    record(desk, other, "a", instance_boot_id=boot, miss_cause=MissCause.EVICTED)
    report = report_of(api, mine)
    assert (report["per_instance"], report["misses"], report["slowest"]) == ([], {}, [])


def test_both_clients_and_the_command_line_show_it(api: Api, desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(2)))
    with api.database.transaction() as conn:
        boot = add_boot(conn)
    record(desk, batch_id, "c0", instance_boot_id=boot, miss_cause=MissCause.EVICTED)
    failed = {"outcome": Outcome.FAILED, "status_code": 400, "response": refusal("no \x1b[31mcolour")}
    record(desk, batch_id, "c1", instance_boot_id=boot, **failed)
    with Client(f"{api.url}/v1") as client:
        found = client.report(batch_id)
        assert found.as_dict() == report_of(api, batch_id)
        with pytest.raises(NotFoundError):
            client.report(f"batch_{'0' * 32}")

    async def ask() -> Report:
        async with AsyncClient(f"{api.url}/v1") as client:
            return await client.report(client_batch)

    client_batch = client_of(api, batch_id)
    assert asyncio.run(ask()) == found
    assert (found.lines.total, found.misses["evicted"].computed_tokens, found.slowest[0].line) == (2, 40, 1)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "trunkline", "report", *arguments, "--url", f"{api.url}/v1"]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)

    shown = run(batch_id)
    assert shown.returncode == 0, shown.stderr
    for part in ("2: 1 completed, 1 failed", "60.0%", "evicted", "one", "c0", "colour"):
        assert part in shown.stdout
    assert "\x1b" not in shown.stdout
    assert json.loads(run(batch_id, "--json").stdout) == found.as_dict()
    assert run("batch_0").returncode == 1


def client_of(api: Api, batch_id: str) -> Batch:
    with Client(f"{api.url}/v1") as client:
        return client.get_batch(batch_id)


LINES = 50_000


def fill(desk: Desk, lines: int) -> str:
    """A batch of so many lines, half of them refused with messages that differ, among others of the same tenant."""
    batch_id = desk.take_in(jsonl([request("a")]))
    with desk.database.transaction() as conn:
        boot = conn.scalar(sa.select(instance_boot.c.id)) or add_boot(conn)
        copy = [column for column in job.c if column.name not in ("id", "line_no", "custom_id")]
        numbers = sa.select(sa.func.generate_series(2, lines).label("n")).subquery()
        conn.execute(
            sa.insert(job).from_select(
                [*(column.name for column in copy), "line_no", "custom_id"],
                sa.select(*copy, numbers.c.n, sa.func.concat("c", numbers.c.n))
                .join(numbers, sa.true())
                .where(job.c.batch_id == batch_id),
            )
        )
        conn.execute(
            sa.text(
                "insert into job_result (job_id, batch_id, instance_boot_id, outcome, status_code, response,"
                " prompt_tokens, cached_tokens, predicted_cached_tokens, completion_tokens, miss_cause, run_ms,"
                " started_at) select id, batch_id, :boot, case when id % 2 = 0 then 'failed' else 'succeeded' end,"
                " case when id % 2 = 0 then 400 else 200 end, convert_to(case when id % 2 = 0 then"
                " '{\"error\":{\"message\":\"asked for ' || id || ' tokens\"}}' else repeat('x', 1000) end, 'UTF8'),"
                " 900, 600, 700, 10, 'evicted', id % 1000, now() from job where batch_id = :batch"
            ),
            {"boot": boot, "batch": batch_id},
        )
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(total=lines))
        counts = {"completed": lines // 2, "failed": lines // 2}
        conn.execute(sa.insert(batch_progress).values(batch_id=batch_id, **counts))
    return batch_id


def test_a_report_of_50000_lines_takes_less_than_a_second(api: Api, desk: Desk) -> None:
    batch_id = fill(desk, LINES)
    fill(desk, 1_000)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        report = report_of(api, batch_id)
        seconds.append(time.monotonic() - started)
    assert report["per_instance"][0]["jobs"] == LINES
    assert [(error["count"]) for error in report["top_errors"]] == [LINES // 2]
    assert min(seconds) < 1.0, seconds
