"""`kill -9` of a worker in the middle of the demo's batch, on two real engines: every line answered, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from stack import Stack

from service.demo_files import MODEL, model_folder_of, write_fleet
from service.settings import Settings
from service.store.session import Database
from service.store.tables import job_result

pytestmark = pytest.mark.engine
SUPPORT = Path(__file__).parents[2] / "examples" / "support.jsonl"
ENGINE_GONE_SECONDS = 5


@pytest.fixture
def stack(settings: Settings, database: Database, broker_url: str, model_folder: Path) -> Iterator[Stack]:
    folder = model_folder_of(settings)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model_folder)
    defaults = Settings(state_folder=settings.state_folder)
    leases = ("lease_seconds", "heartbeat_seconds", "stale_boot_seconds", "drain_seconds", "republish_seconds")
    settings = replace(settings, **{name: getattr(defaults, name) for name in leases})
    write_fleet(settings)
    stack = Stack(settings, model=MODEL)
    yield stack
    assert stack.stop() == []


@pytest.mark.timeout(900)
def test_a_killed_worker_leaves_no_engine_and_no_line_behind(stack: Stack, database: Database) -> None:
    stack.start(instances=2, seconds=400)
    sdk = stack.sdk()
    with SUPPORT.open("rb") as file:
        uploaded = sdk.files.create(file=file, purpose="batch")
    batch_id = sdk.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id
    stack.wait(lambda: stack.completed(batch_id) > 20, 200)

    worker = psutil.Process(stack.supervisor.pids()["worker-cpu0"])
    engine = worker.children(recursive=True)
    assert len(engine) >= 3  # keeper, api_server, EngineCore, its worker
    worker.kill()
    _, alive = psutil.wait_procs(engine, timeout=ENGINE_GONE_SECONDS)
    assert alive == []

    stack.wait(lambda: sdk.batches.retrieve(batch_id).status == "completed", 400)
    batch = sdk.batches.retrieve(batch_id)
    assert batch.output_file_id
    answered = [json.loads(line)["custom_id"] for line in sdk.files.content(batch.output_file_id).text.splitlines()]
    asked = [json.loads(line)["custom_id"] for line in SUPPORT.read_text().splitlines()]
    assert sorted(answered) == sorted(asked)
    with database.transaction() as conn:
        attempts = conn.execute(sa.select(job_result.c.attempt, sa.func.count()).group_by(job_result.c.attempt)).all()
    assert sum(row[1] for row in attempts) == len(asked)
    assert {row[0] for row in attempts} >= {1, 2}
    stack.wait(lambda: stack.ready_instances() == 2, 200)  # and the engine is back under a new boot
