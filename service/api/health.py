"""Health: whether the process answers, and whether what it needs does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.context import Context, context_of
from service.api.errors import envelope
from service.errors import TrunklineError

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    return json_answer({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """503 without the database or the file store; a broker that is down only delays work."""
    # Not in a thread of the routes' pool: all of those may wait for a database that hangs.
    return await asyncio.to_thread(_readyz, context_of(request))


def _readyz(context: Context) -> Response:
    parts = {
        "database": _state(context.database.check),
        "store": _state(context.blobs.check),
        "broker": _state(context.publisher.check),
    }
    down = [name for name in ("database", "store") if parts[name] == "down"]
    if down:
        error = envelope(503, "service_unavailable", f"Down: {', '.join(down)}.")
        return json_answer({"status": "down", **parts, **error}, 503)
    return json_answer({"status": "degraded" if parts["broker"] == "down" else "ok", **parts})


def _state(check: Callable[[], None]) -> str:
    """Up or down; the cause, which may name hosts, is for the log of whoever needs that part."""
    try:
        check()
    except TrunklineError:
        return "down"
    return "up"
