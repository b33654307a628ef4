"""Batches: create, read, page, cancel, and their results while they run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, BackgroundTasks
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer, page_answer
from service.api.auth import Caller
from service.api.context import Context, context_of
from service.api.creates import Repeats, repeats_of
from service.api.errors import DO_NOT_RETRY, ApiError, invalid_type, invalid_value, not_found
from service.api.inputs import (
    MAX_CREATE_BYTES,
    JsonObject,
    after_of,
    limit_of,
    metadata_of,
    output_expiry_of,
    parse_object,
    read_body,
    required,
    text,
)
from service.api.objects import batch_object
from service.core.ids import BATCH_PREFIX, FILE_PREFIX, is_id
from service.core.model import BatchStatus, Endpoint, Priority, TaskKind
from service.settings import Settings
from service.store import batches, files, quotas
from service.store.batches import Activity, Batch, NewBatch, Progress
from service.store.clock import new_id
from service.store.control import create_task
from service.store.files import File, Purpose
from service.store.outlook import Outlook, outlook_of
from service.store.tenants import Tenant

router = APIRouter(prefix="/v1/batches")

_MAX_LIMIT = 100
_WINDOW = re.compile(r"([0-9]{1,7})([mhd])")
_UNIT_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}
_CHOICES: dict[str, tuple[str, ...]] = {
    "priority": ("normal", "low", "high"),  # the first is the default
    "on_invalid_line": ("fail", "skip"),
    "order": ("any", "input"),
    "model_policy": ("mixed", "strict"),
}


@router.post("")
async def create_batch(request: Request, tenant: Caller, background: BackgroundTasks) -> Response:
    context = context_of(request)
    raw = await read_body(request, MAX_CREATE_BYTES)
    repeats = repeats_of(request)
    task_id, answer = await run_in_threadpool(_create, context, tenant, raw, repeats)
    if task_id is not None:
        background.add_task(context.hint, task_id)  # after the answer: the broker's troubles are not the client's
    answer.background = background
    return answer


def _create(context: Context, tenant: Tenant, raw: bytes, repeats: Repeats) -> tuple[int | None, Response]:
    body = parse_object(raw)
    new = new_batch_of(body, context.settings)
    with context.database.transaction() as conn:
        wanted_id = new_id(conn, BATCH_PREFIX)
        batch_id = repeats.claim(conn, tenant.id, body, wanted_id)
        if batch_id != wanted_id:
            return None, _answer(conn, tenant, batch_id)
        check_input(conn, context, tenant, new.input_file_id)
        check_quota(conn, context, tenant)
        batch = batches.create_batch(conn, tenant.id, new, batch_id)
        task_id = create_task(conn, TaskKind.INTAKE, batch.id, is_hinted=True)
    return task_id, json_answer(batch_object(batch, Progress(), Activity()))


def new_batch_of(body: JsonObject, settings: Settings) -> NewBatch:
    """The create body, judged. Raises ApiError for the first thing that is wrong."""
    required(body, "input_file_id", "endpoint", "completion_window")
    input_file_id, endpoint, window = (text(body, name) for name in ("input_file_id", "endpoint", "completion_window"))
    metadata = metadata_of(body)
    if endpoint not in set(Endpoint):
        raise invalid_value("endpoint", f"endpoint must be one of {', '.join(Endpoint)}.")
    choices = _choices(body)
    return NewBatch(
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=window,
        window_seconds=window_seconds_of(window, settings.max_window_days),
        metadata=metadata,
        priority=Priority[choices["priority"].upper()],
        on_invalid_line=choices["on_invalid_line"],
        line_order=choices["order"],
        model_policy=choices["model_policy"],
        output_expires_after_seconds=output_expiry_of(body),
    )


def _choices(body: JsonObject) -> dict[str, str]:
    queue = body.get("queue")
    if queue is None:
        queue = {}
    if not isinstance(queue, dict):
        raise invalid_type("queue", "queue must be an object.")
    chosen = {}
    for name, allowed in _CHOICES.items():
        value = queue.get(name)
        if value is not None and value not in allowed:
            raise invalid_value(f"queue.{name}", f"queue.{name} must be one of {', '.join(allowed)}.")
        chosen[name] = allowed[0] if value is None else value
    return chosen


def priority_of(value: object) -> Priority:
    """Raises ApiError for what is no class of a batch."""
    if value not in _CHOICES["priority"]:
        raise invalid_value("queue.priority", f"queue.priority must be one of {', '.join(_CHOICES['priority'])}.")
    return Priority[str(value).upper()]


def window_seconds_of(window: str, max_days: int) -> int:
    """Raises ApiError for a completion_window that is none, or too long."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match.group(1)) * _UNIT_SECONDS[match.group(2)] if match else 0
    if not 0 < seconds <= max_days * 86_400:
        message = f"completion_window is a number with m, h or d, such as 24h, and at most {max_days}d."
        raise invalid_value("completion_window", message)
    return seconds


def check_input(conn: sa.Connection, context: Context, tenant: Tenant, file_id: str) -> File:
    """The file, which is there, ours, of the right purpose, and its bytes can be read. Raises ApiError, StoreFailed."""
    file = files.get_file(conn, tenant.id, file_id, keep=True) if is_id(FILE_PREFIX, file_id) else None
    if file is None:
        raise not_found("input_file_id")
    if file.purpose != Purpose.BATCH:
        raise ApiError(400, "invalid_purpose", "The file's purpose must be 'batch'.", param="input_file_id")
    if file.is_expired:
        raise ApiError(404, "file_expired", "The file has expired.", param="input_file_id")
    context.blobs.size(file.store_path)
    return file


def check_quota(conn: sa.Connection, context: Context, tenant: Tenant) -> None:
    """Raises ApiError 429 where as much is queued of the tenant as may be. It takes long to drain: the header says so,
    and an SDK does not sit and wait for it by itself."""
    has = quotas.standing(conn, tenant.id, quotas.default_quota(context.settings))
    if has.is_full:
        message = (
            f"{has.lines} lines and {has.tokens} tokens are queued, {has.quota.lines} and {has.quota.tokens} may be."
        )
        raise ApiError(429, "queue_full", message, headers={"retry-after": "120", **DO_NOT_RETRY})


@router.get("")
def list_batches(request: Request, tenant: Caller) -> Response:
    limit = limit_of(request, default=20, least=0, most=_MAX_LIMIT)
    after = after_of(request, BATCH_PREFIX)
    with context_of(request).database.transaction() as conn:
        found = batches.list_batches(conn, tenant.id, after=after, limit=limit + 1)
        return page_answer(_objects(conn, found), limit=limit)


@router.get("/{batch_id}")
def get_batch(batch_id: str, request: Request, tenant: Caller) -> Response:
    with context_of(request).database.transaction() as conn:
        return _answer(conn, tenant, batch_id)


@router.post("/{batch_id}/cancel")
def cancel_batch(batch_id: str, request: Request, tenant: Caller, background: BackgroundTasks) -> Response:
    context = context_of(request)
    with context.database.transaction() as conn:
        find_batch(conn, tenant, batch_id)
        if batches.request_cancel(conn, batch_id):
            background.add_task(context.hint, create_task(conn, TaskKind.CANCEL, batch_id, is_hinted=True))
        batch = find_batch(conn, tenant, batch_id)
        if batch.status.is_terminal and batch.status is not BatchStatus.CANCELLED:
            message = f"The batch is {batch.status} already."
            raise ApiError(409, "batch_not_cancellable", message, param="batch_id")
        answer = json_answer(_objects(conn, [batch])[0])
    answer.background = background
    return answer


def find_batch(conn: sa.Connection, tenant: Tenant, batch_id: str) -> Batch:
    """Raises ApiError 404, also for another tenant's."""
    batch = batches.get_batch(conn, tenant.id, batch_id) if is_id(BATCH_PREFIX, batch_id) else None
    if batch is None:
        raise not_found("batch_id")
    return batch


def object_of(conn: sa.Connection, batch: Batch) -> dict[str, Any]:
    return _objects(conn, [batch])[0]


def _answer(conn: sa.Connection, tenant: Tenant, batch_id: str) -> Response:
    return json_answer(object_of(conn, find_batch(conn, tenant, batch_id)))


def _objects(conn: sa.Connection, found: Sequence[Batch]) -> list[dict[str, Any]]:
    sums = batches.progress_of(conn, [batch.id for batch in found])
    doing = batches.activity_of(conn, [batch.id for batch in found if not batch.status.is_terminal])
    ahead = outlook_of(conn, found, sums)
    return [
        batch_object(
            batch,
            sums.get(batch.id, Progress()),
            doing.get(batch.id, Activity()),
            ahead.get(batch.id, Outlook()),
        )
        for batch in found
    ]
