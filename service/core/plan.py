"""The plan: a backlog in prefix order, one run per instance, cut into cohorts. DESIGN.md section 6, steps 2 to 7.

Pure and deterministic: the same backlog in another order of arrival gives the same plan, except among jobs of equal
key and length. Sorting is by key, that is depth first through the prefix tree, so what one engine can serve from
cache is what each job shares with its neighbour.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core import cut
from service.core.longest import long_first
from service.core.planrecords import (
    DEFAULT_LIMITS,
    Backlog,
    InstanceView,
    Limits,
    PlanError,
    PlannedCohort,
    Rates,
)
from service.core.prefix import (
    IntArray,
    cacheable_tokens,
    cacheable_tokens_each,
    neighbour_shared_tokens,
    shared_tokens,
    shares_group,
    sort_order,
)

__all__ = [
    "DEFAULT_LIMITS",
    "Backlog",
    "InstanceView",
    "Limits",
    "PlanError",
    "PlannedCohort",
    "Rates",
    "check_plan",
    "estimated_seconds",
    "follow",
    "plan",
    "predict_cached_tokens",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sorted:
    """The backlog in key order; `order` maps a position to the caller's index. A run is an array of positions."""

    order: IntArray
    keys: list[bytes]
    job_ids: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    body_bytes: IntArray
    shared: IntArray  # tokens, with the job before


def plan(
    backlog: Backlog,
    instances: Sequence[InstanceView],
    limits: Limits = DEFAULT_LIMITS,
    *,
    long_answers_first: bool = False,
) -> list[PlannedCohort]:
    """Every job in one cohort; cohorts in execution order, instance by instance.

    With `long_answers_first` jobs that would outlast their instance's run go to its front, which ends sooner and may
    compute a little more than the cuts between runs cost. A job longer than every instance's cache is planned too, for
    the engine to refuse. Raises PlanError when there are jobs and no instance.
    """
    if not len(backlog.job_ids):
        return []
    if not instances:
        raise PlanError(f"{len(backlog.job_ids)} jobs and no instance to plan them on.")
    jobs = _sort(backlog)
    costs = _costs(jobs, instances)
    runs = _scattered(jobs, instances, costs, limits)
    if runs is None:
        runs = _contiguous(jobs, instances, costs, limits)
    runs = _rehomed(runs, jobs, instances)
    cohorts: list[PlannedCohort] = []
    for number, (run, view) in enumerate(zip(runs, instances, strict=True)):
        entry, _ = _entry(run, jobs, view)
        run = np.roll(run, -entry)
        cohorts += _cohorts(number, _long_first(run, jobs, view) if long_answers_first else run, jobs, view, limits)
    return cohorts


def _sort(backlog: Backlog) -> _Sorted:
    order = sort_order(backlog.keys, backlog.prompt_tokens)
    keys = [backlog.keys[place] for place in order.tolist()]
    return _Sorted(
        order=order,
        keys=keys,
        job_ids=backlog.job_ids[order],
        prompt_tokens=backlog.prompt_tokens[order],
        output_tokens=backlog.output_tokens[order],
        body_bytes=backlog.body_bytes[order],
        shared=neighbour_shared_tokens(keys),
    )


def _predict(shared: IntArray, prompt_tokens: IntArray, view: InstanceView) -> IntArray:
    """Cached tokens of jobs in execution order, given what each shares with the one before it.

    A prompt beyond the cache is refused by the engine: 0, and the next job finds what was there before it.
    """
    predicted = np.zeros(len(shared), dtype=np.int64)
    fitting = np.flatnonzero(prompt_tokens <= view.kv_capacity_tokens)
    if not fitting.size:
        return predicted
    since_last = np.concatenate(([0], fitting[:-1] + 1))
    found = np.minimum.reduceat(shared[: fitting[-1] + 1], since_last)
    predicted[fitting] = cacheable_tokens_each(found, prompt_tokens[fitting], view.block_size)
    return predicted


def follow(keys: Sequence[bytes], prompt_tokens: IntArray, view: InstanceView) -> tuple[IntArray, IntArray]:
    """For jobs that run on an instance in the order given, after its `held_key`: int64[n] tokens that each shares with
    the one before it, and int64[n] tokens that the instance should serve from cache."""
    shared = neighbour_shared_tokens(keys)
    if len(keys) and view.held_key is not None:
        shared[0] = shared_tokens(view.held_key, keys[0])
    return shared, _predict(shared, prompt_tokens, view)


def predict_cached_tokens(keys: Sequence[bytes], prompt_tokens: IntArray, view: InstanceView) -> IntArray:
    """The second of what `follow` gives."""
    return follow(keys, prompt_tokens, view)[1]


def estimated_seconds(
    cached: IntArray,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    view: InstanceView,
) -> cut.FloatArray:
    """Cost of each job; nothing for one that the engine will refuse."""
    prefill = (prompt_tokens - cached) / view.rates.prefill_tokens_per_second
    seconds = prefill + output_tokens / view.rates.decode_tokens_per_second
    result: cut.FloatArray = np.where(prompt_tokens <= view.kv_capacity_tokens, seconds, 0.0)
    return result


def _costs(jobs: _Sorted, instances: Sequence[InstanceView]) -> list[cut.RunCosts]:
    """One record per instance; instances of one kind share it."""
    made: dict[tuple[int, int, Rates], cut.RunCosts] = {}
    costs = []
    for view in instances:
        kind = (view.block_size, view.kv_capacity_tokens, view.rates)
        if kind not in made:
            cached = _predict(jobs.shared, jobs.prompt_tokens, view)
            seconds = estimated_seconds(cached, jobs.prompt_tokens, jobs.output_tokens, view)
            made[kind] = cut.RunCosts(
                cumulative_seconds=np.concatenate(([0.0], np.cumsum(seconds))),
                cold_seconds=cached / view.rates.prefill_tokens_per_second,
                cached_tokens=cached,
            )
        costs.append(made[kind])
    return costs


def _scattered(
    jobs: _Sorted,
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
    lost_tokens, lost_seconds = 0, 0.0
    for pieces, cost, view in zip(dealt, costs, instances, strict=True):
        lost = cut.replicated_tokens(pieces, ends, jobs.shared, cost.cached_tokens)
        lost_tokens += lost
        lost_seconds += lost / view.rates.prefill_tokens_per_second
    if lost_seconds > limits.scatter_work_share * total_seconds:
        return None
    if lost_tokens > limits.scatter_hit_share * int(costs[0].cached_tokens.sum()):
        return None
    parts = np.split(np.arange(len(jobs.keys)), ends[:-1])
    nothing = np.zeros(0, dtype=np.int64)
    return [np.concatenate([nothing, *(parts[piece] for piece in pieces)]) for pieces in dealt]


def _contiguous(
    jobs: _Sorted,
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


def _held_place(jobs: _Sorted, view: InstanceView) -> int:
    return len(jobs.keys) if view.held_key is None else bisect_left(jobs.keys, view.held_key)


def _matched(
    runs: dict[int, IntArray],
    jobs: _Sorted,
    instances: Sequence[InstanceView],
    costs: Sequence[cut.RunCosts],
    longest_seconds: float,
) -> list[IntArray]:
    """Let two instances swap runs where their caches then serve more and neither ends after `longest_seconds`."""
    gains = [[_entry(runs[run], jobs, view)[1] for run in range(len(instances))] for view in instances]
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


def _rehomed(runs: list[IntArray], jobs: _Sorted, instances: Sequence[InstanceView]) -> list[IntArray]:
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


def _entry(run: IntArray, jobs: _Sorted, view: InstanceView) -> tuple[int, int]:
    """Step 6: the index in a run at which the instance goes on from what it holds, and the tokens that saves.

    The run is then executed from there to its end, and on from its beginning: that loses nothing, since its beginning
    was to be computed cold in any case. (0, 0) where nothing held is of use.
    """
    held = view.held_key
    if held is None or not run.size:
        return 0, 0

    def shared_at(index: int) -> int:
        return shared_tokens(held, jobs.keys[run[index]])

    after = bisect_left(range(len(run)), held, key=lambda index: jobs.keys[run[index]])
    most = max(shared_at(index) for index in (after - 1, after) if 0 <= index < len(run))
    # What is shared with the held key grows towards its place: the first job that shares the most.
    entry = bisect_left(range(after), most, key=shared_at)
    prompt = int(jobs.prompt_tokens[run[entry]])
    before = shared_tokens(jobs.keys[run[entry - 1]], jobs.keys[run[entry]]) if entry else 0
    gain = cacheable_tokens(most, prompt, view.block_size) - cacheable_tokens(before, prompt, view.block_size)
    return (entry, gain) if gain > 0 else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    """A run in the order in which an instance would execute it. Arrays are [jobs of the run]."""

    shared: IntArray  # with the job before
    predicted: IntArray
    seconds: cut.FloatArray
    first: NDArray[np.bool_]  # shares less than half with the job before


def _executed(run: IntArray, jobs: _Sorted, view: InstanceView) -> _Executed:
    shared = jobs.shared[run]
    jumps = np.flatnonzero(np.diff(run, prepend=run[0]) != 1)
    for index in jumps.tolist():  # the first, and wherever the run does not go on with the next position
        before = view.held_key if index == 0 else jobs.keys[run[index - 1]]
        shared[index] = 0 if before is None else shared_tokens(before, jobs.keys[run[index]])
    prompt_tokens = jobs.prompt_tokens[run]
    predicted = _predict(shared, prompt_tokens, view)
    return _Executed(
        shared=shared,
        predicted=predicted,
        seconds=estimated_seconds(predicted, prompt_tokens, jobs.output_tokens[run], view),
        first=~shares_group(shared, prompt_tokens, np.concatenate((prompt_tokens[:1], prompt_tokens[:-1]))),
    )


def _long_first(run: IntArray, jobs: _Sorted, view: InstanceView) -> IntArray:
    """Step 6 too: what would outlast the run goes to its front."""
    if not run.size:
        return run
    made = _executed(run, jobs, view)
    order = long_first(
        seconds=made.seconds,
        output_tokens=jobs.output_tokens[run],
        new_tokens=jobs.prompt_tokens[run] - made.predicted,
        first_of_group=made.first,
        max_num_seqs=view.max_num_seqs,
        kv_capacity_tokens=view.kv_capacity_tokens,
    )
    return run[order]


def _cohorts(number: int, run: IntArray, jobs: _Sorted, view: InstanceView, limits: Limits) -> list[PlannedCohort]:
    """Step 5: the run (positions in execution order) in cohorts, cut where little is shared."""
    if not run.size:
        return []
    made = _executed(run, jobs, view)
    prompt_tokens, body_bytes = jobs.prompt_tokens[run], jobs.body_bytes[run]
    # By the neighbour in key order too, wherever that runs: a group that was parted has one first job, not two.
    first = made.first & ~shares_group(jobs.shared[run], prompt_tokens, jobs.prompt_tokens[run - 1])
    cumulative = np.concatenate(([0.0], np.cumsum(made.seconds)))
    ends = cut.chop(
        cumulative,
        made.shared,
        seconds=min(limits.cohort_seconds, float(cumulative[-1]) / limits.cohort_share),
        min_jobs=max(1, -(-view.max_num_seqs // 4)),
        max_jobs=limits.cohort_jobs,
        cumulative_bytes=np.concatenate(([0], np.cumsum(body_bytes))),
        max_bytes=limits.cohort_bytes,
    )
    return [
        PlannedCohort(
            instance=number,
            job_ids=jobs.job_ids[run[start:end]],
            predicted_cached_tokens=made.predicted[start:end],
            first_of_group=first[start:end],
            estimated_seconds=float(cumulative[end] - cumulative[start]),
            body_bytes=int(body_bytes[start:end].sum()),
            prompt_tokens=int(prompt_tokens[start:end].sum()),
            first_key=jobs.keys[run[start]],
            last_key=jobs.keys[run[end - 1]],
        )
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def check_plan(backlog: Backlog, cohorts: Sequence[PlannedCohort]) -> None:
    """Raise PlanError unless every job of the backlog is in exactly one cohort, and no other job is."""
    ids = [cohort.job_ids for cohort in cohorts]
    planned = np.sort(np.concatenate(ids)) if ids else np.zeros(0, dtype=np.int64)
    repeated = np.unique(planned[1:][planned[1:] == planned[:-1]])
    missing = np.setdiff1d(backlog.job_ids, planned)
    foreign = np.setdiff1d(planned, backlog.job_ids)
    for what, found in (
        ("in two cohorts", repeated),
        ("in no cohort", missing),
        ("not of the backlog", foreign),
    ):
        if found.size:
            raise PlanError(f"{found.size} jobs are {what}: {found[:5].tolist()}.")
