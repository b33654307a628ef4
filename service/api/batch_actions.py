"""What a producer does with a batch that is there: change it, delete it, have its unanswered lines tried again."""

from __future__ import annotations

import sqlalchemy as sa
from fastapi import APIRouter, BackgroundTasks
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.auth import Caller
from service.api.batches import find_batch, object_of, priority_of, window_seconds_of
from service.api.context import Context, context_of
from service.api.creates import Repeats, repeats_of
from service.api.errors import ApiError, invalid_type, invalid_value, not_found
from service.api.inputs import MAX_CREATE_BYTES, JsonObject, parse_object, read_body, text
from service.api.retries import retry_batch
from service.core.model import TaskKind
from service.settings import Settings
from service.store import deleting
from service.store.changes import Change, ChangeOutcome, change_batch
from service.store.control import create_task
from service.store.tenants import Tenant

router = APIRouter(prefix="/v1/batches")


@router.patch("/{batch_id}")
async def patch_batch(batch_id: str, request: Request, tenant: Caller) -> Response:
    raw = await read_body(request, MAX_CREATE_BYTES)
    return await run_in_threadpool(_patch, context_of(request), tenant, batch_id, raw)


def _patch(context: Context, tenant: Tenant, batch_id: str, raw: bytes) -> Response:
    change = _change(parse_object(raw), context.settings)

    def patch(conn: sa.Connection) -> Response:
        find_batch(conn, tenant, batch_id)
        _check(change_batch(conn, batch_id, change))
        return json_answer(object_of(conn, find_batch(conn, tenant, batch_id)))

    return context.database.run(patch)


def _change(body: JsonObject, settings: Settings) -> Change:
    """Raises ApiError. What is absent or null stays as it is."""
    queue = body.get("queue")
    if queue is None:
        queue = {}
    if not isinstance(queue, dict):
        raise invalid_type("queue", "queue must be an object.")
    paused = queue.get("paused")
    if paused is not None and not isinstance(paused, bool):
        raise invalid_value("queue.paused", "queue.paused must be true or false.")
    priority = None if queue.get("priority") is None else priority_of(queue["priority"])
    window = None if body.get("completion_window") is None else text(body, "completion_window")
    return Change(
        priority=priority,
        paused=paused,
        completion_window=window,
        window_seconds=None if window is None else window_seconds_of(window, settings.max_window_days),
    )


def _check(outcome: ChangeOutcome) -> None:
    if outcome is ChangeOutcome.PAST:
        raise invalid_value("completion_window", "That long after its creation the batch would have expired already.")
    if outcome is ChangeOutcome.EXPIRING:
        raise ApiError(409, "batch_terminal", "The batch's deadline has passed; it is expiring.", param="batch_id")
    if outcome is ChangeOutcome.ENDED:
        raise ApiError(409, "batch_terminal", "The batch has ended.", param="batch_id")


@router.delete("/{batch_id}")
def delete_batch(batch_id: str, request: Request, tenant: Caller, background: BackgroundTasks) -> Response:
    """Gone for its producer when this answers; control work removes the rows."""
    context = context_of(request)
    with context.database.transaction() as conn:
        find_batch(conn, tenant, batch_id)
        if not deleting.lock_undeleted(conn, batch_id, to_delete=True):
            raise not_found("batch_id")
        batch = find_batch(conn, tenant, batch_id)
        if not batch.status.is_terminal:
            message = f"The batch is {batch.status}; cancel it first."
            raise ApiError(409, "batch_not_terminal", message, param="batch_id")
        background.add_task(context.hint, create_task(conn, TaskKind.DELETE, batch_id, is_hinted=True))
    answer = json_answer({"id": batch_id, "object": "batch", "deleted": True})
    answer.background = background
    return answer


@router.post("/{batch_id}/retry")
async def retry(batch_id: str, request: Request, tenant: Caller, background: BackgroundTasks) -> Response:
    context = context_of(request)
    raw = await read_body(request, MAX_CREATE_BYTES)
    repeats = repeats_of(request)
    task_id, answer = await run_in_threadpool(_retry, context, tenant, batch_id, raw, repeats)
    if task_id is not None:
        background.add_task(context.hint, task_id)
    answer.background = background
    return answer


def _retry(
    context: Context, tenant: Tenant, batch_id: str, raw: bytes, repeats: Repeats
) -> tuple[int | None, Response]:
    """A body is not needed; where there is one it is a JSON object, and part of what a repeat must repeat."""
    body = parse_object(raw) if raw.strip() else {}
    shown, task_id = retry_batch(context, tenant, batch_id, body, repeats)
    return task_id, json_answer(shown)
