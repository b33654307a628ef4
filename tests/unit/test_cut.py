"""service.core.cut: the cuts are as good as exhaustive search says they can be."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.cut import RunCosts, chop, deal, replicated_tokens, slide_cuts, smallest_makespan

seconds_and_cold = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8)


def costs_of(jobs: list[tuple[int, int]], factor: float = 1.0) -> RunCosts:
    seconds = np.array([second for second, _ in jobs], dtype=np.float64) * factor
    cold = np.array([0, *(cold for _, cold in jobs[1:])], dtype=np.int64)
    return RunCosts(
        cumulative_seconds=np.concatenate(([0.0], np.cumsum(seconds))), cold_seconds=cold * factor, cached_tokens=cold
    )


def longest(ends: list[int], costs: list[RunCosts], loads: list[float]) -> float:
    starts = [0, *ends[:-1]]
    return max(load + cost.run_seconds(s, e) for load, cost, s, e in zip(loads, costs, starts, ends, strict=True))


loads_of = st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=1, max_size=3)


@given(seconds_and_cold, loads_of)
def test_makespan_is_near_the_best_of_all_cuts(jobs: list[tuple[int, int]], loads: list[float]) -> None:
    costs = [costs_of(jobs)] * len(loads)
    makespan, ends = smallest_makespan(costs, loads)
    n = len(jobs)
    assert ends == sorted(ends)
    assert ends[-1] == n
    assert longest(ends, costs, loads) <= makespan * (1 + 1e-6) + 1e-6 or makespan <= max(loads) * (1 + 1e-6)
    cuts = combinations_with_replacement(range(n + 1), len(loads) - 1)
    best = min(longest([*cut, n], costs, loads) for cut in cuts)
    # Greedy filling never stops early to save a cold start: at most the dearest one is lost, at each cut.
    assert makespan <= best + max(cold for _, cold in jobs) * (len(loads) - 1) + 1e-6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), loads_of)
def test_makespan_is_the_best_where_nothing_is_shared(seconds: list[int], loads: list[float]) -> None:
    costs = [costs_of([(second, 0) for second in seconds])] * len(loads)
    makespan, _ = smallest_makespan(costs, loads)
    cuts = combinations_with_replacement(range(len(seconds) + 1), len(loads) - 1)
    best = min(longest([*cut, len(seconds)], costs, [0.0] * len(loads)) for cut in cuts) if not any(loads) else None
    if best is not None:
        assert makespan == pytest.approx(best, rel=1e-6, abs=1e-6)


@given(seconds_and_cold, loads_of, st.sampled_from([0.0, 0.03, 0.5]))
def test_sliding_keeps_the_limit_and_never_loses_more(
    jobs: list[tuple[int, int]], loads: list[float], slack: float
) -> None:
    costs = [costs_of(jobs, factor) for factor in (1.0, 2.0, 0.5)[: len(loads)]]
    makespan, ends = smallest_makespan(costs, loads)
    limit = makespan * (1 + slack)
    slid = slide_cuts(ends, costs, loads, limit)
    assert slid == sorted(slid)
    assert slid[-1] == len(jobs)
    assert longest(slid, costs, loads) <= max(limit, *loads) + 1e-6
    lost = [costs[0].cold_seconds[cut] if cut < len(jobs) else 0 for cut in ends[:-1]]
    lost_after = [costs[0].cold_seconds[cut] if cut < len(jobs) else 0 for cut in slid[:-1]]
    assert all(after <= before for before, after in zip(lost, lost_after, strict=True))


def test_a_cut_slides_to_the_smallest_loss_in_reach() -> None:
    jobs = [(10, 5)] * 20
    jobs[11] = (10, 0)
    costs = [costs_of(jobs)] * 2
    assert slide_cuts([10, 20], costs, [0, 0], 104) == [10, 20]
    assert slide_cuts([10, 20], costs, [0, 0], 110) == [11, 20]


@given(
    jobs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=30),
    seconds=st.integers(0, 30),
    min_jobs=st.integers(1, 5),
    max_jobs=st.integers(5, 10),
    max_bytes=st.integers(1, 40),
)
def test_pieces_keep_their_bounds(
    jobs: list[tuple[int, int, int]], seconds: int, min_jobs: int, max_jobs: int, max_bytes: int
) -> None:
    cost = np.concatenate(([0.0], np.cumsum([job[0] for job in jobs])))
    size = np.concatenate(([0], np.cumsum([job[2] for job in jobs])))
    shared = np.array([job[1] for job in jobs], dtype=np.int64)
    ends = chop(
        cost,
        shared,
        seconds=seconds,
        min_jobs=min_jobs,
        max_jobs=max_jobs,
        cumulative_bytes=size,
        max_bytes=max_bytes,
    )
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(jobs)
    for start, end in zip(starts, ends, strict=True):
        assert start < end <= start + max_jobs
        assert size[end] - size[start] <= max_bytes or end == start + 1
        assert cost[end] - cost[start] <= seconds or end <= start + min_jobs


def test_pieces_are_cut_at_the_smallest_share_of_their_last_half() -> None:
    cost = np.arange(21, dtype=np.float64)
    shared = np.full(20, 5, dtype=np.int64)
    shared[[2, 7, 13]] = 0
    assert chop(cost, shared, seconds=10) == [7, 13, 20]
    assert chop(cost, np.full(20, 5, dtype=np.int64), seconds=10) == [10, 20]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_dealing_is_within_four_thirds_of_the_best(seconds: list[int], n_instances: int) -> None:
    costs = [costs_of([(second, 0) for second in seconds])] * n_instances
    ends = list(range(1, len(seconds) + 1))
    dealt = deal(ends, costs, [0.0] * n_instances)
    assert sorted(piece for pieces in dealt for piece in pieces) == list(range(len(seconds)))
    assert all(pieces == sorted(pieces) for pieces in dealt)
    makespan = max(sum(seconds[piece] for piece in pieces) for pieces in dealt)
    best = min(
        max(sum(s for s, who in zip(seconds, owners, strict=True) if who == number) for number in range(n_instances))
        for owners in product(range(n_instances), repeat=len(seconds))
    )
    assert makespan <= best * 4 / 3 + 1e-9


def test_dealing_minds_the_load_and_the_speed_of_an_instance() -> None:
    slow, fast = costs_of([(1, 0)] * 12, factor=2.0), costs_of([(1, 0)] * 12)
    counts = [len(pieces) for pieces in deal(list(range(1, 13)), [slow, fast, fast], [0.0, 0.0, 4.0])]
    assert counts == [3, 6, 3] or counts == [3, 7, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_replicated_tokens_are_what_a_piece_does_not_find(cached: list[int], data: st.DataObject) -> None:
    n = len(cached)
    shared = np.array([0, *cached[1:]], dtype=np.int64)
    ends = sorted(data.draw(st.sets(st.integers(1, n)))) or [n]
    ends = ends if ends[-1] == n else [*ends, n]
    pieces = sorted(data.draw(st.sets(st.sampled_from(range(len(ends))))))
    lost, done = 0, []
    for piece in pieces:
        start = ends[piece - 1] if piece else 0
        found = max((int(shared[j + 1 : start + 1].min()) for j in done), default=0)
        lost += shared[start] - found
        done += range(start, ends[piece])
    assert replicated_tokens(pieces, ends, shared, shared) == lost
