"""Single jobs: submit, poll (also long), page, cancel."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer, page_answer
from service.api.auth import Caller
from service.api.batches import check_quota
from service.api.context import Context, context_of
from service.api.creates import Repeats, repeats_of
from service.api.errors import ApiError, invalid_type, invalid_value, not_found
from service.api.inputs import (
    JsonObject,
    after_of,
    limit_of,
    metadata_of,
    parse_object,
    read_body,
    required,
    seconds_of,
    text,
)
from service.api.objects import job_object
from service.core import strictjson
from service.core.batchfile import LineCode, check_body, strip_body
from service.core.ids import JOB_PREFIX, is_id
from service.core.model import Endpoint, Priority
from service.fleet import Model
from service.store import singles
from service.store.clock import new_id
from service.store.singles import NewSingle, Single
from service.store.tenants import Tenant

router = APIRouter(prefix="/v1/jobs")

_MAX_LIMIT = 100
_MAX_WAIT_SECONDS = 60
_MAX_DEADLINE_SECONDS = 30 * 86_400
_MAX_URL = 2_048
_ENVELOPE_BYTES = 65_536  # what a create may be larger than a line of a batch


@router.post("")
async def create_job(request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    raw = await read_body(request, context.settings.max_line_bytes + _ENVELOPE_BYTES)
    repeats = repeats_of(request)
    return await run_in_threadpool(_create, context, tenant, raw, repeats)


def _create(context: Context, tenant: Tenant, raw: bytes, repeats: Repeats) -> Response:
    body = parse_object(raw)
    new = _new_single(context, tenant, body)
    with context.database.transaction() as conn:
        wanted_id = new_id(conn, JOB_PREFIX)
        job_id = repeats.claim(conn, tenant.id, body, wanted_id)
        if job_id == wanted_id:
            check_quota(conn, context, tenant)
            singles.create_single(conn, tenant.id, job_id, new)
        job = _find(conn, tenant, job_id)
    return json_answer(job_object(job), 202, {"location": f"/v1/jobs/{job_id}"})


def _new_single(context: Context, tenant: Tenant, body: JsonObject) -> NewSingle:
    """The job, judged as a line of a batch would be, and tokenised. Raises ApiError."""
    required(body, "endpoint", "body")
    endpoint = text(body, "endpoint")
    if endpoint not in set(Endpoint):
        raise invalid_value("endpoint", f"endpoint must be one of {', '.join(Endpoint)}.")
    error = check_body(body["body"], endpoint=endpoint)
    if error is not None:
        code = "invalid_type" if error.code is LineCode.INVALID_REQUEST else error.code.value
        raise ApiError(400, code, error.message, param=error.param)
    priority, deadline_seconds = _priority(body), _deadline_seconds(body)
    metadata, webhook_url = metadata_of(body), _webhook_url(body)
    request_body = strip_body(body["body"])
    model = _model(context, request_body["model"], endpoint)
    keyed = context.tokenizing.key(request_body["model"], endpoint, request_body, salt=tenant.salt)
    return NewSingle(
        endpoint=endpoint,
        model=model.name,
        body=strictjson.dumps(request_body),
        prefix_key=keyed.prefix_key,
        prompt_tokens=keyed.prompt_tokens,
        predicted_output_tokens=keyed.output_tokens,
        priority=priority,
        deadline_seconds=deadline_seconds,
        metadata=metadata,
        webhook_url=webhook_url,
    )


def _model(context: Context, name: str, endpoint: str) -> Model:
    model = context.models.resolve(name)
    if model is None or endpoint not in model.endpoints:
        where = "" if model is None else f" at {endpoint}"
        message = f"The model '{strictjson.printable(name)}' is not served{where}."
        raise ApiError(404, "model_not_found", message, param="body.model")
    return model


def _priority(body: JsonObject) -> Priority:
    value = body.get("priority")
    if value is None:
        return Priority.INTERACTIVE
    labels = {priority.label: priority for priority in Priority}
    if not isinstance(value, str) or value not in labels:
        raise invalid_value("priority", f"priority must be one of {', '.join(labels)}.")
    return labels[value]


def _deadline_seconds(body: JsonObject) -> float | None:
    value = body.get("deadline_seconds")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid_type("deadline_seconds", "deadline_seconds must be a number.")
    if not 0 < value <= _MAX_DEADLINE_SECONDS or not math.isfinite(value):
        raise invalid_value("deadline_seconds", f"deadline_seconds: above 0, at most {_MAX_DEADLINE_SECONDS}.")
    return float(value)


def _webhook_url(body: JsonObject) -> str | None:
    """Kept with the job. Which addresses may be called is judged when it is."""
    if body.get("webhook_url") is None:
        return None
    url = text(body, "webhook_url")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or len(url) > _MAX_URL:
        raise invalid_value("webhook_url", f"webhook_url is an http or https URL of at most {_MAX_URL} characters.")
    return url


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

    def look() -> Single:
        with context.database.transaction() as conn:
            return _find(conn, tenant, job_id)

    return json_answer(job_object(await _poll(context, job_id, wait_seconds, look)))


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
    with context_of(request).database.transaction() as conn:
        job = _find(conn, tenant, job_id)
        if job.is_terminal or not singles.request_cancel(conn, job):
            raise ApiError(409, "job_not_cancellable", "The job has ended already.", param="job_id")
        job = _find(conn, tenant, job_id)
    return json_answer(job_object(job))


def _find(conn: sa.Connection, tenant: Tenant, job_id: str) -> Single:
    job = singles.get_single(conn, tenant.id, job_id) if is_id(JOB_PREFIX, job_id) else None
    if job is None:
        raise not_found("job_id")
    return job
