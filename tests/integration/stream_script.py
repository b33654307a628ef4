"""How the engine of a test streams: event by event, each when the test lets it go."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from watchful_server import WatchfulHandler

_LOOK_SECONDS = 0.01
_STUCK_SECONDS = 0.5
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "tiny"}
DIES = object()  # in place of an event: the connection breaks


def chat_event(delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, **more: Any) -> str:
    """One event as vLLM writes it."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
    return "data: " + json.dumps({**HEAD, "choices": [choice]}, ensure_ascii=False)


USAGE_EVENT = "data: " + json.dumps({**HEAD, "choices": [], "usage": USAGE})
WORDS = ["Hel", "lo \u2028\u00e9", " world"]
TEXT = "".join(WORDS)
HELLO = [
    chat_event({"role": "assistant", "content": ""}),
    *(chat_event({"content": word}) for word in WORDS),
    chat_event({}, "stop"),
    USAGE_EVENT,
]


class Script:
    """Answers each streamed request with these events and `[DONE]`. With `gated`, each waits for `let(n)`."""

    def __init__(self, events: Iterable[Any], *, gated: bool = False, first: tuple[int, bytes] | None = None) -> None:
        """`first` is a status and a body with which the first request is answered instead."""
        self._events = list(events)
        self._gate = threading.Semaphore(0) if gated else None
        self._first = first
        self.sent = 0
        self.requests = 0
        self.paused = threading.Event()  # set while nobody reads
        self.aborted: list[float] = []  # by time.monotonic
        self.done = threading.Event()

    def let(self, count: int = 1) -> None:
        assert self._gate is not None
        self._gate.release(count)

    def __call__(self, handler: WatchfulHandler) -> None:
        self.requests += 1
        if self._first is not None and self.requests == 1:
            handler._send_bytes(*self._first)
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream; charset=utf-8")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        try:
            if not self._send_all(handler):
                handler.connection.shutdown(socket.SHUT_RDWR)
                handler.close_connection = True
        except OSError:
            self.aborted.append(time.monotonic())
            handler.close_connection = True

    def _send_all(self, handler: WatchfulHandler) -> bool:
        for event in [*self._events, "data: [DONE]"]:
            self._wait(handler)
            if event is DIES:
                return False
            self._until_writable(handler)
            data = f"{event}\n\n".encode()
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.sent += 1
        handler.wfile.write(b"0\r\n\r\n")
        self.done.set()
        return True

    def _wait(self, handler: WatchfulHandler) -> None:
        """Raises OSError where the reader has gone meanwhile."""
        while self._gate is not None and not self._gate.acquire(timeout=_LOOK_SECONDS):
            if handler.has_hung_up():
                raise ConnectionResetError

    def _until_writable(self, handler: WatchfulHandler) -> None:
        while not select.select([], [handler.connection], [], _STUCK_SECONDS)[1]:
            self.paused.set()
            if handler.has_hung_up():
                raise ConnectionResetError
        self.paused.clear()
