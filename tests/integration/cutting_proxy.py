"""A reverse proxy that passes requests on, and loses the answers it is told to lose."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_HOP = ("host", "connection", "transfer-encoding", "content-length", "content-encoding", "date")


class CuttingProxy(ThreadingHTTPServer):
    """Requests go to `upstreams` in turn. `lose(method, path)` says whether the answer of a request, which was carried
    out, never arrives; with `status`, a gateway's error page comes in its place."""

    daemon_threads = True

    def __init__(self, upstreams: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = itertools.cycle(upstreams)
        self.lose: Callable[[str, str], bool] = lambda method, path: False
        self.status: int | None = None
        self.lost: list[str] = []  # the x-stainless-retry-count of each
        self.client = httpx.Client(timeout=60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: CuttingProxy
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        length = int(self.headers.get("content-length", 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        answer = self.server.client.request(
            self.command, next(self.server.upstream) + self.path, content=self.rfile.read(length), headers=headers
        )
        if self.server.lose(self.command, self.path):
            self.server.lost.append(self.headers.get("x-stainless-retry-count", ""))
            self.close_connection = True
            if self.server.status is not None:
                self._send(self.server.status, {"content-type": "text/html"}, b"<html>bad gateway</html>")
            return
        self._send(answer.status_code, dict(answer.headers), answer.content)

    do_GET = do_POST = do_DELETE = _pass

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def proxying(*upstreams: str) -> Iterator[CuttingProxy]:
    """A proxy in a thread of this process."""
    proxy = CuttingProxy(upstreams)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        proxy.client.close()
