"""Webhooks, the pure part: what is sent and how it is signed, which addresses may be called, when to try again.

The signature is that of the Standard Webhooks specification, which the `openai` SDK's `webhooks.unwrap` verifies.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from service.core.model import BatchStatus, Outcome

SECRET_BYTES = 32
MAX_TRIES = 5
TEST_EVENT = "webhook.test"

_SECRET_PREFIX = "whsec_"
_MAX_URL = 2_048
URL_RULE = (
    f"an http or https URL of at most {_MAX_URL} characters, percent-encoded, without user and password, "
    "at port 80, 443 or one from 1024"
)
# Each wait is 8 times the one before (10 s, 80 s, 11 and 85 minutes): a receiver may be away for an hour and a half.
_BACKOFF_FACTOR = 8
_GONE = 410
_FIRST_UNPRIVILEGED_PORT = 1_024

# Special-purpose networks of the IANA registries (RFC 6890 and its updates), none of which is a server on the internet.
# Not `ipaddress.is_global`: its answers differ between Python versions, and it passes 64:ff9b::7f00:1 (127.0.0.1).
_CLOSED_V4 = [
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared between a provider and its customers
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata services of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved, broadcast
        "168.63.129.16/32",  # a metadata service on a public address
    )
]
_GLOBAL_V6 = ip_network("2000::/3")  # outside are loopback, mapped IPv4, unique local, link-local, multicast
_CLOSED_V6 = [
    ip_network(network)
    for network in (
        "2001::/23",  # Teredo and other protocols: they hold an IPv4 address
        "2001:db8::/32",
        "2002::/16",  # 6to4: it holds an IPv4 address
        "3fff::/20",
    )
]
_NAT64 = ip_network("64:ff9b::/96")  # how a host without IPv4 reaches one that has no IPv6
# Credentials for whoever asks: refused also where private addresses are allowed.
_METADATA = {
    ip_address(address)
    for address in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::254",
        "fd00:ec2::23",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a webhook goes, of a URL that `parse_url` took. Nothing of it but `host` may be logged."""

    scheme: str
    hostname: str  # ASCII; an IPv6 address without its brackets
    port: int
    path: str  # with the query

    @property
    def host(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        name = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"


_HOSTNAME = re.compile(r"[a-z0-9._:-]+", re.ASCII)  # no zone of an IPv6 address: it names our interface
_DEFAULT_PORTS = {"http": 80, "https": 443}


def parse_url(url: str) -> Target | None:
    """None where `url` is no http or https URL that may be called: it is too long, names a user or a password, or a
    port below 1,024 that is not the web's. Which addresses the name has is judged when it is called."""
    if len(url) > _MAX_URL or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
        hostname = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii")
        path = (parts.path or "/").encode("ascii").decode("ascii")
        query = parts.query.encode("ascii").decode("ascii")
    except ValueError:  # a bad port or bracket, a name that is none, and what is not percent-encoded
        return None
    if parts.scheme not in _DEFAULT_PORTS or not _HOSTNAME.fullmatch(hostname) or "@" in parts.netloc:
        return None
    if port is None:
        port = _DEFAULT_PORTS[parts.scheme]
    if port not in _DEFAULT_PORTS.values() and port < _FIRST_UNPRIVILEGED_PORT:
        return None
    return Target(scheme=parts.scheme, hostname=hostname, port=port, path=f"{path}?{query}" if query else path)


def may_call(address: IPv4Address | IPv6Address, *, allow_private: bool) -> bool:
    """Whether a tenant may have us connect to that address: one of a server on the internet, or, where private
    addresses are allowed, any but those of metadata services."""
    inner = _inner(address)
    if inner in _METADATA:
        return False
    if allow_private:
        return True
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return False
    if isinstance(inner, IPv4Address):
        return not any(inner in network for network in _CLOSED_V4)
    return inner in _GLOBAL_V6 and not any(inner in network for network in _CLOSED_V6)


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one leads to, or the address itself (without a zone)."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    plain = IPv6Address(int(address))
    return IPv4Address(int(plain) & 0xFFFF_FFFF) if plain in _NAT64 else plain


def event_body(*, event_id: str, event_type: str, created_at: int, subject: str) -> bytes:
    """The body of a webhook: the same bytes on every try."""
    body = {
        "id": event_id,
        "object": "event",
        "created_at": created_at,
        "type": event_type,
        "data": {"id": subject},
    }
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def signed_headers(*, event_id: str, sent_at: int, body: bytes, secret: bytes) -> dict[str, str]:
    """The three headers by which a receiver knows the sender, the event, and that it is not replayed."""
    signed = b".".join((event_id.encode("ascii"), str(sent_at).encode("ascii"), body))
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode('ascii')}",
    }


def secret_text(secret: bytes) -> str:
    """A secret as receivers are configured with it."""
    return _SECRET_PREFIX + base64.b64encode(secret).decode("ascii")


def batch_event(status: BatchStatus) -> str:
    """The type of event of a batch that ended so."""
    if not status.is_terminal:
        raise ValueError(f"{status} is no end")
    return f"batch.{status.value}"


def job_event(outcome: Outcome) -> str:
    """The type of event of a single job. One that was cancelled or expired has failed: every job has one event."""
    return "job.succeeded" if outcome is Outcome.SUCCEEDED else "job.failed"


def is_delivered(status_code: int) -> bool:
    """Whether this answer ends the event well. A redirect does not: it is not followed."""
    return 200 <= status_code < 300


def is_final(status_code: int) -> bool:
    """Whether this answer asks never to be called again about the event."""
    return status_code == _GONE


def retry_delay_seconds(tries: int, first_seconds: float) -> float | None:
    """How long after `tries` failed ones the next is due; None when it was the last."""
    if tries >= MAX_TRIES:
        return None
    return float(first_seconds * _BACKOFF_FACTOR ** (tries - 1))
