"""The border to httpx: from a call to a request's arguments, from an answer or a failure to Reply or Unreachable."""

from __future__ import annotations

from typing import Any

import httpx

from trunkline._requests import Call, Reply
from trunkline._retry import Unreachable
from trunkline.config import Config

DEFAULT_TIMEOUT_SECONDS = 60.0  # per connect, read or write of a request, not for the whole of it
DEFAULT_MAX_RETRIES = 4


def request_arguments(call: Call[Any], config: Config, timeout_seconds: float) -> dict[str, Any]:
    """Arguments of `httpx.Client.request`. An upload's file is rewound, so every try sends all of it."""
    arguments: dict[str, Any] = {
        "method": call.method,
        "url": config.base_url + call.path,
        "params": dict(call.params),
        "headers": {"user-agent": "trunkline-python", **_authorization(config), **call.headers},
        "timeout": httpx.Timeout(timeout_seconds, read=timeout_seconds + call.wait_seconds),
    }
    if call.json is not None:
        arguments["json"] = call.json
    if call.upload is not None:
        call.upload.file.seek(0)
        part = (call.upload.filename, call.upload.file, "application/octet-stream")
        arguments |= {"files": {"file": part}, "data": dict(call.upload.fields)}
    return arguments


def reply_of(response: httpx.Response) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(status_code=response.status_code, headers=headers, body=response.content)


def unreachable(error: httpx.RequestError) -> Unreachable:
    """Says what broke; httpx's own text is often empty."""
    what = str(error) or type(error).__name__
    return Unreachable(cause=f"time-out ({what})" if isinstance(error, httpx.TimeoutException) else what)


def _authorization(config: Config) -> dict[str, str]:
    return {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
