"""Courier: one signed POST to an address that was checked, within a time limit, whatever the receiver does.

The name is resolved once and every address of it is judged; the connection goes to the very address that was judged, so
a name that changes its mind leads nowhere. Nothing of the environment is used: no proxy, no .netrc. Redirects are not
followed, and the body of the answer is not read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address

import certifi
import httpx

from service.core.webhook import Target, is_delivered, may_call

CONNECT_SECONDS = 5.0
# Of one tenant at a time in this process: a receiver that hangs holds this many threads and not those of the others.
PLACES_PER_TENANT = 4

_STOP_POLL_SECONDS = 0.2
_MAX_ADDRESSES = 4  # tried one after the other, within the same time limit

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a try ended. `error` is one of a few words, or `http_` and the status; never what the receiver said."""

    status_code: int | None = None
    error: str | None = None
    is_refused: bool = False  # by us, before anything was sent: the next try would be too


class CourierStopped(Exception):
    """The process is stopping; whether the receiver has it is not known."""


def resolve(hostname: str, port: int) -> Sequence[Address]:
    """The addresses of a name, in the order to try them. Raises OSError.

    The system's resolver has time limits of its own (30 s at the most with its defaults); ours does not cut them.
    """
    found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(str(item[4][0]).partition("%")[0]) for item in found))


@dataclass(slots=True)
class Places:
    """How many webhooks of each tenant are on their way in this process."""

    _taken: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one_for(self, tenant_id: int) -> Iterator[bool]:
        """A place until the end of the block; False where the tenant has none left."""
        with self._lock:
            is_free = self._taken[tenant_id] < PLACES_PER_TENANT
            self._taken[tenant_id] += is_free
        try:
            yield is_free
        finally:
            with self._lock:
                self._taken[tenant_id] -= is_free
                if not self._taken[tenant_id]:
                    del self._taken[tenant_id]


@dataclass(frozen=True, kw_only=True)
class Courier:
    """Shared by the threads of a process."""

    resolve: Callable[[str, int], Sequence[Address]] = resolve
    places: Places = field(default_factory=Places)

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """Trusts the public authorities and those of this machine; made once, since reading them takes 20 ms."""
        context = ssl.create_default_context(cafile=certifi.where())
        context.load_default_certs()
        return context

    def send(
        self,
        target: Target,
        headers: dict[str, str],
        body: bytes,
        *,
        allow_private: bool,
        timeout_seconds: float,
        stopping: threading.Event,
    ) -> Answer:
        """One try. Raises CourierStopped."""
        try:
            addresses = self.resolve(target.hostname, target.port)[:_MAX_ADDRESSES]
        except (OSError, UnicodeError):
            return Answer(error="name_not_found")
        # All of them: a name with a public and a private address is somebody's attempt to reach the second.
        if not addresses or not all(may_call(address, allow_private=allow_private) for address in addresses):
            return Answer(error="address_refused", is_refused=True)
        parcel = _Parcel(target=target, headers=headers, body=body, tls=self.tls, timeout_seconds=timeout_seconds)
        return asyncio.run(_until_stopped(parcel, addresses, stopping))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    target: Target
    headers: dict[str, str]
    body: bytes
    tls: ssl.SSLContext
    timeout_seconds: float


async def _until_stopped(parcel: _Parcel, addresses: Sequence[Address], stopping: threading.Event) -> Answer:
    sending = asyncio.ensure_future(_within_time(parcel, addresses))
    while not sending.done():
        await asyncio.wait((sending,), timeout=_STOP_POLL_SECONDS)
        if stopping.is_set() and not sending.done():
            sending.cancel()
            raise CourierStopped
    return sending.result()


async def _within_time(parcel: _Parcel, addresses: Sequence[Address]) -> Answer:
    """httpx limits each read; a receiver that sends a byte now and then is stopped by the limit of the whole."""
    try:
        async with asyncio.timeout(parcel.timeout_seconds):
            return await _to_any(parcel, addresses)
    except TimeoutError:
        return Answer(error="timeout")


async def _to_any(parcel: _Parcel, addresses: Sequence[Address]) -> Answer:
    """To the first address that takes the connection. What was sent once is not sent to another."""
    answer = Answer(error="not_connected")
    for address in addresses:
        try:
            return await _to(parcel, address)
        except httpx.ConnectTimeout:
            answer = Answer(error="connect_timeout")
        except httpx.ConnectError as error:
            answer = Answer(error="bad_certificate" if _is_tls(error) else "not_connected")
        except httpx.TimeoutException:
            return Answer(error="timeout")
        except httpx.HTTPError:
            return Answer(error="broken_answer")
    return answer


async def _to(parcel: _Parcel, address: Address) -> Answer:
    target = parcel.target
    name = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
    timeout = httpx.Timeout(parcel.timeout_seconds, connect=min(CONNECT_SECONDS, parcel.timeout_seconds))
    async with (
        httpx.AsyncClient(verify=parcel.tls, trust_env=False, follow_redirects=False, timeout=timeout) as client,
        client.stream(
            "POST",
            f"{target.scheme}://{name}:{target.port}{target.path}",
            content=parcel.body,
            headers={**parcel.headers, "host": target.host},
            extensions={"sni_hostname": target.hostname},  # the certificate is checked against the name too
        ) as response,
    ):
        status_code = response.status_code
    return Answer(status_code=status_code, error=None if is_delivered(status_code) else f"http_{status_code}")


def _is_tls(error: BaseException) -> bool:
    """Whether the connection was there and the handshake failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
