"""service.core.phases: whatever first-come-first-served would have met is met, and far deadlines change nothing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.core.cut import FloatArray
from service.core.phases import keep_more, met_first_come, split_phases
from service.core.prefix import IntArray

cases = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 50), min_size=n, max_size=n),
        st.lists(st.sampled_from([10.0, 50.0, 90.0, 200.0, 400.0, math.inf]), min_size=n, max_size=n),
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.permutations(range(n)),
        st.sampled_from([1.0, 3.5]),
        st.sampled_from([0.5, 20.0]),
    )
)


def finishes(work: FloatArray, order: IntArray) -> FloatArray:
    found = np.empty(len(work))
    found[order] = 100.0 + np.cumsum(work[order])
    return found


@given(cases)
def test_what_first_come_first_served_meets_is_met(case: tuple) -> None:
    seconds, due, groups, arrivals, servers, slack = case
    seconds, deadlines = np.array(seconds, dtype=np.float64), np.array(due) + 100.0
    met = met_first_come(
        seconds=seconds,
        deadlines=deadlines,
        arrivals=np.array(arrivals, dtype=np.int64),
        now_seconds=100.0,
        servers=servers,
    )
    kept = keep_more(
        seconds=seconds,
        due=np.where(met, deadlines, np.inf),
        deadlines=deadlines,
        now_seconds=100.0,
        servers=servers,
    )
    assert np.all(kept[met] == deadlines[met])
    parts = split_phases(
        seconds=seconds,
        due=kept,
        groups=np.sort(np.array(groups, dtype=np.int64)),
        now_seconds=100.0,
        servers=servers,
        slack_seconds=slack,
    )
    order = np.concatenate(parts)
    assert sorted(order.tolist()) == list(range(len(seconds)))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    work = seconds / servers
    protected = finishes(work, np.argsort(arrivals)) <= deadlines
    late = finishes(work, order) - deadlines
    # A phase lasts its slack at least, and each may be late by what one phase takes beyond its deadline.
    assert np.all(late[protected] <= slack + 1e-9)


@given(cases)
def test_far_deadlines_make_one_phase(case: tuple) -> None:
    seconds, _, groups, _, servers, slack = case
    parts = split_phases(
        seconds=np.array(seconds, dtype=np.float64),
        due=np.full(len(seconds), 1e9),
        groups=np.sort(np.array(groups, dtype=np.int64)),
        now_seconds=0.0,
        servers=servers,
        slack_seconds=slack,
    )
    assert len(parts) == 1


def test_a_group_is_not_parted_where_time_allows() -> None:
    parts = split_phases(
        seconds=np.full(6, 10.0),
        due=np.array([100.0, 1e9, 1e9, 30.0, 1e9, 1e9]),
        groups=np.array([0, 0, 0, 1, 1, 1]),
        now_seconds=0.0,
        servers=1.0,
        slack_seconds=0.0,
    )
    assert [part.tolist() for part in parts] == [[3, 4, 5], [0, 1, 2]]


def test_a_deadline_that_was_given_up_is_kept_where_it_pushes_nobody() -> None:
    kept = keep_more(
        seconds=np.array([10.0, 10.0, 10.0]),
        due=np.array([25.0, math.inf, math.inf]),
        deadlines=np.array([25.0, 12.0, 40.0]),
        now_seconds=0.0,
        servers=1.0,
    )
    assert kept.tolist() == [25.0, 12.0, 40.0]
    kept = keep_more(
        seconds=np.array([10.0, 20.0, 10.0]),
        due=np.array([25.0, math.inf, math.inf]),
        deadlines=np.array([25.0, 22.0, 40.0]),
        now_seconds=0.0,
        servers=1.0,
    )
    assert kept.tolist() == [25.0, math.inf, 40.0]
