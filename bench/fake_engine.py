"""An OpenAI-compatible server that computes nothing: `python -m bench.fake_engine PORT`.

A request takes as long as its body's `bench_seconds` says, so that whoever measures knows what is not the engine's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import uvicorn

MODEL = "bench"
_PROMPT_TOKENS = 100

Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """ASGI, with no framework between."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/v1/models":
        await _answer(send, 200, {"object": "list", "data": [{"id": MODEL, "max_model_len": 100_000}]})
    elif scope["method"] != "POST" or scope["path"] == "/tokenize":
        await _answer(send, 404, {"error": {"message": "not found"}})
    else:
        body = orjson.loads(await _read(receive))
        await asyncio.sleep(float(body.get("bench_seconds", 0.0)))
        await _answer(send, 200, _completion())


def _completion() -> dict[str, Any]:
    message = {"role": "assistant", "content": "an answer that nobody computed"}
    return {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {
            "prompt_tokens": _PROMPT_TOKENS,
            "completion_tokens": 8,
            "total_tokens": _PROMPT_TOKENS + 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def _read(receive: Callable[[], Awaitable[Message]]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _answer(send: Callable[[Message], Awaitable[None]], status: int, value: object) -> None:
    data = orjson.dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=600)
