"""The main job with every process real and the engines simulated: SDK to output file, and kills on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
import redis
import sqlalchemy as sa
from openai.types import Batch
from stack import GROUPS, MARKER, Stack, write_requests
from worker_processes import write_fleet

from service.settings import Settings
from service.store.session import Database
from service.store.tables import job, job_result

TERMINAL = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture
def start(settings: Settings, database: Database, broker_url: str) -> Iterator[Callable[..., Stack]]:
    """Starts a stack of two instances at a given engine speed; afterwards nothing of it may be left."""
    stacks: list[Stack] = []

    def begin(speed: float, *, is_patient: bool = False) -> Stack:
        write_fleet(settings, speed=speed, names=("one", "two"))
        stacks.append(Stack(default_leases(settings) if is_patient else settings))
        stacks[-1].start(instances=2)
        return stacks[-1]

    yield begin
    for stack in stacks:
        assert stack.stop() == []


def default_leases(settings: Settings) -> Settings:
    """For a test in which nobody dies: however slow the machine, no boot is taken for dead."""
    names = ("lease_seconds", "heartbeat_seconds", "stale_boot_seconds", "republish_seconds", "task_lease_seconds")
    defaults = Settings(state_folder=settings.state_folder)
    return replace(settings, **{name: getattr(defaults, name) for name in names})


def submit(sdk: openai.OpenAI, path: Path) -> Batch:
    with path.open("rb") as file:
        uploaded = sdk.files.create(file=file, purpose="batch")
    return sdk.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "1"}
    )


def finish(stack: Stack, batch_id: str, seconds: float = 90) -> Batch:
    sdk = stack.sdk()
    stack.wait(lambda: sdk.batches.retrieve(batch_id).status in TERMINAL, seconds)
    return sdk.batches.retrieve(batch_id)


def answers(sdk: openai.OpenAI, file_id: str | None) -> list[dict[str, object]]:
    return [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()] if file_id else []


def test_the_main_job(start: Callable[..., Stack], database: Database, broker_url: str, tmp_path: Path) -> None:
    stack = start(5.0, is_patient=True)
    ids = write_requests(tmp_path / "in.jsonl", 120)
    sdk = stack.sdk()
    batch = finish(stack, submit(sdk, tmp_path / "in.jsonl").id)

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (120, 120)
    lines = answers(sdk, batch.output_file_id)
    assert sorted(str(line["custom_id"]) for line in lines) == sorted(ids)
    assert batch.error_file_id is None
    with database.transaction() as conn:
        rows = conn.execute(sa.select(job_result).join(job, job.c.id == job_result.c.job_id)).all()
    assert len(rows) == 120
    assert {row.instance_boot_id for row in rows} == {1, 2}
    assert all(row.prompt_tokens and row.completion_tokens and row.cohort_id for row in rows)
    assert all(row.attempt == 1 for row in rows)
    predicted, cached = (
        sum(getattr(row, name) for row in rows) for name in ("predicted_cached_tokens", "cached_tokens")
    )
    assert abs(cached - predicted) <= 0.02 * predicted
    cold = [row for row in rows if not row.cached_tokens]
    # One per group, one more where the cut falls into a group, and one for each steal that parts a group at the end.
    assert GROUPS <= len(cold) <= GROUPS + 4
    assert {row.miss_cause for row in cold} <= {"first_of_group", "other_instance"}
    assert MARKER not in stack.logs()
    client = redis.Redis.from_url(broker_url)
    assert all(MARKER.encode() not in (client.dump(key) or b"") for key in client.scan_iter())


def test_a_killed_worker_in_mid_batch_costs_no_line(
    start: Callable[[float], Stack], database: Database, tmp_path: Path
) -> None:
    stack = start(0.5)
    ids = write_requests(tmp_path / "in.jsonl", 160)
    sdk = stack.sdk()
    batch_id = submit(sdk, tmp_path / "in.jsonl").id
    stack.wait(lambda: stack.completed(batch_id) > 20, 60)
    stack.kill("worker-one")
    batch = finish(stack, batch_id)
    assert batch.status == "completed"
    lines = answers(sdk, batch.output_file_id)
    assert sorted(str(line["custom_id"]) for line in lines) == sorted(ids)
    stack.wait(lambda: stack.ready_instances() == 2, 60)
    with database.transaction() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(job_result)).scalar_one() == 160


def test_killed_dispatcher_control_and_an_emptied_broker_cost_no_line(
    start: Callable[[float], Stack], broker_url: str, tmp_path: Path
) -> None:
    stack = start(0.5)
    write_requests(tmp_path / "in.jsonl", 160)
    sdk = stack.sdk()
    batch_id = submit(sdk, tmp_path / "in.jsonl").id
    stack.kill("control")
    stack.wait(lambda: stack.completed(batch_id) > 20, 60)
    stack.kill("dispatcher")
    redis.Redis.from_url(broker_url).flushall()
    batch = finish(stack, batch_id)
    assert batch.status == "completed"
    assert len(answers(sdk, batch.output_file_id)) == 160


def test_a_killed_broker_ends_no_worker(settings: Settings, database: Database, tmp_path: Path) -> None:
    settings = replace(settings, broker_url=None)  # a Valkey of this stack's own, which its servers process restarts
    write_fleet(settings, speed=0.5, names=("one", "two"))
    stack = Stack(settings)
    try:
        stack.start(instances=2)
        write_requests(tmp_path / "in.jsonl", 160)
        batch_id = submit(stack.sdk(), tmp_path / "in.jsonl").id
        stack.wait(lambda: stack.completed(batch_id) > 20, 60)
        workers = {name: pid for name, pid in stack.supervisor.pids().items() if name.startswith("worker")}
        servers = psutil.Process(stack.supervisor.pids()["servers"])
        (valkey,) = [child for child in servers.children(recursive=True) if "valkey" in child.name()]
        valkey.kill()
        batch = finish(stack, batch_id)
        assert batch.status == "completed"
        assert len(answers(stack.sdk(), batch.output_file_id)) == 160
        assert {name: stack.supervisor.pids()[name] for name in workers} == workers
    finally:
        assert stack.stop() == []


def test_a_cancel_keeps_what_was_answered_and_accounts_for_the_rest(
    start: Callable[[float], Stack], tmp_path: Path
) -> None:
    stack = start(0.2)
    ids = write_requests(tmp_path / "in.jsonl", 160)
    sdk = stack.sdk()
    batch_id = submit(sdk, tmp_path / "in.jsonl").id
    stack.wait(lambda: stack.completed(batch_id) > 10, 60)
    assert sdk.batches.cancel(batch_id).status == "cancelling"
    batch = finish(stack, batch_id)
    assert batch.status == "cancelled"
    good, bad = answers(sdk, batch.output_file_id), answers(sdk, batch.error_file_id)
    assert len(good) > 10
    assert bad
    assert sorted(str(line["custom_id"]) for line in good + bad) == sorted(ids)
    assert {line["error"]["code"] for line in bad} == {"batch_cancelled"}  # type: ignore[index]


def test_bad_input_fails_a_batch_and_the_next_one_works(start: Callable[[float], Stack], tmp_path: Path) -> None:
    stack = start(5.0)
    sdk = stack.sdk()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"custom_id": "a"\n\n{"custom_id": "b", "method": "POST"}\n')
    batch = finish(stack, submit(sdk, bad).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    found = [(error.code, error.line, error.param) for error in batch.errors.data or []]
    assert found == [("invalid_json_line", 1, None), ("missing_required_parameter", 3, "url")]
    write_requests(tmp_path / "in.jsonl", 12)
    assert finish(stack, submit(sdk, tmp_path / "in.jsonl").id).status == "completed"


def test_a_single_job_is_answered_while_a_batch_runs(start: Callable[[float], Stack], tmp_path: Path) -> None:
    stack = start(0.5)
    write_requests(tmp_path / "in.jsonl", 160)
    batch_id = submit(stack.sdk(), tmp_path / "in.jsonl").id
    stack.wait(lambda: stack.completed(batch_id) > 10, 60)
    body = json.loads((tmp_path / "in.jsonl").read_text().splitlines()[0])["body"]
    created = stack.http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    assert created.status_code == 202
    job_object = stack.http.get(f"/v1/jobs/{created.json()['id']}", params={"wait": 20}).json()
    assert job_object["status"] == "succeeded"
    assert job_object["response"]["body"]["usage"]["prompt_tokens"] > 0
    assert stack.completed(batch_id) < 160  # it did not wait for the batch
    assert finish(stack, batch_id).status == "completed"


def test_flower_shows_each_worker_with_its_queue_and_each_cohort(
    start: Callable[[float], Stack], tmp_path: Path
) -> None:
    stack = start(5.0)
    write_requests(tmp_path / "in.jsonl", 24)
    assert finish(stack, submit(stack.sdk(), tmp_path / "in.jsonl").id).status == "completed"
    flower = f"http://127.0.0.1:{stack.settings.flower_port}"

    def shown() -> bool:
        page = stack.http.get(f"{flower}/workers").text
        return "one@" in page and "two@" in page

    stack.wait(shown, 30)
    tasks = stack.http.post(
        f"{flower}/tasks/datatable",
        data={
            "draw": "1",
            "start": "0",
            "length": "50",
            "search[value]": "",
            "order[0][column]": "0",
            "columns[0][data]": "name",
            "order[0][dir]": "asc",
        },
    ).json()
    assert {row["name"] for row in tasks["data"]} >= {"cohort"}
