"""The asyncio client. Its methods are those of Client, awaited; what Client iterates is iterated with `async for`."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
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
from trunkline.client import id_of
from trunkline.config import read_config
from trunkline.wire import Batch, File, Job, Model, Result
from trunkline.wire_lines import BatchLine
from trunkline.wire_reports import Plan, Report

T = TypeVar("T")


class AsyncClient:
    """A connection to a Trunkline server; close it, or use it in an `async with` block. For one event loop.

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
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._config = read_config(base_url, api_key)
        self._timeout = timeout
        self._http = http_client or httpx.AsyncClient()
        self._flows = Flows(
            base_url=self._config.base_url, max_retries=max_retries, clock=time.monotonic, jitter=random.random
        )

    async def submit(
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
        return await self._run(flow)

    async def result(self, job: Job | str, timeout: float | None = None) -> Job:  # noqa: ASYNC109 - as in Client
        """The job once it has succeeded. Raises JobFailed, or TimedOut after `timeout` seconds."""
        return await self._run(self._flows.result(id_of(job), timeout))

    async def batch(
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

        See `Client.batch`. An iterable is written to its temporary file on the event loop's thread.
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
        return await self._run(flow)

    async def plan(
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
        return await self._run(flow)

    async def wait(
        self,
        batch: Batch | str,
        timeout: float | None = None,  # noqa: ASYNC109 - as in Client
        progress: Callable[[Batch], object] | None = None,
        poll_seconds: float | None = None,
    ) -> Batch:
        """The batch once it is completed, cancelled or expired; `progress` sees every state on the way.

        Raises BatchFailed with its line errors, or TimedOut after `timeout` seconds; the batch then goes on.
        """
        return await self._run(self._flows.wait(id_of(batch), timeout, progress, poll_seconds))

    def results(self, batch: Batch | str, *, follow: bool = True) -> AsyncIterator[Result]:
        """Every result once, in no promised order; of a running batch as its lines end.

        With `follow` False, the iterator ends with what has ended by now. Raises BatchFailed.
        """
        return self._iterate(self._flows.results(id_of(batch), follow))

    def result_lines(self, batch: Batch | str, *, follow: bool = True) -> AsyncIterator[bytes]:
        """As `results`, but each result as the JSON bytes that the server sent."""
        return self._iterate(self._flows.results(id_of(batch), follow, bytes))

    async def cancel(self, batch: Batch | str) -> Batch:
        """Ask for a batch to be cancelled; it is `cancelling` until what runs has ended. Raises ConflictError."""
        return await self._run(self._flows.send(requests.cancel_batch(id_of(batch))))

    async def cancel_job(self, job: Job | str) -> Job:
        """Ask for a single job to be cancelled. Raises ConflictError where it has ended."""
        return await self._run(self._flows.send(requests.cancel_job(id_of(job))))

    async def update_batch(
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
        return await self._run(self._flows.send(call))

    async def retry(self, batch: Batch | str, *, idempotency_key: str | None = None) -> Batch:
        """A new batch of the failed, cancelled and expired lines of one that has ended. Raises ConflictError,
        InvalidRequestError where every line was answered."""
        return await self._run(self._flows.send(requests.retry_batch(id_of(batch), idempotency_key or new_key())))

    def requests(
        self, batch: Batch | str, *, status: str | None = None, limit: int | None = None
    ) -> AsyncIterator[BatchLine]:
        """The lines of a batch, by line number: where each stands, where it ran, what its cache gave."""
        batch_id = id_of(batch)
        return self._iterate(
            self._flows.pages(lambda after, size: requests.list_lines(batch_id, status, after, size), limit)
        )

    async def delete_batch(self, batch: Batch | str) -> bool:
        """Delete a batch that has ended, with its results; its files stay. Raises ConflictError."""
        return (await self._run(self._flows.send(requests.delete_batch(id_of(batch))))).deleted

    async def get_batch(self, batch: Batch | str) -> Batch:
        return await self._run(self._flows.send(requests.get_batch(id_of(batch))))

    async def report(self, batch: Batch | str) -> Report:
        """Lines by outcome, tokens and misses, instances, the slowest lines and the commonest errors; also of a batch
        that still runs."""
        return await self._run(self._flows.send(requests.get_report(id_of(batch))))

    async def get_job(self, job: Job | str) -> Job:
        return await self._run(self._flows.send(requests.get_job(id_of(job))))

    def batches(self, limit: int | None = None) -> AsyncIterator[Batch]:
        """Newest first; pages are fetched as the iterator gets there."""
        return self._iterate(self._flows.pages(requests.list_batches, limit))

    def jobs(self, limit: int | None = None) -> AsyncIterator[Job]:
        """Single jobs, newest first."""
        return self._iterate(self._flows.pages(requests.list_jobs, limit))

    def files(self, purpose: str | None = None, limit: int | None = None) -> AsyncIterator[File]:
        """Uploads and the files that batches wrote, newest first; `purpose` is batch or batch_output."""
        return self._iterate(self._flows.pages(lambda after, size: requests.list_files(purpose, after, size), limit))

    async def models(self) -> list[Model]:
        """What a request may name as its model."""
        page = await self._run(self._flows.send(requests.list_models()))
        return page.data

    async def upload(self, path: str | os.PathLike[str], *, expires_after_seconds: int | None = None) -> File:
        """Upload an input file, to make one or more batches of."""
        return await self._run(self._flows.upload(path, expires_after_seconds))

    async def get_file(self, file: File | str) -> File:
        return await self._run(self._flows.send(requests.get_file(id_of(file))))

    async def delete_file(self, file: File | str) -> bool:
        """Raises ConflictError while a running batch reads it."""
        gone = await self._run(self._flows.send(requests.delete_file(id_of(file))))
        return gone.deleted

    def download(self, file: File | str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces."""
        return self._iterate(self._flows.file_chunks(id_of(file)))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        try:
            answer: Any = None
            while True:
                answer = await self._do(flow.send(answer))
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            flow.close()

    async def _iterate(self, flow: Flow[None]) -> AsyncIterator[Any]:
        try:
            answer: Any = None
            while True:
                step = flow.send(answer)
                answer = None
                if isinstance(step, Emit):
                    yield step.value
                else:
                    answer = await self._do(step)
        except StopIteration:
            return
        finally:
            flow.close()

    async def _do(self, step: Send | Pause | Emit) -> Reply | Unreachable | None:
        match step:
            case Send(call):
                arguments = request_arguments(call, self._config, self._timeout)
                try:
                    return reply_of(await self._http.request(**arguments))
                except httpx.RequestError as error:
                    return unreachable(error)
            case Pause(seconds):
                await asyncio.sleep(seconds)
        return None
