"""The transparent endpoint: an engine's own calls. Each becomes an interactive job, and its answer is the engine's."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from functools import partial

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.auth import authenticated
from service.api.cancelling import cancel
from service.api.context import Context, context_of
from service.api.creates import Repeats, repeats_of
from service.api.errors import DO_NOT_RETRY, ApiError, error_answer
from service.api.inputs import parse_object, read_body
from service.api.new_jobs import Created, Submission, check_request, create_unless_cancelled, keyed
from service.api.objects import job_error
from service.api.streaming import stream_answer
from service.core.model import Endpoint, JobStatus
from service.core.resultline import error_envelope
from service.store import singles
from service.store.singles import Single
from service.store.tenants import Tenant

router = APIRouter(prefix="/v1")

# What may name the member `stream`; most bodies do not, and are parsed in the thread that makes their job. JSON may
# write a letter as an escape too.
_STREAM = re.compile(rb'"stream"|\\u00[67][0-9a-fA-F]')

# How a job that no engine answered is said. The SDK repeats 408, 409, 429 and 5xx, so each carries x-should-retry:
# false: it was tried as often as it should be, and a repeat would only be told the same.
_STATUSES = {"job_cancelled": 409, "job_expired": 504, "request_timeout": 504, "engine_crash": 500, "worker_lost": 502}
_CLIENT_GONE = 499  # nobody reads it; the log does
_RETRY_SECONDS = "1"
_SMALL_BYTES = 65_536  # as much as the server reads ahead anyway; what is larger is read of known callers only


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One request, on its way to its answer."""

    context: Context
    tenant: Tenant
    endpoint: Endpoint
    raw: bytes
    repeats: Repeats


@router.post("/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    return await _answer(request, Endpoint.CHAT)


@router.post("/completions")
async def create_completion(request: Request) -> Response:
    return await _answer(request, Endpoint.COMPLETIONS)


@router.post("/embeddings")
async def create_embedding(request: Request) -> Response:
    return await _answer(request, Endpoint.EMBEDDINGS)


async def _answer(request: Request, endpoint: Endpoint) -> Response:
    context = context_of(request)
    # Not a dependency of the route: a small body is read first, and its job made in the same turn of a thread.
    tenant = None if _is_small(request) else await run_in_threadpool(authenticated, request)
    raw = await read_body(request, context.settings.max_line_bytes)
    if endpoint is not Endpoint.EMBEDDINGS and _STREAM.search(raw):
        if tenant is None:
            tenant = await run_in_threadpool(authenticated, request)
        said = await run_in_threadpool(parse_object, raw)
        if said.get("stream") is True:
            return await stream_answer(request, tenant, endpoint, said, answer_of)
    gone = asyncio.create_task(_gone(request))
    try:
        call, created = await run_in_threadpool(_admit, request, tenant, endpoint, raw)
        job = await _wait(call, created, gone)
        if job is not None and job.status is JobStatus.CANCELLED and created.is_repeat:
            # The call that this one repeats was given up meanwhile, at another process perhaps, and its job with it.
            job = await _wait(call, await run_in_threadpool(_create, call), gone)
    finally:
        gone.cancel()
    return Response(status_code=_CLIENT_GONE) if job is None else answer_of(job)


def _is_small(request: Request) -> bool:
    length = request.headers.get("content-length", "")
    return length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= _SMALL_BYTES


def _admit(request: Request, tenant: Tenant | None, endpoint: Endpoint, raw: bytes) -> tuple[_Call, Created]:
    call = _Call(
        context=context_of(request),
        tenant=tenant or authenticated(request),
        endpoint=endpoint,
        raw=raw,
        repeats=repeats_of(request),
    )
    return call, _create(call)


def _create(call: _Call) -> Created:
    said = parse_object(call.raw)
    check_request(said, call.endpoint, at="")
    new = keyed(call.context, call.tenant, said, call.endpoint, at="")
    new = replace(new, deadline_seconds=call.context.settings.answer_seconds, is_waited_for=True)
    submission = Submission(new=new, said=said, repeats=call.repeats)
    with call.context.database.transaction() as conn:
        return create_unless_cancelled(conn, call.context, call.tenant, submission)


async def _gone(request: Request) -> None:
    """Returns when the client has gone away. The body was read: all that can come is that."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _wait(call: _Call, created: Created, gone: asyncio.Task[None]) -> Single | None:
    """The job, ended. None: the client went away, and the job with it, unless another call waits for it here."""
    waiter = call.context.waiter
    job_id = created.public_id
    with waiter.watching(job_id) as ended:
        job = await _ended(call, created, ended, gone)
    if job is None and not waiter.is_watched(job_id):
        await run_in_threadpool(cancel, call.context, call.tenant, job_id)
    return job


async def _ended(call: _Call, created: Created, ended: asyncio.Event, gone: asyncio.Task[None]) -> Single | None:
    look = partial(_look, call, created.public_id)
    if created.is_repeat:  # it may have ended before anybody watched
        job = await run_in_threadpool(look)
        if job.is_terminal:
            return job
    ending = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait((ending, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
    if not ended.is_set():
        return None
    job = await run_in_threadpool(look)
    if not job.is_terminal:  # this process is about to end; the job goes on, and a repeat finds it
        raise _unavailable("The server is restarting.")
    return job


def _look(call: _Call, job_id: str) -> Single:
    with call.context.database.transaction() as conn:
        job = singles.get_single(conn, call.tenant.id, job_id)
    if job is None:  # Postgres crashed in the moment after the create
        raise _unavailable("The job was lost; try again.")
    return job


def _unavailable(message: str) -> ApiError:
    return ApiError(503, "service_unavailable", message, headers={"retry-after": _RETRY_SECONDS})


def answer_of(job: Single) -> Response:
    """What the engine said of an ended job: a success byte for byte, an error with its status, in the envelope."""
    if job.status_code is None:
        return _unanswered(job)
    headers = {}
    if job.instance is not None:
        headers["x-trunkline-instance"] = job.instance
    if job.usage.cached_tokens is not None:
        headers["x-trunkline-cached-tokens"] = str(job.usage.cached_tokens)
    body = job.response or b""
    if 200 <= job.status_code < 300:
        return Response(body, job.status_code, headers, media_type="application/json")
    return json_answer(error_envelope(job.status_code, body), job.status_code, {**headers, **DO_NOT_RETRY})


def _unanswered(job: Single) -> Response:
    error = job_error(job)
    assert error is not None, "it has ended, and no engine answered it"
    status = _STATUSES.get(error["code"], 500)
    return error_answer(ApiError(status, error["code"], error["message"], headers=DO_NOT_RETRY))
