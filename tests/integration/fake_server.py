"""A small OpenAI-compatible server: `python fake_server.py PORT MODE [SECONDS]`.

MODE is what it does with our fields: `honours` both, `refuses` both with 400, or `ignores` both, as servers do that
know neither. It "caches" whole bodies. SECONDS is how long a request takes,
except that a worker's probes are answered at once. Its process ends as vLLM does whose engine core died, on POST /die:
500 to all that it has and to all that comes, 503 to GET /health, and an exit some seconds later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"
PROMPT_TOKENS = 200
LINGER_SECONDS = 3.0


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, mode: str, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.mode = mode
        self.seconds = seconds
        self.status = 200  # of completions: what a test wants refused
        self.retry_after: int | None = None
        self.requests: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.pause = threading.Event()
        self.is_dying = False
        self.answer: bytes | None = None  # of completions, in place of a good one
        self.tokenize: bytes | None = None  # the answer to /tokenize, which most servers do not know

    def die(self) -> None:
        """Answer 500 to everything from now on."""
        self.is_dying = True
        self.status = 500
        self.pause.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.is_dying:
            self._send(503, {})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": MODEL, "max_model_len": 2048}]})
        else:
            self._send(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/die":
            self.server.die()
            threading.Timer(LINGER_SECONDS, os._exit, (1,)).start()
            self._send(200, {})
            return
        if self.path == "/tokenize":
            self._send_bytes(404 if self.server.tokenize is None else 200, self.server.tokenize or b"{}")
            return
        self.server.requests.append(dict(body))
        ours = {name: body.pop(name) for name in ("cache_salt", "priority") if name in body}
        if ours and self.server.mode == "refuses":
            self._send(400, {"error": {"message": f"unknown field {sorted(ours)}"}})
            return
        if "probe" not in json.dumps(body):
            self.server.pause.wait(self.server.seconds)
        if self.server.status != 200:
            self._send(self.server.status, {"error": {"message": "no"}})
            return
        if self.server.answer is not None:
            self._send_bytes(200, self.server.answer)
            return
        salt = ours.get("cache_salt", "") if self.server.mode == "honours" else ""
        seen = f"{salt} {json.dumps(body)}"
        cached_tokens = PROMPT_TOKENS - 8 if seen in self.server.seen else 0
        self.server.seen.add(seen)
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        message = {"role": "assistant", "content": "ok"}
        self._send(200, {"choices": [{"index": 0, "message": message}], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode())

    def _send_bytes(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if self.server.retry_after is not None:
            self.send_header("retry-after", str(self.server.retry_after))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving(mode: str, seconds: float = 0.0) -> Iterator[FakeServer]:
    """A server in a thread of this process."""
    server = FakeServer(0, mode, seconds)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.pause.set()
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    FakeServer(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0).serve_forever()
