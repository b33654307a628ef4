"""What a backlog would do on a fleet: the plan that would be made, and replays of it and of the baselines.

Every hit rate and makespan here is simulated, and whoever shows one says so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.core import prefix
from service.core.plan import InstanceView, Limits, PlannedCohort, plan
from service.core.policies import POLICIES, make_policy
from service.core.policy import Policy
from service.core.prefix import IntArray
from service.core.replay import FleetJobs, FleetReplay, replay_fleet
from service.core.scenario import EngineShape, mean_context_tokens

PREFIX = "prefix"
ROUND_ROBIN = "round_robin"
# Not "ledger": it is ours too, for single jobs that arrive one by one.
BASELINES = tuple(name for name in POLICIES if name not in (PREFIX, "ledger"))

Progress = Callable[[str, int], None]  # a policy's name, and how many of its jobs are done


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal engines, and the planner's bounds."""

    instances: int
    shape: EngineShape
    limits: Limits
    window_jobs: int | None = None  # planned at once, in file order; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What the prompts have in common, whoever runs them."""

    prompt_tokens: int
    prefix_groups: int
    shared_tokens: int  # in prompts, that some other prompt begins with too
    bound_tokens: int  # that one engine with an unbounded cache would serve from it

    @property
    def shared_share(self) -> float:
        return self.shared_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def bound(self) -> float:
        return self.bound_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How one policy did in its replay. Simulated."""

    policy: str
    hit_rate: float  # cached / prompt tokens
    eta: float  # hit rate / bound; 1 where nothing can be shared
    makespan_seconds: float
    max_over_mean: float  # of the instances' makespans
    replicated_tokens: int  # computed beyond the bound's
    replicated_fraction: float  # of the prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The chosen policy, and what to hold it against."""

    sharing: Sharing
    chosen: Figures
    baselines: dict[str, Figures]  # by name; round robin is always there

    def gain(self, figures: Figures) -> float:
        """How many times as fast as round robin; 1 where neither takes time."""
        base = self.baselines[ROUND_ROBIN].makespan_seconds
        return base / figures.makespan_seconds if figures.makespan_seconds else 1.0


def too_long(jobs: FleetJobs, shape: EngineShape) -> IntArray:
    """Indices of the jobs that the cache of an engine can never hold, the largest first."""
    held = held_tokens(jobs)
    found = np.flatnonzero(held > shape.capacity_blocks * shape.block_size)
    result: IntArray = found[np.argsort(-held[found], kind="stable")]
    return result


def held_tokens(jobs: FleetJobs) -> IntArray:
    """int64[n]: places in the cache that each job takes in the end; the last token it writes is never fed back."""
    result: IntArray = np.maximum(jobs.jobs.prompt_tokens + np.maximum(jobs.output_tokens, 1) - 1, 1)
    return result


def measure_sharing(jobs: FleetJobs, block_size: int) -> Sharing:
    """One walk of the prefix tree."""
    order = prefix.sort_order(jobs.jobs.keys, jobs.jobs.prompt_tokens)
    prompts = jobs.jobs.prompt_tokens[order]
    with_before = prefix.neighbour_shared_tokens([jobs.jobs.keys[place] for place in order.tolist()])
    with_after = np.concatenate((with_before[1:], np.zeros(1, dtype=np.int64)))
    same = prefix.shares_group(with_before, prompts, np.roll(prompts, 1))
    return Sharing(
        prompt_tokens=int(prompts.sum()),
        prefix_groups=int((~same).sum()),
        shared_tokens=int(np.maximum(with_before, with_after).sum()),
        bound_tokens=int(prefix.cacheable_tokens_each(with_before, prompts, block_size).sum()),
    )


def make_plan(jobs: FleetJobs, fleet: Fleet, policy: str) -> tuple[list[PlannedCohort], float]:
    """The cohorts of every instance in execution order, before any stealing, and the seconds that took.

    Of a baseline: where it places the jobs when all of them are there at the start. Where instances only take in turn
    (the shared queue), the one with the least estimated work takes next.
    """
    views = instance_views(jobs, fleet)
    began = time.perf_counter()
    cohorts = _windows(jobs, fleet, views) if policy == PREFIX else _drained(jobs, fleet, views, policy)
    seconds = time.perf_counter() - began
    return sorted(cohorts, key=lambda cohort: cohort.instance), seconds


def instance_views(jobs: FleetJobs, fleet: Fleet) -> list[InstanceView]:
    """The fleet as a policy sees it in the replay."""
    rates = fleet.shape.rates(mean_context_tokens(jobs.jobs.prompt_tokens, jobs.jobs.output_tokens))
    return [
        InstanceView(
            queue=f"engine.{number}",
            block_size=fleet.shape.block_size,
            kv_capacity_tokens=fleet.shape.kv_capacity_tokens,
            max_num_seqs=fleet.shape.max_num_seqs,
            rates=rates,
            boot_id=number + 1,
        )
        for number in range(fleet.instances)
    ]


def _windows(jobs: FleetJobs, fleet: Fleet, views: list[InstanceView]) -> list[PlannedCohort]:
    """Window by window, each going on from what the one before leaves in the caches."""
    n = len(jobs.jobs.job_ids)
    size = n if fleet.window_jobs is None else fleet.window_jobs
    cohorts: list[PlannedCohort] = []
    for start in range(0, n, max(size, 1)):
        window = jobs.jobs if size >= n else jobs.take(np.arange(start, min(start + size, n))).jobs
        planned = plan(window, views, fleet.limits)
        for cohort in planned:
            view = views[cohort.instance]
            load_seconds = view.load_seconds + cohort.estimated_seconds
            views[cohort.instance] = dataclasses.replace(view, held_key=cohort.last_key, load_seconds=load_seconds)
        cohorts += planned
    return cohorts


def _drained(jobs: FleetJobs, fleet: Fleet, views: list[InstanceView], policy: str) -> list[PlannedCohort]:
    source = make_policy(policy, fleet.limits, fleet.window_jobs)
    source.set_instances(views, 0.0)
    source.set_loads([0.0] * len(views), [0] * len(views))
    source.add(jobs.arrivals(np.arange(len(jobs.jobs.job_ids))), 0.0)
    taken: list[PlannedCohort] = []
    seconds = dict.fromkeys(range(len(views)), 0.0)  # of the instances for which there may be more
    while seconds:
        number = min(seconds, key=lambda each: (seconds[each], each))
        cohort = source.next_cohort(number, 0.0)
        if cohort is None:
            del seconds[number]
            continue
        taken.append(cohort)
        seconds[number] += cohort.estimated_seconds
    return taken


def make_forecast(
    jobs: FleetJobs,
    fleet: Fleet,
    policy: str,
    *,
    baselines: Sequence[str] = BASELINES,
    on_progress: Progress = lambda name, jobs: None,
) -> Forecast:
    """Replay the chosen policy and the baselines; `baselines` must name round robin. Every job must fit a cache."""
    sharing = measure_sharing(jobs, fleet.shape.block_size)
    found = {
        name: _figures(name, _replayed(jobs, fleet, name, on_progress), sharing)
        for name in dict.fromkeys([policy, *baselines])
    }
    return Forecast(sharing=sharing, chosen=found[policy], baselines={name: found[name] for name in baselines})


def _replayed(jobs: FleetJobs, fleet: Fleet, name: str, on_progress: Progress) -> FleetReplay:
    policy: Policy = make_policy(name, fleet.limits, fleet.window_jobs)
    on_progress(name, 0)
    return replay_fleet(
        jobs, policy, [fleet.shape] * fleet.instances, on_progress=lambda finished: on_progress(name, finished)
    )


def _figures(name: str, replay: FleetReplay, sharing: Sharing) -> Figures:
    replicated = sharing.bound_tokens - int(replay.cached_tokens.sum())
    return Figures(
        policy=name,
        hit_rate=replay.hit_rate,
        eta=replay.hit_rate / sharing.bound if sharing.bound else 1.0,
        makespan_seconds=replay.makespan_seconds,
        max_over_mean=replay.max_over_mean,
        replicated_tokens=replicated,
        replicated_fraction=replicated / sharing.prompt_tokens if sharing.prompt_tokens else 0.0,
    )
