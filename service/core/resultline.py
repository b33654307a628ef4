"""A batch's result lines: one request's answer or error as a line of the output or the error file."""

from __future__ import annotations

import json
import math
from typing import Any

from service.core.model import LineErrorCode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# Of a line that no engine answered, where nobody said more.
DEFAULT_MESSAGES = {
    LineErrorCode.BATCH_EXPIRED: "The batch expired before this line was answered.",
    LineErrorCode.BATCH_CANCELLED: "The batch was cancelled before this line was answered.",
    LineErrorCode.REQUEST_TIMEOUT: "The engine did not answer in time.",
    LineErrorCode.ENGINE_CRASH: "The engine died each time it worked on this line.",
    LineErrorCode.WORKER_LOST: "The worker that held this line was lost.",
    LineErrorCode.SKIPPED_INVALID_LINE: "The line is invalid and was skipped.",
}


def answer_line(*, line_id: str, custom_id: str | None, status_code: int, request_id: str, body: bytes) -> bytes:
    """The line of a job that the engine answered: for the output file if 2xx, else for the error file.

    `body` is the engine's own. What is no JSON, and every error, comes out in the error envelope.
    """
    parsed = parse_answer(body)
    if not 200 <= status_code < 300 or parsed is None:
        parsed = error_envelope(status_code, body)
    response = {"status_code": status_code, "request_id": request_id, "body": parsed}
    return _line(line_id, custom_id, response, None)


def unanswered_line(*, line_id: str, custom_id: str | None, code: LineErrorCode, message: str) -> bytes:
    """The error line of a job that no engine answered."""
    return _line(line_id, custom_id, None, {"code": code.value, "message": message})


def skipped_line(*, line_id: str, custom_id: str | None, code: str, message: str) -> bytes:
    """The error line of an input line that was skipped; `code` is that of its validation error."""
    return unanswered_line(
        line_id=line_id,
        custom_id=custom_id,
        code=LineErrorCode.SKIPPED_INVALID_LINE,
        message=f"{code}: {message}",
    )


def parse_answer(body: bytes) -> Any:
    """An engine's JSON, None where it is none. NaN and Infinity, which engines write in logprobs, become null."""
    try:
        return json.loads(body, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def error_envelope(status_code: int, body: bytes) -> dict[str, Any]:
    """Any engine's error as `{"error": {message, type, param, code}}`; its message and status are kept.

    vLLM nests it and gives the status as an integer code; older ones put the fields at the top; FastAPI says
    `detail`; proxies send HTML.
    """
    parsed = parse_answer(body)
    found = parsed if isinstance(parsed, dict) else {}
    inner = found.get("error", found)
    if isinstance(inner, str):
        inner = {"message": inner}
    inner = inner if isinstance(inner, dict) else {}
    return {
        "error": {
            "message": _message(inner, found) or f"The engine answered with status {status_code}.",
            "type": error_type(status_code),
            "param": _text(inner.get("param")),
            "code": _text(inner.get("code")),
        }
    }


def error_type(status_code: int) -> str:
    """The envelope's `type` for a status."""
    if status_code >= 500:
        return "server_error"
    return _TYPES.get(status_code, "invalid_request_error")


def _message(inner: dict[str, Any], found: dict[str, Any]) -> str | None:
    detail = found.get("detail")
    if isinstance(detail, list):  # FastAPI's list of what is wrong, one object each
        detail = "; ".join(str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in detail)
    return _text(inner.get("message")) or _text(detail)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _line(line_id: str, custom_id: str | None, response: Any, error: Any) -> bytes:
    """Pure ASCII: a raw U+2028 breaks the line iterator of OpenAI's own SDK."""
    record = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(record, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
