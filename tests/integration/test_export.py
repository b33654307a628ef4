"""Export: every line in exactly one file, and nothing twice when it is repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from control_fixtures import Desk, jsonl, make_desk, request

from service.control import run_task
from service.core.model import BatchStatus, LineErrorCode, Outcome, TaskKind, TaskState
from service.errors import StoreFailed
from service.settings import Settings
from service.store import control
from service.store.blobs import Blob, Blobs, BlobWriter
from service.store.control import MAX_FAILURES
from service.store.session import Database
from service.store.tables import batch_progress, file


@pytest.fixture
def desk(settings: Settings, database: Database) -> Desk:
    return make_desk(settings, database)


def blobs_below(settings: Settings, folder: str) -> list[str]:
    root = Path(settings.store_location) / folder
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def rows_of_files(desk: Desk) -> int:
    with desk.database.transaction() as conn:
        return conn.scalar(sa.select(sa.func.count()).where(file.c.purpose == "batch_output")) or 0


def test_answers_and_errors_go_to_their_files(desk: Desk, settings: Settings) -> None:
    rows = jsonl(request(f"c{n}\u2028é") for n in range(4)) + b"{\n"
    batch_id = desk.take_in(rows, on_invalid_line="skip", output_expires_after_seconds=3600)
    names = [job.custom_id for job in desk.jobs(batch_id)]
    desk.answer(batch_id, names[:2])
    desk.answer(batch_id, names[2:3], status_code=400)
    assert desk.finalize() == []
    desk.end(batch_id, Outcome.FAILED, LineErrorCode.ENGINE_CRASH)
    (task_id,) = desk.finalize()
    assert desk.batch(batch_id).status == BatchStatus.FINALIZING
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, desk.task(task_id).state) == (BatchStatus.COMPLETED, TaskState.DONE)
    output, errors = desk.contents(batch.output_file_id), desk.contents(batch.error_file_id)
    assert [line["custom_id"] for line in output] == names[:2]
    assert output[0]["id"].startswith("batch_req_")
    assert output[0]["error"] is None
    assert output[0]["response"]["status_code"] == 200
    assert output[0]["response"]["body"]["answer"] == names[0]
    assert [line["custom_id"] for line in errors] == [*names[2:], None]
    assert errors[0]["response"]["status_code"] == 400
    assert "error" in errors[0]["response"]["body"]
    assert [line["error"] and line["error"]["code"] for line in errors] == [
        None,
        "engine_crash",
        "skipped_invalid_line",
    ]
    assert errors[2]["error"]["message"].startswith("invalid_json_line")
    assert len({line["id"] for line in output + errors}) == 5
    assert blobs_below(settings, "output") == ["error.jsonl", "output.jsonl"]
    with desk.database.transaction() as conn:
        expiries = conn.execute(
            sa.select(file.c.expires_at - file.c.created_at).where(file.c.purpose == "batch_output")
        )
        assert {row[0].total_seconds() for row in expiries} == {3600}


def test_a_file_without_lines_is_not_there(desk: Desk, settings: Settings) -> None:
    batch_id = desk.take_in(jsonl([request("a")]))
    desk.answer(batch_id, ["a"], status_code=500)
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.output_file_id) == (BatchStatus.COMPLETED, None)
    assert len(desk.contents(batch.error_file_id)) == 1
    assert blobs_below(settings, "output") == ["error.jsonl"]


def test_a_batch_of_skipped_lines_alone_completes(desk: Desk) -> None:
    batch_id = desk.take_in(b"{\n[]\n", on_invalid_line="skip")
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    assert [line["error"]["code"] for line in desk.contents(desk.batch(batch_id).error_file_id)] == [
        "skipped_invalid_line",
        "skipped_invalid_line",
    ]


class DyingWriter(BlobWriter):
    """Publishes, and is then killed: its transaction never commits."""

    def publish(self) -> Blob:
        super().publish()
        raise KeyboardInterrupt


class DyingBlobs(Blobs):
    def writer(self, path: str) -> BlobWriter:
        return DyingWriter(self._files, path=path, full=self._full(path), sync=True)


def test_killed_between_rename_and_commit_the_export_is_repeated_without_a_second_file(
    desk: Desk, settings: Settings
) -> None:
    batch_id = desk.take_in(jsonl(request(f"c{n}") for n in range(3)))
    desk.answer(batch_id, ["c0", "c1"])
    desk.answer(batch_id, ["c2"], status_code=400)
    (task_id,) = desk.finalize()
    with pytest.raises(KeyboardInterrupt):
        run_task(dataclasses.replace(desk.work, blobs=DyingBlobs(settings.store_location)), task_id)
    assert (desk.batch(batch_id).status, rows_of_files(desk)) == (BatchStatus.FINALIZING, 0)
    draft = Path(settings.store_location) / f"output/{batch_id}/error.jsonl.0011.part"
    draft.write_bytes(b"of a writer that was killed with -9")
    desk.expire_lease(task_id)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, rows_of_files(desk)) == (BatchStatus.COMPLETED, 2)
    assert [line["custom_id"] for line in desk.contents(batch.output_file_id)] == ["c0", "c1"]
    assert blobs_below(settings, "output") == ["error.jsonl", "output.jsonl"]
    run_task(desk.work, task_id)
    run_task(desk.work, desk.start(TaskKind.EXPORT, batch_id))
    assert rows_of_files(desk) == 2
    assert desk.batch(batch_id) == batch


class FullWriter(BlobWriter):
    """A store with no room left."""

    def write(self, data: bytes) -> None:
        raise StoreFailed("(no space left on device)")


class FullBlobs(Blobs):
    def writer(self, path: str) -> BlobWriter:
        return FullWriter(self._files, path=path, full=self._full(path), sync=True)


def test_files_that_cannot_be_written_fail_the_batch_after_retries(desk: Desk, settings: Settings) -> None:
    batch_id = desk.take_in(jsonl([request("a")]))
    desk.answer(batch_id, ["a"])
    (task_id,) = desk.finalize()
    full = dataclasses.replace(desk.work, blobs=FullBlobs(settings.store_location))
    for _ in range(MAX_FAILURES):
        assert desk.batch(batch_id).status == BatchStatus.FINALIZING
        desk.make_due(task_id)
        run_task(full, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, desk.task(task_id).state) == (BatchStatus.FAILED, TaskState.DEAD)
    assert batch.errors is not None
    assert [error["code"] for error in batch.errors] == ["output_failed"]
    assert desk.progress(batch_id).completed == 1
    assert blobs_below(settings, "output") == []


def test_counts_that_do_not_add_up_are_never_published(desk: Desk, settings: Settings) -> None:
    batch_id = desk.take_in(jsonl([request("a"), request("b")]))
    desk.answer(batch_id, ["a"])
    with desk.database.transaction() as conn:  # a lost result row, its count already there
        conn.execute(sa.insert(batch_progress).values(batch_id=batch_id, completed=1))
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    assert desk.task(task_id).last_error.startswith("AccountingBroken")
    assert desk.batch(batch_id).status == BatchStatus.FINALIZING
    assert blobs_below(settings, "output") == []


def test_two_reapers_make_one_export(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a")]))
    desk.answer(batch_id, ["a"])
    with desk.database.transaction() as first, desk.database.transaction() as second:
        ours = control.due_finalizing(first)
        first.commit()
        theirs: list[Any] = control.due_finalizing(second)
    assert (len(ours), theirs) == (1, [])
    assert desk.batch(batch_id).status == BatchStatus.FINALIZING
