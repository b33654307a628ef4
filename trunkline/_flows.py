"""What a client does, once for both clients: generators that yield steps (send, pause, emit) and do no I/O themselves.

A driver answers `Send` with a Reply or Unreachable, and `Pause` and `Emit` with nothing. `Client` and `AsyncClient`
are the two drivers.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from trunkline import _requests as requests
from trunkline._lines import Item, LineSplitter, open_input, parse_result, request_body, rewindable, spool
from trunkline._requests import Call, Reply
from trunkline._retry import Unreachable, retry_after_seconds, retry_delay_seconds
from trunkline.errors import BatchFailed, ConnectionFailed, InputError, JobFailed, TimedOut, TrunklineError
from trunkline.wire import Batch, File, Job, Page, Wire
from trunkline.wire_reports import Plan

T = TypeVar("T")
W = TypeVar("W", bound=Wire)

_FIRST_POLL_SECONDS = 0.5
_LONGEST_POLL_SECONDS = 5.0
_POLL_GROWTH = 1.5
_LONG_POLL_SECONDS = 30  # below the contract's 60, and below what proxies allow an idle connection
_QUICK_ANSWER_SECONDS = 0.2  # a long poll that comes back sooner, unfinished, was no long poll
_CHUNK_BYTES = 4 * 2**20  # of a file, per request: a broken download goes on from the last whole chunk
_RESULTS_PAGE_LINES = 1000
_PAGE_OBJECTS = 100
_INPUT_NAME = "batch.jsonl"  # of an upload that has no path

Source = str | os.PathLike[str] | BinaryIO | File | Iterable[Item]


@dataclass(frozen=True, slots=True)
class Send:
    """Do this call, once."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Let this long pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand this to the caller."""

    value: Any


Flow = Generator[Send | Pause | Emit, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flows:
    """The flows of one client. `clock` is monotonic seconds, `jitter` draws from 0..1."""

    base_url: str
    max_retries: int
    clock: Callable[[], float]
    jitter: Callable[[], float]

    def send(self, call: Call[T]) -> Flow[T]:
        """The value of a call, after as many tries as it takes. Raises APIError, ConnectionFailed, UnreadableReply."""
        tried = 0
        while True:
            tried += 1
            outcome: Reply | Unreachable = yield Send(call)
            if isinstance(outcome, Reply) and 200 <= outcome.status_code < 300:
                return call.read(outcome)
            delay = retry_delay_seconds(outcome, tried, self.max_retries, self.jitter())
            if delay is None:
                raise self._error(outcome)
            yield Pause(delay)

    def upload(self, path: str | os.PathLike[str], expires_after_seconds: int | None) -> Flow[File]:
        with open_input(path) as (file, name):
            return (yield from self.send(requests.upload_file(file, name, expires_after_seconds)))

    def batch(
        self,
        source: Source,
        *,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        model: str | None,
        queue: Mapping[str, str] | None,
        idempotency_key: str | None,
    ) -> Flow[Batch]:
        input_file = yield from self._input_file(source, endpoint, model)
        create = requests.create_batch(
            input_file_id=input_file.id,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=metadata,
            queue=queue,
            idempotency_key=idempotency_key or new_key(),
        )
        return (yield from self.send(create))

    def plan(
        self,
        source: Source,
        *,
        endpoint: str,
        completion_window: str,
        model: str | None,
        queue: Mapping[str, str] | None,
    ) -> Flow[Plan]:
        input_file = yield from self._input_file(source, endpoint, model)
        plan = requests.plan_batch(
            input_file_id=input_file.id, endpoint=endpoint, completion_window=completion_window, queue=queue
        )
        return (yield from self.send(plan))

    def wait(
        self,
        batch_id: str,
        timeout: float | None,
        progress: Callable[[Batch], object] | None,
        poll_seconds: float | None,
    ) -> Flow[Batch]:
        deadline = self._deadline(timeout)
        pause = poll_seconds or _FIRST_POLL_SECONDS
        while True:
            batch = yield from self.send(requests.get_batch(batch_id))
            if progress is not None:
                progress(batch)
            if batch.is_terminal:
                return _unless_failed(batch)
            left = deadline - self.clock()
            if left <= 0:
                counts = f"{batch.lines_ended} of {batch.request_counts.total} lines have ended"
                raise TimedOut(f"Batch {batch.id} is still {batch.status} after {timeout:g} s; {counts}.")
            yield Pause(min(pause, left))
            pause = poll_seconds or min(pause * _POLL_GROWTH, _LONGEST_POLL_SECONDS)

    def results(self, batch_id: str, follow: bool, emit: Callable[[bytes], Any] = parse_result) -> Flow[None]:
        """Emits every result of a batch: from its files once it has ended, else as the lines end, until it has."""
        batch = yield from self.send(requests.get_batch(batch_id))
        if not batch.is_terminal:
            yield from self._results_so_far(batch_id, follow, emit)
            return
        file_ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id]
        if not file_ids:
            _unless_failed(batch)
        for file_id in file_ids:
            yield from self._file_lines(file_id, emit)

    def file_chunks(self, file_id: str) -> Flow[None]:
        """Emits the bytes of a file in pieces."""
        offset, is_last = 0, False
        while not is_last:
            chunk = yield from self.send(requests.read_file(file_id, offset, _CHUNK_BYTES))
            offset, is_last = offset + len(chunk.data), chunk.is_last
            yield Emit(chunk.data)

    def submit(
        self,
        body: Item,
        *,
        endpoint: str,
        model: str | None,
        priority: str | None,
        deadline_seconds: float | None,
        metadata: Mapping[str, str] | None,
        webhook_url: str | None,
        idempotency_key: str | None,
    ) -> Flow[Job]:
        create = requests.create_job(
            endpoint=endpoint,
            body=request_body(body, endpoint, model),
            priority=priority,
            deadline_seconds=deadline_seconds,
            metadata=metadata,
            webhook_url=webhook_url,
            idempotency_key=idempotency_key or new_key(),
        )
        return (yield from self.send(create))

    def result(self, job_id: str, timeout: float | None) -> Flow[Job]:
        deadline = self._deadline(timeout)
        while True:
            asked_at = self.clock()
            wait = max(0, math.ceil(min(deadline - asked_at, _LONG_POLL_SECONDS)))
            job = yield from self.send(requests.get_job(job_id, wait))
            if job.is_terminal:
                break
            now = self.clock()
            if now >= deadline:
                raise TimedOut(f"Job {job.id} is still {job.status} after {timeout:g} s.")
            if now - asked_at < _QUICK_ANSWER_SECONDS:
                yield Pause(min(_FIRST_POLL_SECONDS, deadline - now))
        if job.status != "succeeded":
            raise JobFailed(job)
        return job

    def pages(self, call: Callable[[str | None, int], Call[Page[W]]], limit: int | None) -> Flow[None]:
        """Emits the objects of a list, newest first, `limit` at most."""
        left, after = limit, None
        while left is None or left > 0:
            size = _PAGE_OBJECTS if left is None else min(left, _PAGE_OBJECTS)
            page: Page[W] = yield from self.send(call(after, size))
            for item in page.data:
                yield Emit(item)
            after = page.last_id
            if not (page.has_more and page.data and after):
                return
            left = None if left is None else left - len(page.data)

    def _input_file(self, source: Source, endpoint: str, model: str | None) -> Flow[File]:
        if isinstance(source, File):
            return source
        is_stream = hasattr(source, "read")
        if model is not None and (is_stream or isinstance(source, str | os.PathLike)):
            raise InputError("model= goes with prompts or bodies; a file's lines name their own models.")
        if isinstance(source, str | os.PathLike):
            return (yield from self.upload(source, None))
        if is_stream:
            with rewindable(cast(BinaryIO, source)) as file:
                return (yield from self.send(requests.upload_file(file, _INPUT_NAME)))
        if isinstance(source, Mapping | bytes):
            raise InputError(
                "A batch is a path, an open file, an uploaded File, or an iterable of prompts, bodies or lines."
            )
        with spool(cast("Iterable[Item]", source), endpoint, model) as file:
            return (yield from self.send(requests.upload_file(file, _INPUT_NAME)))

    def _results_so_far(self, batch_id: str, follow: bool, emit: Callable[[bytes], Any]) -> Flow[None]:
        after: str | None = None
        pause = _FIRST_POLL_SECONDS
        while True:
            page = yield from self.send(requests.batch_results(batch_id, after, _RESULTS_PAGE_LINES))
            after = page.next_after or after
            lines = _lines_of(page.data)
            for line in lines:
                yield Emit(emit(line))
            if lines:
                pause = _FIRST_POLL_SECONDS
            elif not page.is_incomplete:
                _unless_failed((yield from self.send(requests.get_batch(batch_id))))
                return
            elif not follow:
                return
            else:
                yield Pause(pause)
                pause = min(pause * _POLL_GROWTH, _LONGEST_POLL_SECONDS)

    def _file_lines(self, file_id: str, emit: Callable[[bytes], Any]) -> Flow[None]:
        splitter = LineSplitter()
        offset, is_last = 0, False
        while not is_last:
            chunk = yield from self.send(requests.read_file(file_id, offset, _CHUNK_BYTES))
            offset, is_last = offset + len(chunk.data), chunk.is_last
            for line in splitter.feed(chunk.data):
                yield Emit(emit(line))
        for line in splitter.finish():
            yield Emit(emit(line))

    def _deadline(self, timeout: float | None) -> float:
        return math.inf if timeout is None else self.clock() + timeout

    def _error(self, outcome: Reply | Unreachable) -> TrunklineError:
        if isinstance(outcome, Unreachable):
            return ConnectionFailed(self.base_url, outcome.cause)
        return requests.error_of(outcome, retry_after_seconds(outcome.headers))


def new_key() -> str:
    """A key under which a create may be sent any number of times and creates once."""
    return uuid.uuid4().hex


def _unless_failed(batch: Batch) -> Batch:
    if batch.status == "failed":
        raise BatchFailed(batch)
    return batch


def _lines_of(data: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return splitter.feed(data) + splitter.finish()
