"""Control tasks as rows: leases, fences, backoff, hints; and the Celery worker that runs them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from control_fixtures import Desk, jsonl, make_desk, request
from seeds import add_batch

from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.control import run_task
from service.core.model import BatchStatus, TaskKind, TaskState
from service.errors import FenceLost
from service.settings import Settings, child_environment
from service.store import batches, control
from service.store.control import MAX_FAILURES, ControlTask
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import batch_progress


@pytest.fixture
def desk(settings: Settings, database: Database) -> Desk:
    return make_desk(settings, database)


def create(database: Database, subject: str = "batch_x") -> int:
    with database.transaction() as conn:
        return control.create_task(conn, TaskKind.EXPORT, subject)


def claim(database: Database, task_id: int) -> ControlTask | None:
    with database.transaction() as conn:
        return control.claim_task(conn, task_id, 30.0)


def held(database: Database, task_id: int) -> ControlTask:
    task = claim(database, task_id)
    assert task is not None
    return task


def unpublished(database: Database) -> list[int]:
    with database.transaction() as conn:
        return control.unpublished_tasks(conn, 5.0)


def test_one_open_task_of_a_kind_and_subject(database: Database) -> None:
    first = create(database)
    assert create(database) == first
    assert create(database, "batch_y") != first
    task = held(database, first)
    assert create(database) == first
    with database.transaction() as conn:
        control.finish_task(conn, task)
    assert create(database) != first


def test_a_claim_is_exclusive_until_its_lease_ends(database: Database, desk: Desk) -> None:
    task_id = create(database)
    first = held(database, task_id)
    assert claim(database, task_id) is None
    desk.expire_lease(task_id)
    second = held(database, task_id)
    assert (first.attempt, second.attempt, second.failures) == (1, 2, 1)
    for stale_write in (control.finish_task, lambda conn, task: control.renew_task(conn, task, 30.0)):
        with pytest.raises(FenceLost), database.transaction() as conn:
            stale_write(conn, first)
    with database.transaction() as conn:
        control.renew_task(conn, second, 30.0)
        control.finish_task(conn, second)


def test_hints_are_due_until_sent_and_again_when_stale(database: Database, desk: Desk) -> None:
    task_id = create(database)
    assert unpublished(database) == [task_id]
    with database.transaction() as conn:
        control.mark_published(conn, [task_id])
    assert unpublished(database) == []
    with database.transaction() as conn:
        assert control.unpublished_tasks(conn, 0.0) == [task_id]
    task = held(database, task_id)
    with database.transaction() as conn:
        assert control.unpublished_tasks(conn, 0.0) == []
    desk.expire_lease(task_id)
    with database.transaction() as conn:
        assert control.unpublished_tasks(conn, 0.0) == [task_id]
        with pytest.raises(FenceLost):
            control.reschedule_task(conn, ControlTask(**{**_fields(task), "attempt": 7}), 60.0)
        control.reschedule_task(conn, task, 60.0)
    assert unpublished(database) == []
    assert claim(database, task_id) is None
    desk.make_due(task_id)
    assert unpublished(database) == [task_id]


def _fields(task: ControlTask) -> dict[str, object]:
    return {name: getattr(task, name) for name in ControlTask.__dataclass_fields__}


def test_hints_that_nobody_takes_come_ever_more_seldom(database: Database) -> None:
    """A control worker that stands still finds a short queue when it goes on."""
    (task_id, sent) = (create(database), 0)
    with database.transaction() as conn:
        for _ in range(600):  # looks, one a second
            if control.unpublished_tasks(conn, 5.0):
                control.mark_published(conn, [task_id])
                sent += 1
            second = sa.text("interval '1 second'")
            times = {name: control_task.c[name] - second for name in ("created_at", "not_before", "published_at")}
            conn.execute(sa.update(control_task).values(times))
    assert 10 <= sent <= 15  # 120 without the doubling


def test_who_sends_the_hint_himself_is_not_overtaken_by_the_sweeper(database: Database) -> None:
    with database.transaction() as conn:
        task_id = control.create_task(conn, TaskKind.INTAKE, "batch_x", is_hinted=True)
        assert control.unpublished_tasks(conn, 5.0) == []
        assert control.unpublished_tasks(conn, 0.0) == []  # not later than now
    with database.transaction() as conn:
        assert control.unpublished_tasks(conn, 0.0) == [task_id]


def test_a_hint_that_comes_too_late_does_other_work(database: Database, desk: Desk) -> None:
    done, waiting = create(database), create(database, "batch_y")
    with database.transaction() as conn:
        control.finish_task(conn, control.claim_task(conn, done, 30.0) or pytest.fail("not claimed"))
        webhook = control.create_task(conn, TaskKind.WEBHOOK, "evt_x")
    run_task(desk.work, done)
    with database.transaction() as conn:
        states = dict(conn.execute(sa.select(control_task.c.id, control_task.c.state)).all())
    assert states[waiting] == TaskState.DONE  # there is no such batch, so nothing was to be done
    assert states[webhook] == TaskState.READY


def test_failures_back_off_and_end_dead(database: Database, desk: Desk) -> None:
    task_id = create(database)
    delays = []
    for _ in range(MAX_FAILURES - 1):
        desk.make_due(task_id)
        task = held(database, task_id)
        with database.transaction() as conn:
            assert control.fail_task(conn, task, "boom") == TaskState.READY
            delays.append(
                conn.scalar(
                    sa.select(sa.extract("epoch", control_task.c.not_before - sa.func.now())).where(
                        control_task.c.id == task_id
                    )
                )
            )
    assert [float(delay) for delay in delays if delay is not None] == [2.0**n for n in range(1, MAX_FAILURES)]
    desk.make_due(task_id)
    task = held(database, task_id)
    with database.transaction() as conn:
        assert control.fail_task(conn, task, "boom") == TaskState.DEAD
    assert claim(database, task_id) is None


def test_a_task_that_kills_its_worker_each_time_fails_its_batch(desk: Desk) -> None:
    batch_id, task_id = desk.create(jsonl([request("a")]))
    held(desk.database, task_id)
    for _ in range(MAX_FAILURES - 1):
        desk.expire_lease(task_id)
        held(desk.database, task_id)
    desk.expire_lease(task_id)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, desk.task(task_id).state) == (BatchStatus.FAILED, TaskState.DEAD)
    assert batch.errors is not None
    assert [error["code"] for error in batch.errors] == ["internal_error"]


def test_progress_is_folded_without_changing_a_sum(desk: Desk) -> None:
    with desk.database.transaction() as conn:
        for batch_id in ("batch_x", "batch_y"):
            add_batch(conn, desk.tenant_id, batch_id)
        for n in range(10):
            batches.add_progress(conn, "batch_x", batches.Progress(completed=1, prompt_tokens=n))
        batches.add_progress(conn, "batch_y", batches.Progress(failed=2))
    before = desk.progress("batch_x")
    with desk.database.transaction() as conn:
        assert control.compact_progress(conn, above_rows=5) == 1
        assert control.compact_progress(conn, above_rows=5) == 0
        assert conn.scalar(sa.select(sa.func.count()).select_from(batch_progress)) == 2
    assert (desk.progress("batch_x"), before.prompt_tokens) == (before, 45)
    assert desk.progress("batch_y").failed == 2


@pytest.fixture
def worker(settings: Settings, broker_url: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real control worker over the real broker."""
    settings.models_path.parent.mkdir(parents=True, exist_ok=True)
    settings.models_path.write_text("[models.tiny]\n")
    command = [sys.executable, "-m", "celery", "-A", "service.celery_app", "worker"]
    options = ["-Q", CONTROL_QUEUE, "-P", "threads", "-c", "2", "-n", "control@%h", "--loglevel", "INFO"]
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options], env=child_environment(settings), stdout=log, stderr=log, cwd=tmp_path
        )
    yield process
    process.terminate()
    assert process.wait(30) == 0


def test_a_celery_worker_does_what_it_is_told_by_id(
    desk: Desk, broker_url: str, settings: Settings, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    publisher = Publisher(make_app(settings, broker_url, queue=CONTROL_QUEUE))
    batch_id, task_id = desk.create(jsonl(request(f"c{n}", text="secret words") for n in range(3)))
    publisher.control(task_id)
    wait_for(desk, task_id, worker)
    assert desk.batch(batch_id).intake_done
    desk.answer(batch_id, ["c0", "c1", "c2"])
    (export,) = desk.finalize()
    publisher.control(export)
    wait_for(desk, export, worker)
    assert len(desk.contents(desk.batch(batch_id).output_file_id)) == 3
    assert "secret" not in (tmp_path / "worker.log").read_text()


def wait_for(desk: Desk, task_id: int, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while desk.task(task_id).state != TaskState.DONE:
        assert worker.poll() is None
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)  # another process works: there is nothing to wake us


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}, "DATABASE_URL"),
        ({"MODELS": "/nowhere/models.toml"}, "MODELS"),
        ({"TRUNKLINE_COLOUR": "red"}, "TRUNKLINE_COLOUR"),
    ],
)
def test_a_wrong_setting_stops_the_worker_with_one_sentence(
    settings: Settings, database: Database, broker_url: str, changes: dict[str, str], named: str
) -> None:
    command = [sys.executable, "-m", "celery", "-A", "service.celery_app", "worker", "-Q", CONTROL_QUEUE]
    done = subprocess.run(
        [*command, "-P", "threads"],
        env=child_environment(settings, changes),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
