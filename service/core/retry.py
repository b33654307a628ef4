"""Whether a line that the engine did not answer well is tried again, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TransportError(StrEnum):
    """No answer arrived at all. (An engine that died is counted apart, as a crash: see the cohort's life.)"""

    CONNECTION = "connection"  # refused, reset, or closed before the answer's end
    TIMEOUT = "timeout"  # the request's own time was up


class GiveUpReason(StrEnum):
    """Why a line is not tried again."""

    PERMANENT = "permanent"  # the engine means it: the same request would get the same answer
    ATTEMPTS = "attempts"  # tried often enough
    DEADLINE = "deadline"  # the next try would begin after the job's deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """Exponential backoff: base * 2**(attempt - 1), at most `longest_seconds`, of which up to half is jitter."""

    attempts: int = 5
    base_seconds: float = 1.0
    longest_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Try again, not before this many seconds have passed."""

    after_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Record what there is as the job's result."""

    reason: GiveUpReason


LONGEST_RETRY_AFTER_SECONDS = 3600.0


def decide(
    failure: int | TransportError,
    *,
    attempt: int,
    elapsed_seconds: float,
    deadline_seconds: float | None,
    jitter: float,
    retry_after_seconds: float | None = None,
    limits: RetryLimits = RetryLimits(),
) -> Retry | GiveUp:
    """What to do after try number `attempt` (from 1) ended in `failure`, a status code or the lack of one.

    `elapsed_seconds` and `deadline_seconds` count from the same moment; None is no deadline. `jitter` in 0..1 is the
    caller's random number. `retry_after_seconds` is what the engine asked for: waited for in full, up to an hour.
    """
    if not is_transient(failure):
        return GiveUp(reason=GiveUpReason.PERMANENT)
    if attempt >= limits.attempts:
        return GiveUp(reason=GiveUpReason.ATTEMPTS)
    doubled = limits.base_seconds * 2.0 ** min(attempt - 1, 60)
    backoff_seconds = min(doubled, limits.longest_seconds) * (1 - jitter / 2)
    after_seconds = max(backoff_seconds, min(retry_after_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS))
    if deadline_seconds is not None and elapsed_seconds + after_seconds >= deadline_seconds:
        return GiveUp(reason=GiveUpReason.DEADLINE)
    return Retry(after_seconds=after_seconds)


def is_transient(failure: int | TransportError) -> bool:
    """Connection errors, 408, 429 and every 5xx may pass; any other status is the engine's last word."""
    return isinstance(failure, TransportError) or failure in (408, 429) or 500 <= failure <= 599
