"""A receiver of webhooks: a real HTTP server that notes what it is sent and answers as the test says."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One request, as it came."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    client: tuple[str, int]


@dataclass(slots=True)
class Manner:
    """What the receiver does next."""

    statuses: deque[int] = field(default_factory=deque)  # of the next answers; 200 when there are none
    hangs: bool = False  # answers when the test ends
    drips: bool = False  # sends a byte of its headers now and then, for ever
    location: str = "/elsewhere"  # of redirects
    body: bytes = b"secret answer"


class HookServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.manner = Manner()
        self.hooks: list[Hook] = []
        self.came = threading.Condition()
        self.closing = threading.Event()
        self.asked_names: list[str | None] = []  # by TLS

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=querysecret"

    def wait_for(self, count: int, seconds: float = 30.0) -> list[Hook]:
        """The first `count` requests, once they have come."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.hooks) >= count, seconds), f"{len(self.hooks)} of {count} came"
            return self.hooks[:count]

    def handle_error(self, request: object, client_address: object) -> None:
        """Senders that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: HookServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        host, port = self.client_address[:2]
        with self.server.came:
            self.server.hooks.append(Hook(path=self.path, headers=headers, body=body, client=(str(host), port)))
            self.server.came.notify_all()
        manner = self.server.manner
        if manner.hangs:
            self.server.closing.wait(60)
            return
        if manner.drips:
            self._drip()
            return
        status = manner.statuses.popleft() if manner.statuses else 200
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("location", manner.location)
        self.send_header("content-length", str(len(manner.body)))
        self.end_headers()
        self.wfile.write(manner.body)

    do_GET = do_POST

    def _drip(self) -> None:
        with suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
            while not self.server.closing.wait(0.05):
                self.wfile.write(b"x")
                self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def receiving(server: HookServer) -> Iterator[HookServer]:
    """The server, while it serves."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
