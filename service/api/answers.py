"""JSON answers, and the page that every list is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Pure ASCII: an engine's answer may hold half a surrogate pair, which no UTF-8 can carry."""
    body = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(body, status, dict(headers or {}), media_type="application/json")


def page_answer(items: Sequence[Mapping[str, Any]], *, limit: int) -> Response:
    """`items` holds one more than `limit` where there is a further page."""
    data = list(items[:limit])
    return json_answer(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": 0 < limit < len(items),
        }
    )
