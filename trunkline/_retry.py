"""Whether and when a call is sent again: a pure function of what came back and how often it was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trunkline._requests import Reply

_RETRIED_STATUSES = frozenset({408, 429})  # and every 5xx
_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 8.0
_LONGEST_RETRY_AFTER_SECONDS = 120.0  # the contract's; a server that asks for more is not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """No reply: the connection was refused, broke or timed out."""

    cause: str


def retry_delay_seconds(outcome: Reply | Unreachable, tried: int, max_retries: int, jitter: float) -> float | None:
    """Seconds until the next try; None: do not try again. `tried` counts from 1, `jitter` lies in 0..1."""
    if tried > max_retries:
        return None
    backoff: float = min(_FIRST_DELAY_SECONDS * 2 ** (tried - 1), _LONGEST_DELAY_SECONDS) * (1 - jitter / 2)
    if isinstance(outcome, Unreachable):
        return backoff
    if not _wants_retry(outcome):
        return None
    asked = retry_after_seconds(outcome.headers)
    if asked is None:
        return backoff
    return max(asked, backoff) if asked <= _LONGEST_RETRY_AFTER_SECONDS else None


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """The header Retry-After where it is a number of seconds; the contract has no dates in it."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if seconds >= 0 else None


def _wants_retry(reply: Reply) -> bool:
    said = reply.headers.get("x-should-retry", "").lower()
    if said in ("true", "false"):
        return said == "true" and reply.status_code >= 400
    return reply.status_code in _RETRIED_STATUSES or reply.status_code >= 500
