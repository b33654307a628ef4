"""service.core.retry: what passes is retried within attempts and deadline, the rest never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.retry import GiveUp, GiveUpReason, Retry, RetryLimits, TransportError, decide, is_transient

TRANSIENT = [TransportError.CONNECTION, TransportError.TIMEOUT, 408, 429, 500, 502, 503, 529, 599]
PERMANENT = [400, 401, 403, 404, 409, 413, 422, 301, 200]


def after(failure: int | TransportError, attempt: int = 1, jitter: float = 0.0, **rest: float) -> Retry | GiveUp:
    return decide(failure, attempt=attempt, elapsed_seconds=0, deadline_seconds=None, jitter=jitter, **rest)


@pytest.mark.parametrize("failure", TRANSIENT)
def test_what_may_pass_is_retried_until_the_attempts_end(failure: int | TransportError) -> None:
    delays = [after(failure, attempt) for attempt in range(1, 6)]
    assert delays == [*(Retry(after_seconds=s) for s in (1, 2, 4, 8)), GiveUp(reason=GiveUpReason.ATTEMPTS)]


@pytest.mark.parametrize("failure", PERMANENT)
def test_other_statuses_never_are(failure: int) -> None:
    assert not is_transient(failure)
    assert after(failure) == GiveUp(reason=GiveUpReason.PERMANENT)


def test_the_engine_s_own_wish_is_waited_for() -> None:
    assert after(429, retry_after_seconds=30) == Retry(after_seconds=30)
    assert after(429, 3, retry_after_seconds=0.1) == Retry(after_seconds=4)


@given(
    attempt=st.integers(1, 200),
    jitter=st.floats(0, 1),
    elapsed=st.floats(0, 1000),
    deadline=st.none() | st.floats(0, 1000),
)
def test_a_retry_lies_within_its_bounds(attempt: int, jitter: float, elapsed: float, deadline: float | None) -> None:
    limits = RetryLimits(attempts=100)
    answer = decide(
        503, attempt=attempt, elapsed_seconds=elapsed, deadline_seconds=deadline, jitter=jitter, limits=limits
    )
    if isinstance(answer, Retry):
        assert attempt < 100
        assert 0.5 <= answer.after_seconds <= limits.longest_seconds
        assert deadline is None or elapsed + answer.after_seconds < deadline
    else:
        assert attempt >= 100 or deadline is not None


def test_an_absurd_wait_is_cut_to_an_hour() -> None:
    decision = decide(503, attempt=1, elapsed_seconds=0, deadline_seconds=None, jitter=0.0, retry_after_seconds=1e20)
    assert decision == Retry(after_seconds=3600.0)
