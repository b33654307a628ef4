"""A batch's result lines while it runs: JSONL in the order they were recorded, behind a cursor that loses none."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.auth import Caller
from service.api.batches import find_batch
from service.api.context import context_of
from service.api.errors import invalid_value
from service.api.inputs import limit_of
from service.export import refused_line, result_line
from service.store.outputs import RefusedLine
from service.store.recorded import Position, Recorded, recorded_lines

router = APIRouter(prefix="/v1/batches")

_DEFAULT_LIMIT, _MAX_LIMIT = 1_000, 10_000
_PAGE_BYTES = 8 * 2**20  # of answers; a page ends with the line that passes it
_CURSOR = re.compile(r"([0-9a-f]{1,16})-([01])-([0-9a-f]{1,16})")
_MAX_NUMBER = 2**63 - 1


@router.get("/{batch_id}/results")
def read_results(batch_id: str, request: Request, tenant: Caller) -> Response:
    limit = limit_of(request, default=_DEFAULT_LIMIT, least=0, most=_MAX_LIMIT)
    after = _position(request.query_params.get("after"))
    with context_of(request).database.transaction() as conn:
        batch = find_batch(conn, tenant, batch_id)  # its status is read before its lines: see `recorded`
        is_terminal = batch.status.is_terminal
        found: list[Recorded] = []
        if batch.in_progress_at is not None:  # before that, what was refused may still fail the whole batch
            found = recorded_lines(
                conn, batch_id, after=after, limit=limit, max_bytes=_PAGE_BYTES, is_terminal=is_terminal
            )
    headers = {"x-next-after": _cursor(found[-1].position if found else after)}
    if not is_terminal:
        headers["x-incomplete"] = "true"
    body = b"".join(_line(batch_id, item) for item in found)
    return Response(body, headers=headers, media_type="application/jsonl")


def _line(batch_id: str, item: Recorded) -> bytes:
    if isinstance(item.line, RefusedLine):
        return refused_line(batch_id, item.line)
    return result_line(item.line)


def _cursor(position: Position) -> str:
    return f"{position.xid:x}-{position.kind}-{position.number:x}"


def _position(cursor: str | None) -> Position:
    if cursor is None:
        return Position()
    match = _CURSOR.fullmatch(cursor)
    xid, kind, number = (int(part, 16) for part in match.groups()) if match else (-1, 0, 0)
    if not 0 <= xid <= _MAX_NUMBER or number > _MAX_NUMBER:
        raise invalid_value("after", "after must be the X-Next-After of an earlier page.")
    return Position(xid=xid, kind=kind, number=number)
