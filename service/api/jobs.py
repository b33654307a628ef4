"""Single jobs: submit, poll (also long), page, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer, page_answer
from service.api.auth import Caller
from service.api.cancelling import cancel
from service.api.context import Context, context_of
from service.api.creates import Repeats, repeats_of
from service.api.errors import ApiError, not_found
from service.api.inputs import after_of, limit_of, parse_object, read_body, seconds_of
from service.api.new_jobs import Submission, create, judge_submit
from service.api.objects import job_object
from service.core.ids import JOB_PREFIX, is_id
from service.store import singles
from service.store.session import DATABASE_AWAY
from service.store.singles import Single
from service.store.tenants import Tenant

router = APIRouter(prefix="/v1/jobs")

_MAX_LIMIT = 100
_MAX_WAIT_SECONDS = 60
_ENVELOPE_BYTES = 65_536  # what a create may be larger than a line of a batch


@router.post("")
async def create_job(request: Request, tenant: Caller) -> Response:
    """202 with the job; with `?wait=N` once it has ended, or as it is after N seconds."""
    context = context_of(request)
    wait_seconds = seconds_of(request, "wait", most=_MAX_WAIT_SECONDS)
    raw = await read_body(request, context.settings.max_line_bytes + _ENVELOPE_BYTES)
    repeats = repeats_of(request)
    job = await run_in_threadpool(_create, context, tenant, raw, repeats)
    if wait_seconds:
        with suppress(*DATABASE_AWAY):  # it is created: a 503 would say that nothing was
            job = await _poll(context, job.public_id, wait_seconds, partial(_look, context, tenant, job.public_id))
    return json_answer(job_object(job), 202, {"location": f"/v1/jobs/{job.public_id}"})


def _create(context: Context, tenant: Tenant, raw: bytes, repeats: Repeats) -> Single:
    said = parse_object(raw)
    submission = Submission(new=judge_submit(context, tenant, said), said=said, repeats=repeats)
    with context.database.transaction() as conn:
        return _find(conn, tenant, create(conn, context, tenant, submission).public_id)


@router.get("")
def list_jobs(request: Request, tenant: Caller) -> Response:
    limit = limit_of(request, default=20, least=0, most=_MAX_LIMIT)
    after = after_of(request, JOB_PREFIX)
    with context_of(request).database.transaction() as conn:
        found = singles.list_singles(conn, tenant.id, after=after, limit=limit + 1)
    return page_answer([job_object(job) for job in found], limit=limit)


@router.get("/{job_id}")
async def get_job(job_id: str, request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    wait_seconds = seconds_of(request, "wait", most=_MAX_WAIT_SECONDS)
    job = await _poll(context, job_id, wait_seconds, partial(_look, context, tenant, job_id))
    return json_answer(job_object(job))


def _look(context: Context, tenant: Tenant, job_id: str) -> Single:
    with context.database.transaction() as conn:
        return _find(conn, tenant, job_id)


async def _poll(context: Context, job_id: str, wait_seconds: int, look: Callable[[], Single]) -> Single:
    """The job once it has ended, or as it is after `wait_seconds`."""
    if wait_seconds == 0:
        return await run_in_threadpool(look)
    with context.waiter.watching(job_id) as ended:
        job = await run_in_threadpool(look)
        if job.is_terminal:
            return job
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await ended.wait()
    return await run_in_threadpool(look)


@router.post("/{job_id}/cancel")
def cancel_job(job_id: str, request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    _look(context, tenant, job_id)
    job = cancel(context, tenant, job_id)
    if job is None:
        raise ApiError(409, "job_not_cancellable", "The job has ended already.", param="job_id")
    return json_answer(job_object(job))


def _find(conn: sa.Connection, tenant: Tenant, job_id: str) -> Single:
    job = singles.get_single(conn, tenant.id, job_id) if is_id(JOB_PREFIX, job_id) else None
    if job is None:
        raise not_found("job_id")
    return job
