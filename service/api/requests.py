"""The lines of a batch, one object each: where it stands, where it ran, what its cache gave."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import page_answer
from service.api.auth import Caller
from service.api.batches import find_batch
from service.api.context import context_of
from service.api.errors import invalid_value
from service.api.inputs import limit_of
from service.core.ids import BATCH_PREFIX, LINE_PREFIX
from service.store import requests
from service.store.requests import LineStatus, RequestLine

router = APIRouter(prefix="/v1/batches")

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1_000
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_OF_JOB = re.compile(LINE_PREFIX + r"([0-7][0-9a-f]{15})", re.ASCII)
_UNSENT = re.compile(LINE_PREFIX + r"([0-9a-f]{32})([0-7][0-9a-f]{7})", re.ASCII)


@router.get("/{batch_id}/requests")
def list_requests(batch_id: str, request: Request, tenant: Caller) -> Response:
    limit = limit_of(request, default=_DEFAULT_LIMIT, least=0, most=_MAX_LIMIT)
    status = _status(request.query_params.get("status"))
    with context_of(request).database.transaction() as conn:
        batch = find_batch(conn, tenant, batch_id)
        after = _line_no(conn, batch_id, request.query_params.get("after"))
        found: list[RequestLine] = []
        if batch.in_progress_at is not None:  # before that, what was refused may still fail the whole batch
            found = requests.request_lines(
                conn, batch_id, is_terminal=batch.status.is_terminal, status=status, after=after, limit=limit + 1
            )
    return page_answer([_object(line) for line in found], limit=limit)


def _status(said: str | None) -> LineStatus | None:
    if said is None:
        return None
    if said not in set(LineStatus):
        raise invalid_value("status", f"status must be one of {', '.join(LineStatus)}.")
    return LineStatus(said)


def _line_no(conn: sa.Connection, batch_id: str, cursor: str | None) -> int:
    """The physical line that a cursor names: the number of a line, or the id of one of this batch."""
    if cursor is None:
        return 0
    if _NUMBER.fullmatch(cursor):
        return int(cursor)
    of_job, unsent = _OF_JOB.fullmatch(cursor), _UNSENT.fullmatch(cursor)
    line_no = requests.line_no_of_job(conn, batch_id, int(of_job.group(1), 16)) if of_job else None
    if unsent and BATCH_PREFIX + unsent.group(1) == batch_id:
        line_no = int(unsent.group(2), 16)
    if line_no is None:
        raise invalid_value("after", "after must be the id or the number of a line of this batch.")
    return line_no


def _object(line: RequestLine) -> dict[str, Any]:
    return {
        "id": line.public_id,
        "line": line.line_no,
        "custom_id": line.custom_id,
        "status": line.status.value,
        "attempts": line.attempts,
        "instance": line.instance,
        "cohort": line.cohort_id,
        "predicted_cached_tokens": line.predicted_cached_tokens,
        "cached_tokens": line.cached_tokens,
        "prompt_tokens": line.prompt_tokens,
        "completion_tokens": line.completion_tokens,
        "miss_cause": line.miss_cause,
        "queue_ms": line.queue_ms,
        "run_ms": line.run_ms,
    }
