"""Cancel and expiry: what does not run ends at once, what runs gets its grace, every line ends in a file."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa
from control_fixtures import Desk, jsonl, make_desk, request

from service import intake
from service.control import run_task
from service.core.model import BatchStatus, CohortState, TaskKind, TaskState
from service.settings import Settings
from service.store import batches, control
from service.store.session import Database
from service.store.tables import batch, cohort, job
from service.tokenizing import Keyed, Tokenizing


@pytest.fixture
def desk(settings: Settings, database: Database) -> Desk:
    return make_desk(settings, database)


def put_in_flight(desk: Desk, batch_id: str, custom_ids: list[str]) -> int:
    """As if a worker ran them: a running cohort."""
    with desk.database.transaction() as conn:
        cohort_id = conn.scalar(
            sa.insert(cohort)
            .values(model="tiny", queue="instance.a", sequence=1, n_jobs=1, priority=1, state=CohortState.RUNNING)
            .returning(cohort.c.id)
        )
        conn.execute(
            sa.update(job)
            .where(job.c.batch_id == batch_id, job.c.custom_id.in_(custom_ids))
            .values(cohort_id=cohort_id)
        )
    assert cohort_id is not None
    return cohort_id


def pass_time(desk: Desk, batch_id: str, **clocks: int) -> None:
    """Move clocks of a batch into the past by so many seconds."""
    ago = {name: sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds) for name, seconds in clocks.items()}
    with desk.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(ago))


def expire(desk: Desk, batch_id: str) -> int:
    pass_time(desk, batch_id, expires_at=1)
    with desk.database.transaction() as conn:
        (task_id,) = control.due_expiries(conn)
    with desk.database.transaction() as conn:
        assert control.due_expiries(conn) == []
    return task_id


def codes(lines: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return [(line["custom_id"], line["error"] and line["error"]["code"]) for line in lines]


def test_cancel_keeps_answers_and_ends_the_rest(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(4)))
    desk.answer(batch_id, ["c1"])
    task_id = desk.cancel(batch_id)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, desk.task(task_id).state) == (BatchStatus.CANCELLED, TaskState.DONE)
    assert codes(desk.contents(batch.output_file_id)) == [("c1", None)]
    assert codes(desk.contents(batch.error_file_id)) == [(f"c{n}", "batch_cancelled") for n in (0, 2, 3)]
    progress = desk.progress(batch_id)
    assert (progress.completed, progress.failed, progress.cancelled) == (1, 0, 3)
    assert desk.finalize() == []


def test_cancel_waits_for_lines_in_flight_without_holding_a_thread(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(3)))
    put_in_flight(desk, batch_id, ["c0"])
    task_id = desk.cancel(batch_id)
    run_task(desk.work, task_id)
    assert (desk.batch(batch_id).status, desk.progress(batch_id).cancelled) == (BatchStatus.CANCELLING, 2)
    task = desk.task(task_id)
    assert (task.state, task.failures, task.published_at) == (TaskState.READY, 0, None)
    assert task.not_before > task.created_at
    desk.answer(batch_id, ["c0"])
    desk.make_due(task_id)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.CANCELLED
    assert codes(desk.contents(batch.output_file_id)) == [("c0", None)]


def test_after_the_grace_lines_in_flight_end_too(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(3)))
    put_in_flight(desk, batch_id, ["c0"])
    task_id = desk.cancel(batch_id)
    pass_time(desk, batch_id, cancelling_at=3)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.CANCELLED
    assert len(desk.contents(batch.error_file_id)) == 3


def test_cancelled_while_validating_it_has_no_lines_and_no_files(desk: Desk) -> None:
    batch_id, intake_task = desk.create(jsonl([request("a")]))
    task_id = desk.cancel(batch_id)
    run_task(desk.work, task_id)
    run_task(desk.work, intake_task)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total, batch.error_file_id) == (BatchStatus.CANCELLED, 0, None)
    assert desk.jobs(batch_id) == []
    assert desk.task(intake_task).state == TaskState.DONE


class CancellingTokenizing(Tokenizing):
    """The user cancels while the second chunk is tokenised."""

    def __init__(self, desk: Desk, batch_id: str) -> None:
        super().__init__(desk.work.models)
        self._desk = desk
        self._batch_id = batch_id
        self._chunk = 0
        self.task_id = 0

    def keys(self, requests: Any) -> list[Keyed]:
        self._chunk += 1
        if self._chunk == 2:
            self.task_id = self._desk.cancel(self._batch_id)
        return super().keys(requests)


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_cancelled_in_pass_two_lines_never_taken_in_end_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(intake, "CHUNK_LINES", 10)
    bad = [request("c3"), request("c21")] if policy == "skip" else []  # used again: duplicates
    rows = jsonl([*(request(f"c{n}") for n in range(25)), *bad]) + b"\n\n" + jsonl([request("last")])
    batch_id, task_id = desk.create(rows, on_invalid_line=policy)
    cancelling = CancellingTokenizing(desk, batch_id)
    run_task(dataclasses.replace(desk.work, tokenizing=cancelling), task_id)
    assert len(desk.jobs(batch_id)) == 10
    run_task(desk.work, cancelling.task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total) == (BatchStatus.CANCELLED, 26 + len(bad))
    lines = codes(desk.contents(batch.error_file_id))
    cancelled = [custom_id for custom_id, code in lines if code == "batch_cancelled"]
    assert cancelled == [*(f"c{n}" for n in range(25)), "last"]
    assert [custom_id for custom_id, code in lines if code == "skipped_invalid_line"] == ["c3", "c21"][: len(bad)]
    progress = desk.progress(batch_id)
    assert (progress.cancelled, progress.failed) == (26, len(bad))


def test_expiry_ends_lines_in_flight_too(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(3)))
    put_in_flight(desk, batch_id, ["c0"])
    desk.answer(batch_id, ["c2"])
    task_id = expire(desk, batch_id)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.EXPIRED
    assert codes(desk.contents(batch.output_file_id)) == [("c2", None)]
    assert codes(desk.contents(batch.error_file_id)) == [("c0", "batch_expired"), ("c1", "batch_expired")]
    assert desk.progress(batch_id).expired == 2


def test_while_a_batch_expires_it_is_not_finalised(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a")]))
    task_id = expire(desk, batch_id)
    desk.answer(batch_id, ["a"])
    assert desk.finalize() == []
    run_task(desk.work, task_id)
    assert desk.batch(batch_id).status == BatchStatus.EXPIRED


def test_a_batch_that_expires_in_pass_two_takes_nothing_more_in(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "CHUNK_LINES", 10)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(25)))

    class Expiring(CancellingTokenizing):
        def keys(self, requests: Any) -> list[Keyed]:
            self._chunk += 1
            if self._chunk == 2:
                pass_time(self._desk, self._batch_id, expires_at=1)
            return Tokenizing.keys(self, requests)

    run_task(dataclasses.replace(desk.work, tokenizing=Expiring(desk, batch_id)), task_id)
    assert len(desk.jobs(batch_id)) == 10
    run_task(desk.work, expire(desk, batch_id))
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.EXPIRED
    assert len(desk.contents(batch.error_file_id)) == 25


def test_expired_while_validating_it_has_no_files(desk: Desk) -> None:
    batch_id, intake_task = desk.create(jsonl([request("a")]))
    run_task(desk.work, expire(desk, batch_id))
    run_task(desk.work, intake_task)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total, batch.error_file_id) == (BatchStatus.EXPIRED, 0, None)


def test_a_cancel_during_expiry_ends_cancelled_with_every_line_once(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a"), request("b")]))
    expiry = expire(desk, batch_id)
    cancel = desk.cancel(batch_id)
    run_task(desk.work, expiry)
    run_task(desk.work, cancel)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.CANCELLED
    assert len(desk.contents(batch.error_file_id)) == 2


def test_tasks_of_a_batch_that_moved_on_do_nothing(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a")]))
    desk.answer(batch_id, ["a"])
    (export,) = desk.finalize()
    run_task(desk.work, export)
    before = desk.batch(batch_id)
    for kind in TaskKind:
        if kind is TaskKind.DELETE:  # that one is for batches that have ended
            continue
        task_id = desk.start(kind, batch_id)
        run_task(desk.work, task_id)
        assert desk.task(task_id).state == TaskState.DONE
    assert desk.batch(batch_id) == before
    with desk.database.transaction() as conn:
        assert not batches.request_cancel(conn, batch_id)
