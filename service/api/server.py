"""Serving the API: one process, one port, an end that does not wait for those who wait."""

from __future__ import annotations

import errno
import logging
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.api.app import build
from service.api.context import Context
from service.api.errors import ApiError, error_answer
from service.api.scope import new_request_id
from service.errors import PortTaken, SettingError
from service.settings import Settings

log = logging.getLogger(__name__)

# Clients keep idle connections (the SDK for 5 s): the server must not be the one that closes first, for then a
# request meets a reset.
_KEEP_ALIVE_SECONDS = 75
_MAX_HEADER_BYTES = 64 * 1024
_GRACE_SECONDS = 10  # for downloads under way when told to stop


class _Protocol(AutoHTTPProtocol):  # type: ignore[valid-type,misc]
    """uvicorn's own, but what is no HTTP and so never reaches the application is refused in the envelope too, and so
    are headers without end, for which its parser has no limit."""

    _header_bytes: int | None = 0  # since the request began; None once its headers are complete

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > _MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser makes it an error of its own: 400
        self._header_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_bytes is not None and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES:
                self.send_400_response("The request's headers are larger than 64 KiB.")

    def send_400_response(self, msg: str) -> None:
        answer = error_answer(ApiError(400, "invalid_http", msg))
        request_id = new_request_id()
        log.info("request_id=%s %s", request_id, msg)
        headers = [
            *self.server_state.default_headers,
            *answer.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in headers), b"", bytes(answer.body)]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()


class ApiServer(uvicorn.Server):
    """uvicorn, which answers the long polls before it waits for connections to end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        if isinstance(app, FastAPI) and isinstance(app.state.context, Context):
            app.state.context.waiter.release()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Until a signal. Raises TrunklineError, one sentence, where it cannot start."""
    app = build(settings)
    with bind(settings.host, settings.port) as listener:
        log.info("api listens on http://%s:%d", settings.host, settings.port)
        make_server(app).run(sockets=[listener])


def make_server(app: FastAPI) -> ApiServer:
    """A server without logs of its own: its access log has query strings."""
    return ApiServer(
        uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",  # a wish to upgrade is ignored, as HTTP allows, and the request answered; else it is a bare 403
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises PortTaken, SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingError(f"TRUNKLINE_HOST is {host!r}: {error.strerror}.") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"(port {port} of {host}; set TRUNKLINE_PORT)") from error
        raise SettingError(f"TRUNKLINE_HOST {host}, TRUNKLINE_PORT {port}: {error.strerror}.") from error
    return listener
