"""service.core.history: what ran here, what may be evicted, what ran beside, what a boot before had."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st
from prefixes import key_of

from service.core import history
from service.core.history import History, Neighbour, prefix_of
from service.core.prefix import shared_tokens

SHARED = 640


def key(line: int, group: int = 0) -> bytes:
    """640 tokens of its group, then 64 of its own."""
    return key_of([group] * (SHARED // 32) + [1_000 + line] * 2)


def end(past: History, line: int, at: float, written: int = 64, group: int = 0) -> None:
    past.end(line, key(line, group), SHARED, fed_at=at, ended_at=at, written_tokens=written)


def find(past: History, asked: bytes, tokens: int, fed_at: float) -> Neighbour:
    """Without a trace."""
    return copy.deepcopy(past).end(-1, asked, tokens, fed_at=fed_at, ended_at=fed_at, written_tokens=0)


def test_a_neighbour_that_ended_before_is_there_until_enough_was_written() -> None:
    past = History(capacity_tokens=2_000)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.NOWHERE
    end(past, 1, at=1.0)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.COMPUTED
    assert find(past, key(9, group=5), SHARED, 1.0) is Neighbour.NOWHERE
    assert find(past, key(9), SHARED + 32, 1.0) is Neighbour.NOWHERE  # nobody shares that much
    end(past, 2, at=2.0, written=1_000, group=7)
    assert find(past, key(9), SHARED, 3.0) is Neighbour.COMPUTED
    end(past, 3, at=3.0, written=1, group=7)
    assert find(past, key(9), SHARED, 3.0) is Neighbour.RECENT
    end(past, 3, at=3.0, written=599, group=7)
    assert find(past, key(9), SHARED, 3.0) is Neighbour.RECENT
    end(past, 3, at=3.0, written=1, group=7)
    assert find(past, key(9), SHARED, 3.0) is Neighbour.OLD
    end(past, 4, at=4.0)  # used again
    assert find(past, key(9), SHARED, 4.0) is Neighbour.COMPUTED


def test_what_runs_now_may_evict_too() -> None:
    past = History(capacity_tokens=1_000, most_running=4)
    end(past, 1, at=1.0, written=300)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.COMPUTED
    for line in range(2, 4):
        past.expect(line, key(line, group=3))
    assert find(past, key(9), SHARED, 1.0) is Neighbour.RECENT  # two more of 300 tokens
    past.leave(2)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.COMPUTED


def test_without_a_capacity_nothing_is_sure() -> None:
    past = History()
    end(past, 1, at=1.0)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.RECENT


def test_a_neighbour_beside_is_no_neighbour_before() -> None:
    past = History(capacity_tokens=10**6, most_running=8)
    past.expect(1, key(1))
    assert find(past, key(9), SHARED, 1.0) is Neighbour.IN_FLIGHT
    end(past, 1, at=5.0)
    assert find(past, key(9), SHARED, 4.9) is Neighbour.IN_FLIGHT
    assert find(past, key(9), SHARED, 5.0) is Neighbour.COMPUTED


def test_a_neighbour_beside_counts_before_one_that_may_be_evicted() -> None:
    past = History(capacity_tokens=1_000)
    end(past, 1, at=1.0)
    end(past, 2, at=2.0, written=2_000, group=7)
    assert find(past, key(9), SHARED, 3.0) is Neighbour.OLD
    past.expect(3, key(3))
    assert find(past, key(9), SHARED, 3.0) is Neighbour.IN_FLIGHT


def test_a_neighbour_behind_is_none() -> None:
    past = History(capacity_tokens=10**6, most_running=8)
    for line in range(1, 4):
        past.expect(line, key(line))
    first, second, third = (
        past.end(line, key(line), SHARED, fed_at=1.0, ended_at=10.0 - line, written_tokens=1) for line in (1, 3, 2)
    )
    assert (first, second, third) == (Neighbour.NOWHERE, Neighbour.IN_FLIGHT, Neighbour.IN_FLIGHT)


def test_the_last_to_arrive_that_ends_first_has_its_neighbours_ahead() -> None:
    past = History(capacity_tokens=10**6, most_running=8)
    for line in range(1, 3):
        past.expect(line, key(line))
    assert past.end(2, key(2), SHARED, fed_at=1.0, ended_at=2.0, written_tokens=1) is Neighbour.IN_FLIGHT
    assert past.end(1, key(1), SHARED, fed_at=1.0, ended_at=3.0, written_tokens=1) is Neighbour.NOWHERE


def test_with_hundreds_beside_it_the_one_that_ended_before_is_found() -> None:
    past = History(capacity_tokens=10**6, most_running=256)
    end(past, 0, at=1.0)
    for line in range(1, 300):
        end(past, line, at=10.0 + line)
    assert find(past, key(500), SHARED, 2.0) is Neighbour.COMPUTED


def test_a_job_is_expected_once() -> None:
    past = History()
    for _ in range(2):
        past.expect(1, key(1))
    past.leave(1)
    past.leave(1)
    assert find(past, key(9), SHARED, 1.0) is Neighbour.NOWHERE


def test_what_ran_on_the_boot_before_is_known_by_its_keys() -> None:
    now = History(former_keys=[key(1), key(1, group=2)])
    assert find(now, key(9), SHARED, 1.0) is Neighbour.FORMER
    end(now, 2, at=2.0)
    assert find(now, key(9), SHARED, 2.0) is Neighbour.RECENT


def test_memory_is_bounded_and_the_newest_stay() -> None:
    past = History(capacity_tokens=10**9)
    for line in range(history._KEPT_JOBS * 2 + 10):
        past.end(line, line.to_bytes(4, "big") * 2, 32, fed_at=0.0, ended_at=float(line), written_tokens=1)
    assert past.end(-1, b"\0\0\0\1" * 2, 32, fed_at=1e9, ended_at=1e9, written_tokens=0) is Neighbour.NOWHERE
    newest = (history._KEPT_JOBS * 2).to_bytes(4, "big") * 2
    assert past.end(-2, newest, 32, fed_at=1e9, ended_at=1e9, written_tokens=0) is Neighbour.COMPUTED


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 3))
def test_whatever_ended_before_is_found_exactly_where_it_shares_enough(groups: list[int], group: int) -> None:
    past = History(capacity_tokens=10**9)
    for line, its_group in enumerate(groups):
        end(past, line, at=1.0, group=its_group)
    asked = key(999, group)
    shares = any(shared_tokens(asked, key(line, each)) >= SHARED for line, each in enumerate(groups))
    assert (find(past, asked, SHARED, 1.0) is Neighbour.COMPUTED) == shares
    assert prefix_of(asked, SHARED) == prefix_of(key(0, group), SHARED)
