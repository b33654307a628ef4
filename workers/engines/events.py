"""A streamed answer over HTTP: server-sent events, relayed one by one and put together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from service.core.assembly import Assembly
from service.core.model import Endpoint
from service.core.usage import UNKNOWN, read_usage
from workers.engines.base import EngineGone, EngineReply, EventSink

DONE = "[DONE]"
_LONGEST_EVENT_BYTES = 32 * 2**20  # an event that does not end is no event


def streaming_fields(body: bytes) -> dict[str, object]:
    """What to put over a body so that the engine streams and says its usage; the client's other options stay."""
    parsed = json.loads(body)
    asked = parsed.get("stream_options") if isinstance(parsed, dict) else None
    options = asked if isinstance(asked, dict) else {}
    return {"stream": True, "stream_options": {**options, "include_usage": True}}


async def relay_answer(
    pieces: AsyncIterable[bytes], endpoint: str, events: EventSink, *, prompts: int = 1
) -> EngineReply:
    """Send each event on, `[DONE]` excepted, and return the whole answer, or the error that the engine sent in its
    place. Raises EngineGone where the engine went silent in the middle."""
    assembly = Assembly(endpoint=Endpoint(endpoint))
    async for event in split_events(pieces):
        data = data_of(event)
        if data == DONE:
            return _reply(assembly, prompts)
        chunk = _parsed(data)
        if (status := error_status(chunk)) is not None:
            return EngineReply(status_code=status, body=data.encode(), usage=UNKNOWN)
        if isinstance(chunk, dict):
            assembly.add(chunk)
        await events.send(event)
    if not assembly.is_finished:
        raise EngineGone("(it closed the stream before the answer's end)")
    return _reply(assembly, prompts)


def _reply(assembly: Assembly, prompts: int) -> EngineReply:
    body = assembly.body()
    return EngineReply(status_code=200, body=body, usage=read_usage(body, prompts=prompts))


async def split_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The events with data of a byte stream, each without the blank line behind it. Lines end in LF or CRLF."""
    rest = b""
    async for piece in pieces:
        rest += piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        if len(rest) > _LONGEST_EVENT_BYTES:
            raise EngineGone("(an event of its stream does not end)")
        for event in whole:
            text = event.strip(b"\n").decode("utf-8", errors="replace")
            if data_of(text):
                yield text


def data_of(event: str) -> str:
    """What the data lines of an event hold. Only LF ends a line: an answer may hold other separators."""
    lines = [line[5:] for line in event.split("\n") if line.startswith("data:")]
    return "\n".join(line.removeprefix(" ") for line in lines)


def error_status(chunk: Any) -> int | None:
    """The status of an error that came as an event; None for every other event. vLLM nests it, with the status as an
    integer code; older ones have the fields at the top."""
    if not isinstance(chunk, dict):
        return None
    inner = chunk.get("error") or (chunk if chunk.get("object") == "error" else None)
    if not inner:
        return None
    code = inner.get("code") if isinstance(inner, dict) else None
    return code if type(code) is int and 400 <= code <= 599 else 500


def _parsed(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
