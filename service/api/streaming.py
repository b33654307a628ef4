"""`stream: true` at the transparent endpoint: an engine's own events, relayed one by one while it makes them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.cancelling import cancel
from service.api.context import Context, context_of
from service.api.creates import Repeats
from service.api.errors import DO_NOT_RETRY, ApiError, invalid_type
from service.api.hub import RelayedStream
from service.api.inputs import JsonObject
from service.api.new_jobs import Submission, check_request, create, keyed
from service.core import strictjson
from service.core.batchfile import strip_body
from service.core.model import Endpoint, JobStatus
from service.relay import Ending
from service.store import singles
from service.store.singles import Single
from service.store.tenants import Tenant

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_GRACE_SECONDS = 2.0  # for what is still on its way when the job's result is there
_LISTEN_SECONDS = 2.0  # a process that has just started is not connected to the broker yet
_CLIENT_GONE = 499


@dataclass(slots=True, kw_only=True)
class _Call:
    """One streamed answer, from its job to the last event."""

    context: Context
    tenant: Tenant
    stream: RelayedStream
    wants_usage: bool
    job_id: str = ""
    job: Single | None = None  # once it has ended
    is_gone: bool = False  # the client
    is_unwanted: bool = False  # nobody will read the answer, so it need not be made
    _opened: ExitStack = field(default_factory=ExitStack)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def watch(self, request: Request) -> None:
        """From now on the end of the job, and of the connection, end the stream."""
        ended = self._opened.enter_context(self.context.waiter.watching(self.job_id))
        self._tasks = [asyncio.create_task(self._until_ended(ended)), asyncio.create_task(self._until_gone(request))]

    async def close(self) -> None:
        """Whatever happened, nobody waits for the answer any more. What would run for nobody is cancelled."""
        for task in self._tasks:
            task.cancel()
        self._opened.close()
        is_unwanted = self.is_unwanted or not self.stream.is_over
        if self.job_id and self.job is None and is_unwanted:
            await self._cancel()

    async def _cancel(self) -> None:
        try:
            await asyncio.shield(run_in_threadpool(cancel, self.context, self.tenant, self.job_id))
        except SQLAlchemyError as error:
            log.warning("job=%s is not cancelled, its deadline ends it: %s", self.job_id, type(error).__name__)

    async def _until_ended(self, ended: asyncio.Event) -> None:
        """The result is there, so whatever was sent has been: what does not arrive soon is lost."""
        await ended.wait()
        job = await run_in_threadpool(self.look)
        if not job.is_terminal:  # this process is about to end
            if not self.stream.has_begun:
                self.is_unwanted = True  # unlike a whole answer, this one cannot be asked for again
                self.stream.lose("The server is restarting.", "service_unavailable")
            return
        self.job = job
        if job.status is JobStatus.SUCCEEDED or self.stream.has_begun:
            await asyncio.sleep(_GRACE_SECONDS)
        self.stream.lose(f"A part of the answer was lost on its way; GET /v1/jobs/{self.job_id} has all of it.")

    async def _until_gone(self, request: Request) -> None:
        """The body was read: all that can come is that the client goes away."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.is_gone = self.is_unwanted = True
        self.stream.abandon()

    def look(self) -> Single:
        with self.context.database.transaction() as conn:
            job = singles.get_single(conn, self.tenant.id, self.job_id)
        assert job is not None, "created, and kept for as long as anybody waits"
        return job


async def stream_answer(
    request: Request, tenant: Tenant, endpoint: Endpoint, said: JsonObject, answer_of: Callable[[Single], Response]
) -> Response:
    """The engine's events, or, where the job ended before the first, what `answer_of` makes of it.

    Tries that failed before the first event stay unseen. A repeat of the request is a job of its own: events that are
    gone cannot be sent again.
    """
    context = context_of(request)
    options = said.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid_type("stream_options", "stream_options must be an object.")
    await _until_listening(context)
    opened = ExitStack()
    stream = opened.enter_context(context.relay.open())
    wants_usage = bool(options and options.get("include_usage"))
    call = _Call(context=context, tenant=tenant, stream=stream, wants_usage=wants_usage, _opened=opened)
    try:
        call.job_id = await run_in_threadpool(_create, call, endpoint, said, request.url.path)
        call.watch(request)
        first = await stream.next()
        if isinstance(first, str):
            return EventStream(call, first)
        answer = await _unstreamed(call, first, answer_of)
    except BaseException:
        await call.close()
        raise
    await call.close()
    return answer


async def _until_listening(context: Context) -> None:
    """Raises ApiError 503 where the broker does not answer: nothing is created then."""
    if context.relay.is_listening or await context.relay.wait_listening(_LISTEN_SECONDS):
        return
    raise ApiError(503, "service_unavailable", "The broker does not answer; try again.", headers={"retry-after": "5"})


def _create(call: _Call, endpoint: Endpoint, said: JsonObject, path: str) -> str:
    check_request({**said, "stream": None}, endpoint, at="")
    new = keyed(call.context, call.tenant, said, endpoint, at="")
    if said.get("stream_options"):  # an engine takes them with `stream` alone, which the worker adds
        new = replace(new, body=strictjson.dumps({**strip_body(said), "stream_options": said["stream_options"]}))
    new = replace(new, deadline_seconds=call.context.settings.answer_seconds, stream_to=call.stream.address)
    submission = Submission(new=new, said=said, repeats=Repeats(path=path, key=None, retry_count=None))
    with call.context.database.transaction() as conn:
        return create(conn, call.context, call.tenant, submission).public_id


async def _unstreamed(call: _Call, ending: Ending, answer_of: Callable[[Single], Response]) -> Response:
    """The answer where no event came. An engine that does not stream has answered whole."""
    if call.is_gone:
        return Response(status_code=_CLIENT_GONE)
    if ending.error is not None and (call.job is None or call.job.status is JobStatus.SUCCEEDED):
        status = 503 if ending.error["code"] == "service_unavailable" else 500
        headers = {"retry-after": "1"} if status == 503 else DO_NOT_RETRY
        raise ApiError(status, ending.error["code"], ending.error["message"], headers=headers)
    if call.job is None:
        with call.context.waiter.watching(call.job_id) as ended:
            call.job = await run_in_threadpool(call.look)
            if not call.job.is_terminal:
                await ended.wait()
                call.job = await run_in_threadpool(call.look)
    return answer_of(call.job)


class EventStream(Response):
    """The answer, once its first event is there. The next event is read when the client has taken the one before."""

    def __init__(self, call: _Call, first: str) -> None:
        headers = {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy would hold the events back
            "x-trunkline-instance": call.stream.instance or "",
            "x-trunkline-job": call.job_id,
        }
        super().__init__(None, 200, headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._call = call
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            item: str | Ending = self._first
            while isinstance(item, str):
                event = item if self._call.wants_usage else without_usage(item)
                if event is not None:
                    await self._send(send, f"{event}\n\n".encode("utf-8", errors="replace"))
                item = await self._call.stream.next()
            if not self._call.is_gone:
                last = _DONE if item.error is None else b"data: %b\n\n" % json.dumps({"error": item.error}).encode()
                await self._send(send, last)
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._call.close()

    async def _send(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})


def without_usage(event: str) -> str | None:
    """The event as it would be had nobody asked for the usage; None for one that would not have been sent."""
    if '"usage"' not in event:
        return event
    lines = event.split("\n")
    data = "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))
    chunk = _parsed(data)
    if not isinstance(chunk, dict) or "usage" not in chunk:
        return event
    if chunk["usage"] is not None and chunk.get("choices") == []:
        return None
    del chunk["usage"]
    others = [line for line in lines if not line.startswith("data:")]
    return "\n".join([*others, "data: " + json.dumps(chunk, separators=(",", ":"))])


def _parsed(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
