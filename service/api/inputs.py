"""What requests carry, judged by hand: each refusal names the code and the field that the contract asks for."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request

from service.api.errors import ApiError, invalid_type, invalid_value, missing
from service.core import strictjson
from service.core.ids import is_id

JsonObject = dict[str, Any]

MAX_CREATE_BYTES = 1_000_000  # of a body that carries no prompt: metadata at its largest is 9 kB
_MIN_EXPIRY_SECONDS, _MAX_EXPIRY_SECONDS = 3_600, 2_592_000
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_IDEMPOTENCY_KEY = 255
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is over the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise ApiError(413, "request_too_large", f"The body is larger than {limit_bytes} bytes.")
    return bytes(body)


def parse_object(raw: bytes) -> JsonObject:
    """The JSON object that a body is. NUL stays legal here: prompts may hold it."""
    try:
        value = strictjson.loads(raw)
    except strictjson.NotJson as error:
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}.") from error
    except strictjson.AmbiguousJson as error:
        param = re.split(r"[.\[]", error.path, maxsplit=1)[0] or None
        raise ApiError(400, "invalid_value", str(error), param=param) from error
    if not isinstance(value, dict):
        raise invalid_type(None, "The body must be a JSON object.")
    return value


def required(body: JsonObject, *names: str) -> None:
    """All of these are there, and not null."""
    for name in names:
        if body.get(name) is None:
            raise missing(name)


def text(body: JsonObject, name: str) -> str:
    value = body[name]
    if not isinstance(value, str):
        raise invalid_type(name, f"'{name}' must be a string.")
    return value


def metadata_of(body: JsonObject) -> dict[str, str] | None:
    value = body.get("metadata")
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise invalid_type("metadata", "metadata must be an object whose values are strings.")
    is_large = len(value) > _MAX_PAIRS or any(len(k) > _MAX_KEY or len(v) > _MAX_VALUE for k, v in value.items())
    if is_large:
        message = f"metadata: at most {_MAX_PAIRS} pairs, keys of {_MAX_KEY} and values of {_MAX_VALUE} characters."
        raise ApiError(400, "metadata_too_large", message, param="metadata")
    if any("\0" in item for pair in value.items() for item in pair):
        raise invalid_value("metadata", "metadata must not hold NUL.")
    return value


def output_expiry_of(body: JsonObject) -> int | None:
    """Seconds, from `output_expires_after`."""
    name = "output_expires_after"
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_type(name, f"{name} must be an object.")
    seconds = value.get("seconds")
    if seconds is not None and (not isinstance(seconds, int) or isinstance(seconds, bool)):
        raise invalid_type(name, f"{name}.seconds must be an integer.")
    return checked_expiry(name, value.get("anchor"), seconds)


def checked_expiry(param: str, anchor: object, seconds: int | None) -> int:
    if anchor != "created_at":
        raise invalid_value(param, f"{param}: the anchor must be created_at.")
    if seconds is None or not _MIN_EXPIRY_SECONDS <= seconds <= _MAX_EXPIRY_SECONDS:
        raise invalid_value(param, f"{param}: seconds from {_MIN_EXPIRY_SECONDS} to {_MAX_EXPIRY_SECONDS}.")
    return seconds


def limit_of(request: Request, *, default: int, least: int, most: int) -> int:
    return _integer(request, "limit", default=default, least=least, most=most)


def seconds_of(request: Request, name: str, *, most: int) -> int:
    return _integer(request, name, default=0, least=0, most=most)


def _integer(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if not _INTEGER.fullmatch(raw) or not least <= int(raw) <= most:
        raise invalid_value(name, f"{name} must be an integer from {least} to {most}.")
    return int(raw)


def after_of(request: Request, prefix: str) -> str | None:
    after = request.query_params.get("after")
    if after is not None and not is_id(prefix, after):
        raise invalid_value("after", f"after must be an id that begins with {prefix}.")
    return after


def idempotency_key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if not key:
        return None
    if len(key) > _MAX_IDEMPOTENCY_KEY or not key.isprintable():
        message = f"An Idempotency-Key has at most {_MAX_IDEMPOTENCY_KEY} printable characters."
        raise invalid_value("Idempotency-Key", message)
    return key
