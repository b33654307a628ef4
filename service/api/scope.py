"""What surrounds every request: its id, its line in the log, and the last resort for what nobody expected."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import internal_error

log = logging.getLogger(__name__)

# A refused upload is read to its end, and dropped: closing the connection on a client that still sends would make
# it see a reset instead of the refusal. Beyond this it is closed all the same.
_DRAIN_BYTES = 1 << 30
_DRAIN_SECONDS = 60.0


def new_request_id() -> str:
    """What the answer and the log name one request by."""
    return f"req_{secrets.token_hex(16)}"


class RequestScope:
    """The outermost ASGI layer of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            log.debug("request_id=%s the client went away", exchange.request_id)
        except Exception as error:  # the process loop: it goes on, and the client gets its envelope
            # The frames and the class, no message: it may quote a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("request_id=%s failed: %s\n%s", exchange.request_id, type(error).__name__, frames)
            if exchange.status is not None:
                raise  # the answer has begun; breaking the connection is all that is left to say so
            await internal_error()(scope, exchange.receive, exchange.send)
        finally:
            exchange.log()


class _Exchange:
    """One request and its answer, watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = new_request_id()
        self.status: int | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._read_any = self._read_whole = False
        self._started = time.monotonic()
        scope.setdefault("state", {})["request_id"] = self.request_id

    async def receive(self) -> Message:
        self._read_any = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._read_whole = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                await self._drain()
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)

    async def _drain(self) -> None:
        headers = Headers(scope=self._scope)
        has_body = "content-length" in headers or "transfer-encoding" in headers
        is_held_back = "expect" in headers and not self._read_any  # the client sends nothing until it is told to
        if not has_body or is_held_back:
            return
        left = _DRAIN_BYTES
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._read_whole and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            log.info("request_id=%s a refused body was not read to its end", self.request_id)

    def log(self) -> None:
        """Method, path, status, time. No query, header or body."""
        is_quiet = self._scope["method"] == "GET" and (self.status or 500) < 500
        path = self._scope.get("raw_path", b"").decode("ascii", "replace")[:200]
        log.log(
            logging.DEBUG if is_quiet else logging.INFO,
            "request_id=%s %s %s status=%s ms=%d",
            self.request_id,
            self._scope["method"],
            path,
            self.status,
            (time.monotonic() - self._started) * 1000,
        )
