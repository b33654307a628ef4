"""service.core.longest: nothing is lost, only what would outlast the run moves, and small groups move whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.core.longest import long_first


def ordered(outputs: list[int], *, seconds: list[float] | None = None, first: list[bool] | None = None, seqs: int = 4):
    n = len(outputs)
    return long_first(
        seconds=np.array(seconds or [1.0] * n),
        output_tokens=np.array(outputs, dtype=np.int64),
        new_tokens=np.full(n, 100, dtype=np.int64),
        first_of_group=np.array(first or [True] * n, dtype=np.bool_),
        max_num_seqs=seqs,
        kv_capacity_tokens=10**6,
    ).tolist()


def test_a_long_answer_at_the_end_goes_to_the_front() -> None:
    outputs = [10] * 99 + [400]
    assert ordered(outputs) == [99, *range(99)]
    assert ordered(outputs[::-1]) == list(range(100))


def test_one_sequence_at_a_time_has_no_tail() -> None:
    assert ordered([10] * 99 + [20], seqs=1) == list(range(100))


def test_equal_answers_stay_where_they_are() -> None:
    assert ordered([7] * 50) == list(range(50))
    assert ordered([0] * 5) == list(range(5))
    assert ordered([]) == []


def test_a_small_group_moves_whole_and_of_a_large_one_just_the_job() -> None:
    outputs = [10] * 99 + [400]
    small = [True] * 97 + [True, False, False]
    assert ordered(outputs, first=small) == [97, 98, 99, *range(97)]
    large = [index in (0, 50) for index in range(100)]
    assert ordered(outputs, first=large) == [99, *range(99)]


def test_a_cache_that_holds_one_job_at_a_time_has_no_tail() -> None:
    order = long_first(
        seconds=np.ones(100),
        output_tokens=np.array([10] * 99 + [14], dtype=np.int64),
        new_tokens=np.full(100, 900, dtype=np.int64),
        first_of_group=np.ones(100, dtype=np.bool_),
        max_num_seqs=64,
        kv_capacity_tokens=1000,
    )
    assert order.tolist() == list(range(100))


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 50), st.booleans()), max_size=60),
    st.integers(1, 64),
)
def test_it_is_a_permutation_of_two_ascending_parts(jobs: list[tuple[int, float, bool]], seqs: int) -> None:
    order = ordered(
        [output for output, _, _ in jobs],
        seconds=[seconds for _, seconds, _ in jobs],
        first=[first for _, _, first in jobs],
        seqs=seqs,
    )
    assert sorted(order) == list(range(len(jobs)))
    assert sum(after < before for before, after in pairwise(order)) <= 1
