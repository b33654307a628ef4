"""Talking to an OpenAI-compatible engine over HTTP: submit, tokenize, and what it says of itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import orjson

from service.core.model import Endpoint
from service.core.resultline import parse_answer
from service.core.usage import UNKNOWN, read_usage
from workers.engines.base import EngineGone, EngineReply, EngineRequest, EngineTimeout, EventSink
from workers.engines.events import relay_answer, streaming_fields

_CONNECT_SECONDS = 10.0
QUESTION_SECONDS = 30.0  # /health, /metrics and the like; a busy CPU engine may hold its loop for some seconds
# What of a chat body alters the prompt, as vLLM's /tokenize names it.
_CHAT_TOKENIZE_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)

_NO_ANSWER = orjson.dumps(
    {
        "error": {
            "message": "The engine answered success without a JSON object.",
            "type": "server_error",
            "param": None,
            "code": "bad_engine_answer",
        }
    }
)


class EngineHttp:
    """One engine's HTTP side. `salt` and `priority` say which of our own fields it is sent."""

    def __init__(self, url: str, *, api_key: str | None = None, through_proxies: bool = False) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.salt = False
        self.priority = False
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            trust_env=through_proxies,
            # The feeder bounds what is in flight; a pool limit below it would hide requests from the engine's queue.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            timeout=httpx.Timeout(QUESTION_SECONDS, connect=_CONNECT_SECONDS),
        )

    async def submit(self, request: EngineRequest) -> EngineReply:
        """The engine's answer. Raises EngineTimeout, and EngineGone where the connection failed.

        Cancelling closes the connection, which makes vLLM abort the request.
        """
        fields: dict[str, object] = {}
        if self.salt and request.salt:
            fields["cache_salt"] = request.salt
        if self.priority:
            fields["priority"] = request.priority
        # The priority holds the feeder's sequence number, so no two submissions share an id.
        request_id = f"job-{request.job_id}-{request.priority}"
        if request.events is not None:
            return await self._stream(request, request.events, fields, request_id)
        reply = await self._post(request.endpoint, request.body, fields, request.timeout_seconds, request_id)
        return _whole(request, reply)

    async def _stream(
        self, request: EngineRequest, events: EventSink, fields: dict[str, object], request_id: str
    ) -> EngineReply:
        """Relay the events as they come. An engine that answers with JSON did not stream: an error, as a rule."""
        content = with_fields(request.body, {**fields, **streaming_fields(request.body)})
        headers = {"content-type": "application/json", "x-request-id": request_id}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        asked = self._client.stream("POST", request.endpoint, content=content, headers=headers, timeout=timeout)
        with _named_failures(request.timeout_seconds):
            async with asyncio.timeout(request.timeout_seconds), asked as reply:
                if not (reply.is_success and reply.headers.get("content-type", "").startswith("text/event-stream")):
                    await reply.aread()
                    return _whole(request, reply)
                prompts = count_prompts(request.endpoint, request.body)
                return await relay_answer(reply.aiter_bytes(), request.endpoint, events, prompts=prompts)

    async def post(
        self, path: str, body: bytes, fields: Mapping[str, object], timeout_seconds: float
    ) -> tuple[int, bytes]:
        """POST a JSON body with our fields put over it, whatever it held under those names."""
        reply = await self._post(path, body, fields, timeout_seconds, None)
        return reply.status_code, reply.content

    async def _post(
        self, path: str, body: bytes, fields: Mapping[str, object], timeout_seconds: float, request_id: str | None
    ) -> httpx.Response:
        content = with_fields(body, fields)
        headers = {"content-type": "application/json", **({"x-request-id": request_id} if request_id else {})}
        with _named_failures(timeout_seconds):
            async with asyncio.timeout(timeout_seconds):
                return await self._client.post(
                    path,
                    content=content,
                    headers=headers,
                    timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                )

    async def get(self, path: str, *, timeout_seconds: float = QUESTION_SECONDS) -> tuple[int, bytes] | None:
        """GET; None where nobody answers."""
        try:
            reply = await self._client.get(path, timeout=timeout_seconds)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        return reply.status_code, reply.content

    async def get_json(self, path: str) -> Any:
        """The parsed answer; None unless it is a 200 with JSON."""
        reply = await self.get(path)
        return _parsed(reply[1]) if reply is not None and reply[0] == 200 else None

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        """The engine's own ids for a body's prompt; None where it has no /tokenize or the prompt is no text."""
        parsed = _parsed(body)
        question = tokenize_question(endpoint, parsed) if isinstance(parsed, dict) else None
        if question is None:
            return None
        status, answer = await self.post("/tokenize", orjson.dumps(question), {}, QUESTION_SECONDS)
        if status != 200:
            return None
        told = _parsed(answer)
        tokens = told.get("tokens") if isinstance(told, dict) else None
        return tokens if isinstance(tokens, list) else None

    async def close(self) -> None:
        await self._client.aclose()


@contextmanager
def _named_failures(timeout_seconds: float) -> Iterator[None]:
    """What went wrong with a request, as the feeder knows it."""
    try:
        yield
    except TimeoutError as error:
        raise EngineTimeout(f"after {timeout_seconds:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineGone(f"({type(error).__name__})") from error


def _whole(request: EngineRequest, reply: httpx.Response) -> EngineReply:
    """The reply of an answer that was read whole."""
    if reply.is_success and not isinstance(_parsed(reply.content), dict):
        return EngineReply(status_code=502, body=_NO_ANSWER, usage=UNKNOWN)  # tried again, as any 5xx
    return EngineReply(
        status_code=reply.status_code,
        body=reply.content,
        usage=read_usage(reply.content, prompts=count_prompts(request.endpoint, request.body)),
        retry_after_seconds=_seconds(reply.headers.get("retry-after")),
    )


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """A JSON object's bytes with fields put behind its own, which stay byte for byte; of two, readers take the last."""
    if not fields:
        return body
    head = body.rstrip()[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + orjson.dumps(fields)[1:]


def count_prompts(endpoint: str, body: bytes) -> int:
    """How many prompts a body holds: of several, an engine reports the cached tokens of the last one only."""
    if endpoint == Endpoint.CHAT:
        return 1
    parsed = _parsed(body)
    prompt = parsed.get("prompt" if endpoint == Endpoint.COMPLETIONS else "input") if isinstance(parsed, dict) else None
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def tokenize_question(endpoint: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to send to /tokenize so that it renders and tokenises as the endpoint would."""
    if endpoint == Endpoint.CHAT:
        return {"model": body["model"], **{name: body[name] for name in _CHAT_TOKENIZE_FIELDS if name in body}}
    prompt = body.get("prompt") if endpoint == Endpoint.COMPLETIONS else body.get("input")
    if not isinstance(prompt, str):
        return None
    question: dict[str, Any] = {"model": body["model"], "prompt": prompt}
    if "add_special_tokens" in body:
        question["add_special_tokens"] = body["add_special_tokens"]
    return question


def cache_config(metrics: bytes) -> tuple[int | None, int | None]:
    """(KV capacity in tokens, block size in tokens) from the labels of vLLM's `vllm:cache_config_info`."""
    match = re.search(rb"^vllm:cache_config_info\{(.*)\} ", metrics, re.MULTILINE)
    if match is None:
        return None, None
    labels = dict(re.findall(rb'(\w+)="([^"]*)"', match.group(1)))
    block_size = _number(labels.get(b"block_size"))
    capacity = _number(labels.get(b"kv_cache_size_tokens"))
    blocks = _number(labels.get(b"num_gpu_blocks"))
    if capacity is None and blocks is not None and block_size is not None:
        capacity = blocks * block_size
    return capacity, block_size


def _parsed(data: bytes) -> Any:
    """None where it is no JSON. What only the slower parser takes (NaN, half a surrogate pair) is a sound answer."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return parse_answer(data)


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw is not None and raw.isdigit() else None


def _seconds(raw: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is for clocks that agree."""
    return float(raw) if raw is not None and raw.isdigit() else None
