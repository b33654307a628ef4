"""An OpenAI-compatible server of which a test says what it answers, and which notices when a client hangs up."""

from __future__ import annotations

import io
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_server import FakeServer, Handler

_LOOK_SECONDS = 0.01


class WatchfulServer(FakeServer):
    """`reply` is what it answers to all but a worker's questions; held, a request waits for `let_go`."""

    def __init__(self) -> None:
        super().__init__(0, "honours")
        self.RequestHandlerClass = WatchfulHandler
        self.reply: tuple[int, bytes] = (200, b"{}")
        self.headers: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[float] = []  # by time.monotonic
        self.let_go = threading.Event()
        self.let_go.set()
        self.arrived = threading.Semaphore(0)
        self.script: Callable[[WatchfulHandler], None] | None = None  # how a streamed request is answered

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nothing is answered meanwhile."""
        self.let_go.clear()
        try:
            yield
        finally:
            self.let_go.set()


class WatchfulHandler(Handler):
    server: WatchfulServer

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        body = json.loads(raw)
        if self.path == "/tokenize" or "probe" in json.dumps(body.get("messages", "")):
            self._as_the_fake_server(raw)
            return
        self.server.asked.append((self.path, body))
        self.server.arrived.release()
        if body.get("stream") and self.server.script is not None:
            self.server.script(self)
            return
        while not self.server.let_go.wait(_LOOK_SECONDS):
            if self.has_hung_up():
                self.server.aborted.append(time.monotonic())
                self.close_connection = True
                return
        status, answer = self.server.reply
        self._send_bytes(status, answer)

    def _as_the_fake_server(self, raw: bytes) -> None:
        stream, self.rfile = self.rfile, io.BufferedReader(io.BytesIO(raw))
        super().do_POST()
        self.rfile = stream

    def has_hung_up(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""


@contextmanager
def watchful() -> Iterator[WatchfulServer]:
    server = WatchfulServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.let_go.set()
        server.pause.set()
        server.shutdown()
        thread.join()
        server.server_close()
