"""Intake: what is judged, what is taken in, and that a restart takes no line twice."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import sqlalchemy as sa
from control_fixtures import MODELS, Desk, jsonl, make_desk, request

from service import intake
from service.control import run_task
from service.core.model import BatchStatus, TaskState
from service.errors import StoreFailed
from service.settings import Settings
from service.store import batches, files
from service.store.session import Database
from service.store.tables import line_error
from service.tokenizing import Keyed, KeyRequest, Tokenizing


@pytest.fixture
def desk(settings: Settings, database: Database) -> Desk:
    return make_desk(settings, database)


def test_every_line_becomes_a_job_and_the_batch_is_counted(desk: Desk) -> None:
    shared = "the same long instructions " * 40
    batch_id, task_id = desk.create(jsonl(request(f"c{n}", text=f"{shared}{n}") for n in range(5)))
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total, batch.model, batch.intake_done) == (BatchStatus.IN_PROGRESS, 5, "tiny", True)
    assert batch.prefix_groups == 1
    assert batch.bound_tokens is not None
    assert batch.bound_tokens >= 4 * 224  # four of five find the shared words; 1,080 bytes count as 270 tokens
    jobs = desk.jobs(batch_id)
    assert [(job.line_no, job.custom_id, job.model) for job in jobs] == [(n + 1, f"c{n}", "tiny") for n in range(5)]
    assert json.loads(jobs[0].body)["messages"][0]["content"] == f"{shared}0"
    assert {job.predicted_output_tokens for job in jobs} == {5}
    assert desk.task(task_id).state == TaskState.DONE


def test_line_numbers_count_blank_lines_and_ignore_mark_and_carriage_returns(desk: Desk) -> None:
    first, second = (json.dumps(request(name)).encode() for name in ("a", "b"))
    batch_id = desk.take_in(b"\xef\xbb\xbf" + first + b"\r\n\r\n \t\n" + second)
    assert [(job.line_no, job.custom_id) for job in desk.jobs(batch_id)] == [(1, "a"), (4, "b")]
    assert desk.batch(batch_id).total == 2


def test_a_nul_in_a_prompt_and_an_alias_are_kept_as_sent(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a", model="small", text="nul \0 here")]))
    (job,) = desk.jobs(batch_id)
    assert job.model == "tiny"
    body = json.loads(job.body)
    assert (body["model"], body["messages"][0]["content"]) == ("small", "nul \0 here")
    assert desk.batch(batch_id).model == "small"


def test_two_models_make_a_batch_without_one(desk: Desk) -> None:
    batch_id = desk.take_in(jsonl([request("a"), request("b", model="other")]))
    assert desk.batch(batch_id).model is None
    assert [job.model for job in desk.jobs(batch_id)] == ["tiny", "other"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (b"{broken\n", ("invalid_json_line", 1, None)),
        (jsonl([request("a"), request("a")]), ("duplicate_custom_id", 2, "custom_id")),
        (jsonl([request("a"), request("b", model="absent")]), ("model_not_found", 2, "body.model")),
        (jsonl([request("a", url="/v1/embeddings")]), ("invalid_url", 1, "url")),
        (jsonl([{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny"}}]),
         ("missing_required_parameter", 1, "body.messages")),
        (b"\n\n", ("empty_batch", None, None)),
        (b"\xef\xbb\xbf", ("empty_batch", None, None)),
    ],
)  # fmt: skip
def test_bad_input_fails_the_batch_and_nothing_is_dispatched(
    desk: Desk, rows: bytes, expected: tuple[Any, ...]
) -> None:
    batch_id = desk.take_in(rows)
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total) == (BatchStatus.FAILED, 0)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [(error["code"], error["line"], error["param"]) for error in batch.errors] == [expected]
    assert desk.jobs(batch_id) == []
    good = desk.take_in(jsonl([request("next")]))
    assert desk.batch(good).status == BatchStatus.IN_PROGRESS


def test_at_most_a_hundred_errors_are_shown_in_file_order(desk: Desk) -> None:
    batch_id = desk.take_in(b"{\n" * 130)
    errors = desk.batch(batch_id).errors
    assert errors is not None
    assert [error["line"] for error in errors] == [*range(1, 101), None]
    assert errors[-1]["code"] == "too_many_errors"


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_errors_of_the_file_fail_under_either_policy(desk: Desk, policy: str) -> None:
    small = desk.with_settings(max_lines=2)
    batch_id = small.take_in(jsonl(request(f"c{n}") for n in range(3)), on_invalid_line=policy)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.FAILED
    assert batch.errors is not None
    assert [error["code"] for error in batch.errors] == ["too_many_tasks"]
    with desk.database.transaction() as conn:
        assert conn.scalar(sa.select(sa.func.count()).select_from(line_error)) == 0


def test_over_the_tenants_quota_the_batch_fails(desk: Desk) -> None:
    small = desk.with_settings(max_queued_lines=2)
    batch_id = small.take_in(jsonl(request(f"c{n}") for n in range(3)))
    errors = desk.batch(batch_id).errors
    assert errors is not None
    assert [error["code"] for error in errors] == ["token_limit_exceeded"]


def test_skipped_lines_are_counted_failed_and_the_rest_is_taken_in(desk: Desk) -> None:
    rows = jsonl([request("a"), request("a"), request("b", model="absent"), request("c")]) + b"{\n"
    batch_id = desk.take_in(rows, on_invalid_line="skip")
    batch = desk.batch(batch_id)
    assert (batch.status, batch.total, batch.errors) == (BatchStatus.IN_PROGRESS, 5, None)
    progress = desk.progress(batch_id)
    assert (progress.failed, progress.skipped, progress.ended) == (3, 3, 3)
    assert [job.line_no for job in desk.jobs(batch_id)] == [1, 4]
    with desk.database.transaction() as conn:
        found = conn.execute(sa.select(line_error).order_by(line_error.c.line_no)).all()
    assert [(row.line_no, row.custom_id, row.code) for row in found] == [
        (2, "a", "duplicate_custom_id"),
        (3, "b", "model_not_found"),
        (5, None, "invalid_json_line"),
    ]


def test_a_file_that_vanished_fails_the_batch(desk: Desk) -> None:
    batch_id, task_id = desk.create(jsonl([request("a")]))
    with desk.database.transaction() as conn:
        found = files.get_file(conn, desk.tenant_id, desk.batch(batch_id).input_file_id)
    assert found is not None
    desk.work.blobs.delete(found.store_path)
    run_task(desk.work, task_id)
    batch = desk.batch(batch_id)
    assert batch.status == BatchStatus.FAILED
    assert batch.errors is not None
    assert batch.errors[0]["param"] == "input_file_id"


class DyingTokenizing(Tokenizing):
    """Dies at its nth chunk, as a worker that is killed there."""

    def __init__(self, chunk: int) -> None:
        super().__init__(MODELS)
        self.chunks_left = chunk

    def keys(self, requests: Any) -> list[Keyed]:
        self.chunks_left -= 1
        if self.chunks_left == 0:
            raise KeyboardInterrupt
        return super().keys(requests)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "CHUNK_LINES", 10)


def test_a_kill_between_chunks_takes_no_line_twice(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(35)))
    dying = dataclasses.replace(desk.work, tokenizing=DyingTokenizing(3))
    with pytest.raises(KeyboardInterrupt):
        run_task(dying, task_id)
    assert len(desk.jobs(batch_id)) == 20
    assert not desk.batch(batch_id).intake_done
    run_task(desk.work, task_id)  # the lease still runs: nobody may take it
    assert len(desk.jobs(batch_id)) == 20
    desk.expire_lease(task_id)
    run_task(desk.work, task_id)
    assert [job.custom_id for job in desk.jobs(batch_id)] == [f"c{n}" for n in range(35)]
    assert desk.batch(batch_id).intake_done
    task = desk.task(task_id)
    assert (task.state, task.attempt, task.failures) == (TaskState.DONE, 2, 1)


def test_an_error_between_chunks_is_recorded_without_content_and_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_chunks(monkeypatch)

    class Failing(DyingTokenizing):
        def keys(self, requests: Any) -> list[Keyed]:
            try:
                return super().keys(requests)
            except KeyboardInterrupt:
                raise ValueError(requests[0].body["messages"][0]["content"]) from None

    batch_id, task_id = desk.create(jsonl(request(f"c{n}", text="secret words") for n in range(15)))
    run_task(dataclasses.replace(desk.work, tokenizing=Failing(2)), task_id)
    task = desk.task(task_id)
    assert (task.state, task.failures, task.published_at) == (TaskState.READY, 1, None)
    assert task.last_error.startswith("ValueError")
    assert "secret" not in task.last_error + caplog.text
    assert len([record for record in caplog.records if "failed" in record.message]) == 1
    desk.make_due(task_id)
    run_task(desk.work, task_id)
    assert len(desk.jobs(batch_id)) == 15


class RacingTokenizing(Tokenizing):
    """Lets something happen between two chunks."""

    def __init__(self, chunk: int, event: Any) -> None:
        super().__init__(MODELS)
        self.chunks_left = chunk
        self.event = event

    def keys(self, requests: Any) -> list[Keyed]:
        self.chunks_left -= 1
        if self.chunks_left == 0:
            self.event()
        return super().keys(requests)


def test_a_cancel_in_pass_two_ends_intake_quietly(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(30)))
    racing = RacingTokenizing(2, lambda: desk.cancel(batch_id))
    run_task(dataclasses.replace(desk.work, tokenizing=racing), task_id)
    assert len(desk.jobs(batch_id)) == 10
    assert desk.task(task_id).state == TaskState.DONE
    assert desk.batch(batch_id).status == BatchStatus.CANCELLING


def test_a_newer_attempt_fences_the_older_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that slept past its lease wakes up after another has finished: it must write nothing."""
    small_chunks(monkeypatch)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(30)))

    def overtake() -> None:
        desk.expire_lease(task_id)
        run_task(desk.work, task_id)

    run_task(dataclasses.replace(desk.work, tokenizing=RacingTokenizing(2, overtake)), task_id)
    assert [job.custom_id for job in desk.jobs(batch_id)] == [f"c{n}" for n in range(30)]
    task = desk.task(task_id)
    assert (task.state, task.attempt) == (TaskState.DONE, 2)


def test_a_worker_that_is_told_to_stop_gives_the_task_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(30)))
    racing = RacingTokenizing(2, desk.work.stopping.set)
    run_task(dataclasses.replace(desk.work, tokenizing=racing), task_id)
    assert len(desk.jobs(batch_id)) == 20
    task = desk.task(task_id)
    assert (task.state, task.failures) == (TaskState.READY, 0)
    desk.work.stopping.clear()
    run_task(desk.work, task_id)
    assert len(desk.jobs(batch_id)) == 30


def test_an_input_that_changed_after_validation_is_an_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    batch_id, task_id = desk.create(jsonl(request(f"c{n}") for n in range(30)))
    with pytest.raises(KeyboardInterrupt):
        run_task(dataclasses.replace(desk.work, tokenizing=DyingTokenizing(2)), task_id)
    with desk.database.transaction() as conn:
        found = files.get_file(conn, desk.tenant_id, desk.batch(batch_id).input_file_id)
        batches.update_batch(conn, batch_id, intake_offset=desk.batch(batch_id).intake_offset + 3)
    assert found is not None
    desk.expire_lease(task_id)
    run_task(desk.work, task_id)
    assert StoreFailed.__doc__ is not None
    assert desk.task(task_id).last_error.startswith(StoreFailed.__doc__)


def test_key_requests_carry_the_tenants_salt(desk: Desk) -> None:
    seen: list[KeyRequest] = []

    class Recording(Tokenizing):
        def keys(self, requests: Any) -> list[Keyed]:
            seen.extend(requests)
            return super().keys(requests)

    batch_id, task_id = desk.create(jsonl([request("a", model="tiny-legal")]))
    run_task(dataclasses.replace(desk.work, tokenizing=Recording(MODELS)), task_id)
    assert len(seen[0].salt) == 16
    assert seen[0].model == "tiny-legal"
    assert desk.jobs(batch_id)[0].model == "tiny"
