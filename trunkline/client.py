"""The blocking client. Its methods are those of AsyncClient; both drive the same flows."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import httpx

from trunkline import _requests as requests
from trunkline._flows import Emit, Flow, Flows, Pause, Send, Source, new_key
from trunkline._lines import CHAT, Item
from trunkline._requests import Reply
from trunkline._retry import Unreachable
from trunkline._transport import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_SECONDS,
    reply_of,
    request_arguments,
    unreachable,
)
from trunkline.config import read_config
from trunkline.wire import Batch, File, Job, Model, Result
from trunkline.wire_lines import BatchLine
from trunkline.wire_reports import Plan, Report

T = TypeVar("T")


class Client:
    """A connection to a Trunkline server; close it, or use it in a `with` block. Threads may share it.

    `base_url` and `api_key` default to TRUNKLINE_BASE_URL and TRUNKLINE_API_KEY, then to OPENAI_BASE_URL and
    OPENAI_API_KEY. A request that fails for want of a connection, or with 408, 429 or 5xx, is sent again up to
    `max_retries` times; creates carry an Idempotency-Key, so that nothing is made twice.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        max_retries: int = DEFAULT_MAX_RETRIES,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._config = read_config(base_url, api_key)
        self._timeout = timeout
        self._http = http_client or httpx.Client()
        self._flows = Flows(
            base_url=self._config.base_url, max_retries=max_retries, clock=time.monotonic, jitter=random.random
        )

    def submit(
        self,
        body: Item,
        *,
        endpoint: str = CHAT,
        model: str | None = None,
        priority: str | None = None,
        deadline_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
        webhook_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Submit one request: a body as the engine takes it, or a string as the prompt. Returns at once."""
        flow = self._flows.submit(
            body,
            endpoint=endpoint,
            model=model,
            priority=priority,
            deadline_seconds=deadline_seconds,
            metadata=metadata,
            webhook_url=webhook_url,
            idempotency_key=idempotency_key,
        )
        return self._run(flow)

    def result(self, job: Job | str, timeout: float | None = None) -> Job:
        """The job once it has succeeded. Raises JobFailed, or TimedOut after `timeout` seconds."""
        return self._run(self._flows.result(id_of(job), timeout))

    def batch(
        self,
        source: Source,
        *,
        endpoint: str = CHAT,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        model: str | None = None,
        queue: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Create a batch and return at once.

        `source` is the path of a JSONL file, a file open for reading bytes, a File uploaded before, or an iterable of
        prompts, of bodies, or of lines with `custom_id` and `body`; what has no custom_id gets "request-1" and so
        on. An iterable is written to a temporary file first, so it may be longer than memory. `queue` is the server's
        extension, for example {"priority": "low", "on_invalid_line": "skip"}. Two calls make two batches, unless both
        are given a File and the same `idempotency_key`.
        """
        flow = self._flows.batch(
            source,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=metadata,
            model=model,
            queue=queue,
            idempotency_key=idempotency_key,
        )
        return self._run(flow)

    def plan(
        self,
        source: Source,
        *,
        endpoint: str = CHAT,
        completion_window: str = "24h",
        model: str | None = None,
        queue: Mapping[str, str] | None = None,
    ) -> Plan:
        """What the batch of this source would come to: line errors, prefix groups, predicted hit rate and time.

        Creates no batch. What is no File is uploaded first; to run it afterwards, give `plan` and `batch` the same
        File. It takes as long as tokenising the whole file does: half a minute, or minutes.
        """
        flow = self._flows.plan(
            source, endpoint=endpoint, completion_window=completion_window, model=model, queue=queue
        )
        return self._run(flow)

    def wait(
        self,
        batch: Batch | str,
        timeout: float | None = None,
        progress: Callable[[Batch], object] | None = None,
        poll_seconds: float | None = None,
    ) -> Batch:
        """The batch once it is completed, cancelled or expired; `progress` sees every state on the way.

        Raises BatchFailed with its line errors, or TimedOut after `timeout` seconds; the batch then goes on.
        """
        return self._run(self._flows.wait(id_of(batch), timeout, progress, poll_seconds))

    def results(self, batch: Batch | str, *, follow: bool = True) -> Iterator[Result]:
        """Every result once, in no promised order; of a running batch as its lines end.

        With `follow` False, the iterator ends with what has ended by now. Raises BatchFailed.
        """
        return self._iterate(self._flows.results(id_of(batch), follow))

    def result_lines(self, batch: Batch | str, *, follow: bool = True) -> Iterator[bytes]:
        """As `results`, but each result as the JSON bytes that the server sent."""
        return self._iterate(self._flows.results(id_of(batch), follow, bytes))

    def cancel(self, batch: Batch | str) -> Batch:
        """Ask for a batch to be cancelled; it is `cancelling` until what runs has ended. Raises ConflictError."""
        return self._run(self._flows.send(requests.cancel_batch(id_of(batch))))

    def cancel_job(self, job: Job | str) -> Job:
        """Ask for a single job to be cancelled. Raises ConflictError where it has ended."""
        return self._run(self._flows.send(requests.cancel_job(id_of(job))))

    def update_batch(
        self,
        batch: Batch | str,
        *,
        priority: str | None = None,
        paused: bool | None = None,
        completion_window: str | None = None,
    ) -> Batch:
        """Change a batch that has not ended; None: as it is. `completion_window` counts from its creation.

        Of a paused batch what is out at an engine finishes, and nothing more goes out. Raises ConflictError.
        """
        call = requests.update_batch(
            id_of(batch), priority=priority, paused=paused, completion_window=completion_window
        )
        return self._run(self._flows.send(call))

    def retry(self, batch: Batch | str, *, idempotency_key: str | None = None) -> Batch:
        """A new batch of the failed, cancelled and expired lines of one that has ended. Raises ConflictError,
        InvalidRequestError where every line was answered."""
        return self._run(self._flows.send(requests.retry_batch(id_of(batch), idempotency_key or new_key())))

    def requests(
        self, batch: Batch | str, *, status: str | None = None, limit: int | None = None
    ) -> Iterator[BatchLine]:
        """The lines of a batch, by line number: where each stands, where it ran, what its cache gave."""
        batch_id = id_of(batch)
        return self._iterate(
            self._flows.pages(lambda after, size: requests.list_lines(batch_id, status, after, size), limit)
        )

    def delete_batch(self, batch: Batch | str) -> bool:
        """Delete a batch that has ended, with its results; its files stay. Raises ConflictError."""
        return self._run(self._flows.send(requests.delete_batch(id_of(batch)))).deleted

    def get_batch(self, batch: Batch | str) -> Batch:
        return self._run(self._flows.send(requests.get_batch(id_of(batch))))

    def report(self, batch: Batch | str) -> Report:
        """Lines by outcome, tokens and misses, instances, the slowest lines and the commonest errors; also of a batch
        that still runs."""
        return self._run(self._flows.send(requests.get_report(id_of(batch))))

    def get_job(self, job: Job | str) -> Job:
        return self._run(self._flows.send(requests.get_job(id_of(job))))

    def batches(self, limit: int | None = None) -> Iterator[Batch]:
        """Newest first; pages are fetched as the iterator gets there."""
        return self._iterate(self._flows.pages(requests.list_batches, limit))

    def jobs(self, limit: int | None = None) -> Iterator[Job]:
        """Single jobs, newest first."""
        return self._iterate(self._flows.pages(requests.list_jobs, limit))

    def files(self, purpose: str | None = None, limit: int | None = None) -> Iterator[File]:
        """Uploads and the files that batches wrote, newest first; `purpose` is batch or batch_output."""
        return self._iterate(self._flows.pages(lambda after, size: requests.list_files(purpose, after, size), limit))

    def models(self) -> list[Model]:
        """What a request may name as its model."""
        return self._run(self._flows.send(requests.list_models())).data

    def upload(self, path: str | os.PathLike[str], *, expires_after_seconds: int | None = None) -> File:
        """Upload an input file, to make one or more batches of."""
        return self._run(self._flows.upload(path, expires_after_seconds))

    def get_file(self, file: File | str) -> File:
        return self._run(self._flows.send(requests.get_file(id_of(file))))

    def delete_file(self, file: File | str) -> bool:
        """Raises ConflictError while a running batch reads it."""
        return self._run(self._flows.send(requests.delete_file(id_of(file)))).deleted

    def download(self, file: File | str) -> Iterator[bytes]:
        """The bytes of a file, in pieces."""
        return self._iterate(self._flows.file_chunks(id_of(file)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        try:
            answer: Any = None
            while True:
                answer = self._do(flow.send(answer))
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            flow.close()

    def _iterate(self, flow: Flow[None]) -> Iterator[Any]:
        try:
            answer: Any = None
            while True:
                step = flow.send(answer)
                answer = None
                if isinstance(step, Emit):
                    yield step.value
                else:
                    answer = self._do(step)
        except StopIteration:
            return
        finally:
            flow.close()

    def _do(self, step: Send | Pause | Emit) -> Reply | Unreachable | None:
        match step:
            case Send(call):
                try:
                    return reply_of(self._http.request(**request_arguments(call, self._config, self._timeout)))
                except httpx.RequestError as error:
                    return unreachable(error)
            case Pause(seconds):
                time.sleep(seconds)
        return None


def id_of(thing: Batch | Job | File | str) -> str:
    return thing if isinstance(thing, str) else thing.id
