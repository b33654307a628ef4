"""service.core.steal: a steal always helps, and a cohort is halved where little is shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.steal import InstanceLoad, Steal, halve, steal_from


def load(left: float, tail: float = 1.0, cohorts: int = 3, jobs: int = 10) -> InstanceLoad:
    return InstanceLoad(seconds_left=left, stealable_cohorts=cohorts, tail_seconds=tail, tail_jobs=jobs)


def test_the_one_with_most_work_left_gives_its_tail() -> None:
    loads = [load(0, cohorts=0), load(5), load(9), load(9)]
    assert steal_from(loads, 0) == Steal(victim=2, halve=False)


def test_near_the_end_half_is_taken() -> None:
    assert steal_from([load(0, cohorts=0), load(10, tail=8)], 0) == Steal(victim=1, halve=True)


def test_nothing_is_taken_that_cannot_help() -> None:
    idle = load(0, cohorts=0)
    assert steal_from([idle], 0) is None
    assert steal_from([idle, load(9, cohorts=0)], 0) is None
    assert steal_from([load(5), load(4, tail=4, jobs=1)], 0) is None
    assert steal_from([idle, load(4, tail=3, jobs=1)], 0) == Steal(victim=1, halve=False)


lefts = st.builds(
    lambda rest, tail, jobs: load(rest + tail, tail, 1, jobs), st.floats(0, 50), st.floats(0.1, 20), st.integers(0, 5)
)


@given(st.lists(lefts, min_size=1, max_size=5))
def test_a_steal_never_makes_the_pair_end_later(loads: list[InstanceLoad]) -> None:
    steal = steal_from(loads, 0)
    if steal is None:
        return
    victim = loads[steal.victim]
    assert victim.seconds_left == max(other.seconds_left for other in loads[1:] if other.tail_jobs)
    moved = victim.tail_seconds / 2 if steal.halve else victim.tail_seconds
    assert steal.victim != 0
    assert loads[0].seconds_left + moved <= victim.seconds_left
    assert not steal.halve or victim.tail_jobs > 1


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 5)), min_size=2, max_size=30))
def test_halves_are_both_something(jobs: list[tuple[float, int]]) -> None:
    place = halve(np.array([s for s, _ in jobs]), np.array([t for _, t in jobs], dtype=np.int64))
    assert 0 < place < len(jobs)


def test_a_cohort_is_halved_where_least_is_shared() -> None:
    shared = np.full(12, 64, dtype=np.int64)
    assert halve(np.ones(12), shared) == 6
    shared[5] = 0
    assert halve(np.ones(12), shared) == 5
    shared[[1, 5]] = [0, 64]
    assert halve(np.ones(12), shared) == 6
    assert halve(np.array([100.0, 1, 1]), np.zeros(3, dtype=np.int64)) == 1
    with pytest.raises(ValueError, match="fewer than two"):
        halve(np.ones(1), np.zeros(1, dtype=np.int64))
