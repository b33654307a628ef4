"""trunkline._flows: retries, waits, long polls, cursors and pages, against a scripted server and a clock in hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from trunkline import _requests as requests
from trunkline._flows import Emit, Flow, Flows, Pause, Send
from trunkline._lines import CHAT
from trunkline._requests import Call, Reply
from trunkline._retry import Unreachable
from trunkline.errors import (
    BatchFailed,
    ConflictError,
    ConnectionFailed,
    InputError,
    JobFailed,
    QuotaError,
    ServerError,
    TimedOut,
)
from trunkline.wire import Batch, File

Answer = Reply | Unreachable
BATCH = {
    "id": "batch_1",
    "status": "in_progress",
    "endpoint": CHAT,
    "input_file_id": "file-1",
    "completion_window": "24h",
    "created_at": 1,
}
JOB = {"id": "job_1", "status": "queued", "endpoint": CHAT, "created_at": 1}
FILE = {"id": "file-1", "bytes": 1, "created_at": 1, "filename": "a.jsonl", "purpose": "batch"}
LOST = Unreachable(cause="refused")


class Script:
    """Drives a flow: answers its calls one by one from a list, keeps its pauses as time, collects what it emits."""

    def __init__(self, answers: Iterable[Answer] | Callable[[Call[Any]], Answer], max_retries: int = 4) -> None:
        self.answers = answers if callable(answers) else self._next_of(answers)
        self.now = 100.0
        self.calls: list[Call[Any]] = []
        self.bodies: list[bytes] = []
        self.pauses: list[float] = []
        self.emitted: list[Any] = []
        self.flows = Flows(base_url="http://h/v1", max_retries=max_retries, clock=lambda: self.now, jitter=lambda: 0.0)

    @staticmethod
    def _next_of(answers: Iterable[Answer]) -> Callable[[Call[Any]], Answer]:
        left = iter(answers)
        return lambda _: next(left)

    def run(self, flow: Flow[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._do(step)

    def _do(self, step: Send | Pause | Emit) -> Answer | None:
        if isinstance(step, Pause):
            self.pauses.append(step.seconds)
            self.now += step.seconds
            return None
        if isinstance(step, Emit):
            self.emitted.append(step.value)
            return None
        self.calls.append(step.call)
        if step.call.upload:
            step.call.upload.file.seek(0)
            self.bodies.append(step.call.upload.file.read())
        return self.answers(step.call)


def ok(body: object, status: int = 200, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()}, body=raw)


def refused(status: int, **headers: str) -> Reply:
    return ok({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}, status, **headers)


def batch(status: str, **fields: object) -> Reply:
    return ok({**BATCH, "status": status, **fields})


def make_batch(script: Script, source: Any, **options: Any) -> Batch:
    given: dict[str, Any] = {"metadata": None, "model": None, "queue": None, "idempotency_key": None, **options}
    flow = script.flows.batch(source, endpoint=CHAT, completion_window="24h", **given)
    result = script.run(flow)
    assert isinstance(result, Batch)
    return result


def test_a_create_is_repeated_under_one_key_and_an_upload_whole() -> None:
    script = Script([LOST, refused(503), ok(FILE), LOST, refused(500), batch("validating")])
    make_batch(script, ["a", "b"], model="m")
    assert [call.path for call in script.calls] == ["/files"] * 3 + ["/batches"] * 3
    assert len(set(script.bodies)) == 1
    assert script.bodies[0].count(b"\n") == 2
    keys = {call.headers["idempotency-key"] for call in script.calls[3:]}
    assert len(keys) == 1
    assert script.pauses == [0.5, 1.0, 0.5, 1.0]


def test_two_batches_have_two_keys() -> None:
    script = Script([batch("validating"), batch("validating")])
    for _ in range(2):
        make_batch(script, File.model_validate(FILE))
    assert len({call.headers["idempotency-key"] for call in script.calls}) == 2


def test_an_uploaded_file_is_not_uploaded_again_and_a_key_is_kept() -> None:
    script = Script([batch("validating")])
    make_batch(script, File.model_validate(FILE), idempotency_key="mine")
    assert [call.path for call in script.calls] == ["/batches"]
    assert script.calls[0].headers == {"idempotency-key": "mine"}


@pytest.mark.parametrize("source", [{"messages": []}, b"bytes"])
def test_what_is_no_batch_is_refused_before_anything_is_sent(source: object) -> None:
    script = Script([])
    with pytest.raises(InputError):
        make_batch(script, source)
    assert script.calls == []


def test_tries_end_and_the_error_says_what_came_last() -> None:
    script = Script([LOST, LOST, LOST], max_retries=2)
    with pytest.raises(ConnectionFailed, match="http://h/v1: refused"):
        script.run(script.flows.send(requests.get_batch("b")))
    script = Script([refused(503)] * 5)
    with pytest.raises(ServerError):
        script.run(script.flows.send(requests.get_batch("b")))
    assert len(script.calls) == 5


def test_a_conflict_is_not_repeated_and_a_full_queue_says_when() -> None:
    script = Script([refused(409, x_should_retry="false")])
    with pytest.raises(ConflictError):
        script.run(script.flows.send(requests.cancel_batch("b")))
    script = Script([refused(429, retry_after="300")])
    with pytest.raises(QuotaError) as raised:
        script.run(script.flows.send(requests.get_batch("b")))
    assert raised.value.retry_after_seconds == 300


def test_wait_polls_with_growing_pauses_and_shows_every_state() -> None:
    script = Script([batch("validating"), *[batch("in_progress")] * 8, batch("completed")])
    seen: list[str] = []
    ended = script.run(script.flows.wait("batch_1", None, lambda state: seen.append(state.status), None))
    assert ended.status == "completed"
    assert seen == ["validating", *["in_progress"] * 8, "completed"]
    assert script.pauses[:3] == [0.5, 0.75, 1.125]
    assert script.pauses[-1] == 5.0


def test_wait_polls_as_often_as_asked() -> None:
    script = Script([batch("in_progress"), batch("in_progress"), batch("cancelled")])
    script.run(script.flows.wait("batch_1", None, None, 2.0))
    assert script.pauses == [2.0, 2.0]


def test_wait_ends_at_its_time_out_with_a_last_look() -> None:
    script = Script(lambda _: batch("in_progress", request_counts={"total": 9, "completed": 4, "failed": 1}))
    with pytest.raises(TimedOut, match="in_progress after 3 s; 5 of 9 lines"):
        script.run(script.flows.wait("batch_1", 3.0, None, 2.0))
    assert script.pauses == [2.0, 1.0]


def test_a_failed_batch_raises_its_line_errors() -> None:
    errors = [{"code": "invalid_json_line", "message": "Not JSON.", "line": n, "param": None} for n in range(1, 9)]
    script = Script([batch("failed", errors={"object": "list", "data": errors})])
    with pytest.raises(BatchFailed) as raised:
        script.run(script.flows.wait("batch_1", None, None, None))
    assert [error.line for error in raised.value.errors] == list(range(1, 9))
    assert "line 1: Not JSON (invalid_json_line)" in str(raised.value)
    assert "3 more" in str(raised.value)


def test_results_of_an_ended_batch_come_from_both_files_in_pieces() -> None:
    output, errors = b'{"custom_id":"a"}\n{"custom_id":"b"}\n', b'{"custom_id":"c"}'

    def serve(call: Call[Any]) -> Answer:
        if call.path == "/batches/batch_1":
            return batch("completed", output_file_id="out", error_file_id="err")
        data = output if "/out/" in call.path else errors
        start = int(call.headers["range"].removeprefix("bytes=").partition("-")[0])
        size = 20  # less than was asked for, as a server may answer
        return ok(data[start : start + size], 206, content_range=f"bytes {start}-x/{len(data)}")

    script = Script(serve)
    script.run(script.flows.results("batch_1", True))
    assert [result.custom_id for result in script.emitted] == ["a", "b", "c"]


def test_a_broken_download_goes_on_where_it_was() -> None:
    script = Script(
        [
            batch("completed", output_file_id="out"),
            ok(b'{"custom_id":', 206, content_range="bytes 0-12/19"),
            LOST,
            ok(b'"a"}\n\n', 206, content_range="bytes 13-18/19"),
        ]
    )
    script.run(script.flows.results("batch_1", True))
    assert [result.custom_id for result in script.emitted] == ["a"]
    assert [call.headers["range"].partition("-")[0] for call in script.calls[1:]] == ["bytes=0", *["bytes=13"] * 2]


def test_results_of_a_running_batch_follow_the_cursor_until_its_end() -> None:
    def page(after: str, data: bytes, **more: str) -> Reply:
        return ok(data, x_next_after=after, **more)

    script = Script(
        [
            batch("in_progress"),
            page("1", b'{"custom_id":"a"}\n', x_incomplete="true"),
            page("1", b"", x_incomplete="true"),
            page("2", b'{"custom_id":"b"}\n{"custom_id":"c"}\n'),
            page("2", b""),
            batch("completed"),
        ]
    )
    script.run(script.flows.results("batch_1", True))
    assert [result.custom_id for result in script.emitted] == ["a", "b", "c"]
    assert [call.params.get("after") for call in script.calls[1:5]] == [None, "1", "1", "2"]


def test_without_follow_the_results_end_with_what_there_is() -> None:
    script = Script(
        [
            batch("in_progress"),
            ok(b'{"custom_id":"a"}\n', x_next_after="1", x_incomplete="true"),
            ok(b"", x_next_after="1", x_incomplete="true"),
        ]
    )
    script.run(script.flows.results("batch_1", False))
    assert [result.custom_id for result in script.emitted] == ["a"]
    assert script.pauses == []


def test_a_failed_batch_has_no_results_and_says_why() -> None:
    for answers in ([batch("failed")], [batch("validating"), ok(b"", x_next_after="0"), batch("failed")]):
        script = Script(answers)
        with pytest.raises(BatchFailed):
            script.run(script.flows.results("batch_1", True))


def test_result_polls_long_and_returns_the_answer() -> None:
    def serve(_: Call[Any]) -> Answer:
        script.now += 30
        return ok({**JOB, "status": "running" if script.now < 190 else "succeeded"})

    script = Script(serve)
    job = script.run(script.flows.result("job_1", None))
    assert job.status == "succeeded"
    assert [call.params for call in script.calls] == [{"wait": 30}] * 3
    assert script.calls[0].wait_seconds == 30
    assert script.pauses == []


def test_result_asks_for_no_more_than_is_left_and_times_out() -> None:
    def serve(call: Call[Any]) -> Answer:
        script.now += call.wait_seconds
        return ok({**JOB, "status": "running"})

    script = Script(serve)
    with pytest.raises(TimedOut, match="running after 40 s"):
        script.run(script.flows.result("job_1", 40.0))
    assert [call.params["wait"] for call in script.calls] == [30, 10]


def test_a_server_that_does_not_wait_is_not_asked_without_pause() -> None:
    script = Script([ok({**JOB, "status": "queued"}), ok({**JOB, "status": "succeeded"})])
    script.run(script.flows.result("job_1", None))
    assert script.pauses == [0.5]


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_a_job_without_a_good_answer_raises(status: str) -> None:
    script = Script([ok({**JOB, "status": status, "error": {"message": "because", "code": "x"}})])
    with pytest.raises(JobFailed, match=f"{status}: because") as raised:
        script.run(script.flows.result("job_1", None))
    assert raised.value.job.status == status


def test_pages_are_fetched_as_needed_and_no_further_than_the_limit() -> None:
    def serve(call: Call[Any]) -> Answer:
        start = int(call.params.get("after", 0))
        size = int(call.params["limit"])
        data = [{**BATCH, "id": str(n)} for n in range(start + 1, min(start + size, 250) + 1)]
        return ok({"object": "list", "data": data, "has_more": start + size < 250, "last_id": data[-1]["id"]})

    script = Script(serve)
    script.run(script.flows.pages(requests.list_batches, None))
    assert [item.id for item in script.emitted] == [str(n) for n in range(1, 251)]
    script = Script(serve)
    script.run(script.flows.pages(requests.list_batches, 120))
    assert len(script.emitted) == 120
    assert [call.params["limit"] for call in script.calls] == [100, 20]
    script = Script([])
    script.run(script.flows.pages(requests.list_batches, 0))
    assert script.calls == []
