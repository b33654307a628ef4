"""One run per instance from a backlog in key order. DESIGN.md section 6, steps 3 and 4.

A run is an array of positions in key order. Where few short prefixes are shared by all, small pieces are dealt out;
else each instance has a stretch of the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from service.core import cut
from service.core.ordered import Sorted, entry_of, estimated_seconds, predict
from service.core.planrecords import InstanceView, Limits, Rates
from service.core.prefix import IntArray


def divide(jobs: Sorted, instances: Sequence[InstanceView], limits: Limits) -> list[IntArray]:
    """The run of each instance, together every position once. There are jobs and instances."""
    costs = _costs(jobs, instances)
    runs = _scattered(jobs, instances, costs, limits)
    if runs is None:
        runs = _contiguous(jobs, instances, costs, limits)
    return _rehomed(runs, jobs, instances)


def _costs(jobs: Sorted, instances: Sequence[InstanceView]) -> list[cut.RunCosts]:
    """One record per instance; instances of one kind share it."""
    made: dict[tuple[int, int, Rates], cut.RunCosts] = {}
    costs = []
    for view in instances:
        kind = (view.block_size, view.kv_capacity_tokens, view.rates)
        if kind not in made:
            cached = predict(jobs.shared, jobs.prompt_tokens, view)
            seconds = estimated_seconds(cached, jobs.prompt_tokens, jobs.output_tokens, view)
            made[kind] = cut.RunCosts(
                cumulative_seconds=np.concatenate(([0.0], np.cumsum(seconds))),
                cold_seconds=cached / view.rates.prefill_tokens_per_second,
                cached_tokens=cached,
            )
        costs.append(made[kind])
    return costs


def _scattered(
    jobs: Sorted,
    instances: Sequence[InstanceView],
    costs: Sequence[cut.RunCosts],
    limits: Limits,
) -> list[IntArray] | None:
    """Step 4: small pieces dealt out for balance, where that re-computes little; None where order matters more."""
    if len(instances) == 1:
        return None
    total_seconds = float(costs[0].cumulative_seconds[-1])
    piece_seconds = total_seconds / (len(instances) * limits.cohort_share)
    ends = cut.chop(costs[0].cumulative_seconds, jobs.shared, seconds=piece_seconds)
    dealt = cut.deal(ends, costs, [view.load_seconds for view in instances])
    lost_tokens, lost_seconds = _lost(dealt, ends, jobs, instances, costs)
    if sum(lost_seconds) > limits.scatter_work_share * total_seconds:
        return None
    if sum(lost_tokens) > limits.scatter_hit_share * int(costs[0].cached_tokens.sum()):
        return None
    return _dealt_runs(dealt, ends)


def _lost(
    dealt: Sequence[Sequence[int]],
    ends: Sequence[int],
    jobs: Sorted,
    instances: Sequence[InstanceView],
    costs: Sequence[cut.RunCosts],
) -> tuple[list[int], list[float]]:
    """Tokens that each instance computes again because it has not all the pieces, and the seconds that takes."""
    tokens = [
        cut.replicated_tokens(pieces, ends, jobs.shared, cost.cached_tokens)
        for pieces, cost in zip(dealt, costs, strict=True)
    ]
    return tokens, [lost / view.rates.prefill_tokens_per_second for lost, view in zip(tokens, instances, strict=True)]


def _dealt_runs(dealt: Sequence[Sequence[int]], ends: Sequence[int]) -> list[IntArray]:
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    nothing = np.zeros(0, dtype=np.int64)
    return [np.concatenate([nothing, *(parts[piece] for piece in pieces)]) for pieces in dealt]


def _contiguous(
    jobs: Sorted,
    instances: Sequence[InstanceView],
    costs: Sequence[cut.RunCosts],
    limits: Limits,
) -> list[IntArray]:
    """Step 3: one run per instance, cut where little is shared. Instances go in the order of what they hold."""
    order = sorted(range(len(instances)), key=lambda number: _held_place(jobs, instances[number]))
    by_order = [costs[number] for number in order]
    loads = [instances[number].load_seconds for number in order]
    makespan, ends = cut.smallest_makespan(by_order, loads)
    longest = makespan * (1 + limits.slide_share)
    ends = cut.slide_cuts(ends, by_order, loads, longest)
    runs = [np.arange(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return _matched(dict(zip(order, runs, strict=True)), jobs, instances, costs, longest)


def _held_place(jobs: Sorted, view: InstanceView) -> int:
    return len(jobs.keys) if view.held_key is None else bisect_left(jobs.keys, view.held_key)


def _matched(
    runs: dict[int, IntArray],
    jobs: Sorted,
    instances: Sequence[InstanceView],
    costs: Sequence[cut.RunCosts],
    longest_seconds: float,
) -> list[IntArray]:
    """Let two instances swap runs where their caches then serve more and neither ends after `longest_seconds`."""
    gains = [[entry_of(runs[run], jobs, view)[1] for run in range(len(instances))] for view in instances]
    owned = list(range(len(instances)))  # owned[instance] = run
    wishes = [(gain, number, run) for number, row in enumerate(gains) for run, gain in enumerate(row) if gain]
    for gain, number, run in sorted(wishes, key=lambda wish: -wish[0]):
        other, mine = owned.index(run), owned[number]
        better = gain + gains[other][mine] > gains[number][mine] + gains[other][run]
        fits = all(
            instances[who].load_seconds + _run_seconds(runs[what], costs[who]) <= longest_seconds
            for who, what in ((number, run), (other, mine))
        )
        if better and fits:
            owned[number], owned[other] = run, mine
    return [runs[run] for run in owned]


def _run_seconds(run: IntArray, costs: cut.RunCosts) -> float:
    return costs.run_seconds(int(run[0]), int(run[-1]) + 1) if run.size else 0.0


def _rehomed(runs: list[IntArray], jobs: Sorted, instances: Sequence[InstanceView]) -> list[IntArray]:
    """Jobs that only a larger cache holds go to the largest; what no cache holds stays where it is."""
    capacities = [view.kv_capacity_tokens for view in instances]
    largest = max(capacities)
    homes = [number for number, capacity in enumerate(capacities) if capacity == largest]
    kept, moving = [], []
    for run, capacity in zip(runs, capacities, strict=True):
        tokens = jobs.prompt_tokens[run] + jobs.output_tokens[run]
        misfit = (tokens > capacity) & (tokens <= largest)
        kept.append(run[~misfit])
        moving.append(run[misfit])
    parts = np.array_split(np.sort(np.concatenate(moving)), len(homes))
    for home, part in zip(homes, parts, strict=True):
        kept[home] = np.sort(np.concatenate([kept[home], part]))
    return kept
