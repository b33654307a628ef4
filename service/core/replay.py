"""The replay: several simulated engines side by side, and a policy that says what each runs next.

Every figure that comes from here is simulated, and whoever shows it says so. Event driven: the engine whose clock is
least makes its next step, after the policy has been told of what arrived until then and of what is finished by then,
and after the engine has been fed, as the dispatcher feeds it, by `feed.jobs_wanted`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.cut import FloatArray
from service.core.feed import jobs_wanted
from service.core.plan import InstanceView, PlannedCohort
from service.core.policy import Policy
from service.core.prefix import IntArray, bound_tokens
from service.core.scenario import EngineShape, FleetChange, FleetJobs, jobs_at_once, mean_context_tokens
from service.core.simulate import FinishedJob, SimulatedEngineCore, SimulatedJob

__all__ = [
    "EngineShape",
    "FleetChange",
    "FleetJobs",
    "FleetReplay",
    "InstanceReplay",
    "ReplayError",
    "jobs_at_once",
    "mean_context_tokens",
    "replay_fleet",
]

_MOST_COHORTS = 64  # out for one engine at a time, as many as a worker has threads
_LEAST_COHORTS = 2
_REPORT_JOBS = 1000  # between two calls of on_progress


class ReplayError(ValueError):
    """The replay cannot be run, or the policy broke its contract; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReplay:
    """What one simulated engine finished. Jobs that its cache cannot hold are refused, and counted in nothing else."""

    jobs: int
    refused_jobs: int
    prompt_tokens: int
    cached_tokens: int
    makespan_seconds: float  # its last finish


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetReplay:
    """A replay, by instance, by job and in sum. Simulated. Arrays are [n], in the order of the jobs given."""

    instances: tuple[InstanceReplay, ...]  # by shape
    refused_jobs: int  # that no cache, or not the one the policy chose, can hold
    instance: IntArray  # that ran it; -1 for a refused job
    start_seconds: FloatArray  # of its prefill (the last, if an engine was lost); nan for a refused job
    finish_seconds: FloatArray  # nan for a refused job
    cached_tokens: IntArray
    bound_tokens: int  # of the finished jobs, at the first shape's block size

    @property
    def prompt_tokens(self) -> int:
        return sum(instance.prompt_tokens for instance in self.instances)

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens of the finished jobs; 0 for no job."""
        return int(self.cached_tokens.sum()) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def bound(self) -> float:
        """Share of the finished jobs' prompt tokens that one engine with an unbounded cache would serve."""
        return self.bound_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def makespan_seconds(self) -> float:
        """Until the last finish."""
        return max((instance.makespan_seconds for instance in self.instances), default=0.0)

    @property
    def max_over_mean(self) -> float:
        """Imbalance: the latest instance's last finish over the mean; 1 for no work."""
        total = sum(instance.makespan_seconds for instance in self.instances)
        return self.makespan_seconds * len(self.instances) / total if total else 1.0

    @property
    def replicated_tokens(self) -> int:
        """Computed beyond what one engine with an unbounded cache would compute."""
        return self.bound_tokens - int(self.cached_tokens.sum())


class _OpenCohort:
    """A cohort that an engine has, or part of it: how many jobs are left, and the estimate of each."""

    __slots__ = ("job_seconds", "jobs_left")

    def __init__(self, jobs_left: int, job_seconds: float) -> None:
        self.jobs_left, self.job_seconds = jobs_left, job_seconds


class _Instance:
    """One engine, its clock, and what it was given and has not finished."""

    def __init__(self, shape: EngineShape, ahead_jobs: int | None) -> None:
        self.core = SimulatedEngineCore(
            block_size=shape.block_size,
            capacity_blocks=shape.capacity_blocks,
            max_num_seqs=shape.max_num_seqs,
            max_batched_tokens=shape.max_batched_tokens,
            cost=shape.cost,
        )
        self.clock_seconds = 0.0  # where its last step ended; only of meaning while it is busy
        self.ended: tuple[FinishedJob, ...] = ()  # with that step
        self.open: dict[int, _OpenCohort] = {}  # by job index
        self.open_cohorts = 0
        self.open_seconds = 0.0
        self._shape, self._ahead_jobs = shape, ahead_jobs
        self._waiting_tokens: dict[int, int] = {}  # of jobs that are not admitted: not predicted to be cached

    @property
    def is_busy(self) -> bool:
        """It has a step to make, or has made one whose end has not come."""
        return bool(self.ended) or not self.core.is_idle

    @property
    def is_hungry(self) -> bool:
        if self.open_cohorts >= _MOST_COHORTS:
            return False
        return self.open_cohorts < _LEAST_COHORTS or self._jobs_wanted() > 0

    def _jobs_wanted(self) -> int:
        """What runs needs the blocks that it has pinned; what waits, what is not cached as far as was predicted."""
        cache = self.core.cache
        pinned_tokens = (cache.capacity_blocks - cache.free_blocks) * cache.block_size
        return jobs_wanted(
            jobs=len(self.open),
            seconds=self.open_seconds,
            new_tokens=pinned_tokens + sum(self._waiting_tokens.values()),
            max_num_seqs=self._shape.max_num_seqs,
            kv_capacity_tokens=self._shape.kv_capacity_tokens,
            ahead_jobs=self._ahead_jobs,
        )

    def settle(self) -> tuple[FinishedJob, ...]:
        """The end of its last step has come."""
        ended, self.ended = self.ended, ()
        for job in ended:
            cohort = self.open.pop(job.job_id)
            cohort.jobs_left -= 1
            self.open_seconds -= cohort.job_seconds
            self.open_cohorts -= not cohort.jobs_left
        return ended

    def give(self, jobs: Sequence[SimulatedJob], cached_tokens: Sequence[int], estimated_seconds: float) -> None:
        """A cohort, less what the cache cannot hold, and what it is predicted to serve of each job."""
        if not jobs:
            return
        cohort = _OpenCohort(len(jobs), estimated_seconds / len(jobs))
        self.open_cohorts += 1
        self.open_seconds += estimated_seconds
        for job, cached in zip(jobs, cached_tokens, strict=True):
            self.core.submit(job)
            self.open[job.job_id] = cohort
            self._waiting_tokens[job.job_id] = job.prompt_tokens - cached

    def step(self, now: float, horizon_seconds: float) -> tuple[int, ...]:
        """Make a step that begins now, and leap; the jobs that began with it."""
        report = self.core.step(leap=True, horizon_seconds=horizon_seconds)
        self.clock_seconds, self.ended = now + report.seconds, report.finished
        for job_id in report.admitted:
            del self._waiting_tokens[job_id]
        return report.admitted


class _Replay:
    def __init__(
        self,
        jobs: FleetJobs,
        policy: Policy,
        shapes: Sequence[EngineShape],
        ahead_jobs: int | None,
        changes: Sequence[FleetChange],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._jobs, self._policy, self._shapes, self._on_progress = jobs, policy, shapes, on_progress
        self._ahead_jobs = ahead_jobs
        context = mean_context_tokens(jobs.jobs.prompt_tokens, jobs.jobs.output_tokens)
        self._rates = [shape.rates(context) for shape in shapes]
        self._index_of = {job_id: index for index, job_id in enumerate(jobs.jobs.job_ids.tolist())}
        n = len(self._index_of)
        if n != len(jobs.jobs.job_ids):
            raise ReplayError("job ids must be unique")
        held = np.maximum(jobs.jobs.prompt_tokens + np.maximum(jobs.output_tokens, 1) - 1, 1)
        largest = max((shape.capacity_blocks * shape.block_size for shape in shapes), default=0)
        runnable = np.flatnonzero(held <= largest)
        self._due = runnable[np.argsort(jobs.arrival_seconds[runnable], kind="stable")]  # in order of arrival
        self._due_seconds = jobs.arrival_seconds[self._due]
        self._arrived = 0  # of them
        self._changes = sorted(changes, key=lambda change: change.at_seconds)
        self._boots = 0
        self._boot_ids: dict[int, int] = {}
        self._fleet: dict[int, _Instance] = {}  # by shape, ascending: the order in which the policy knows them
        self.refused = [0] * len(shapes)
        self.finished_jobs = 0
        self.instance = np.full(n, -1, dtype=np.int64)
        self.start_seconds, self.finish_seconds = np.full(n, math.nan), np.full(n, math.nan)
        self.cached_tokens = np.zeros(n, dtype=np.int64)

    def run(self) -> None:
        self._set_fleet(range(len(self._shapes)), 0.0)
        while (now := self._next_seconds()) < math.inf:
            news = self._change(now)
            due = {number for number, one in self._fleet.items() if one.is_busy and one.clock_seconds <= now}
            for number in due:
                news |= self._settle(number, self._fleet[number])
            news |= self._arrive(now)
            if news:  # whoever had nothing to do asks again
                due.update(number for number, one in self._fleet.items() if not one.is_busy)
            for number in sorted(due):
                one = self._fleet[number]
                self._feed(number, one, now)
                if not one.core.is_idle:
                    self._step(one, now)
        if self._policy.pending_jobs:
            raise ReplayError(f"the policy keeps {self._policy.pending_jobs} jobs that it gives to nobody")

    def _next_seconds(self) -> float:
        return min(
            [self._next_outside(), *(one.clock_seconds for one in self._fleet.values() if one.is_busy)],
        )

    def _next_outside(self) -> float:
        """The next arrival or change of the fleet."""
        arrival = float(self._due_seconds[self._arrived]) if self._arrived < len(self._due) else math.inf
        return min(arrival, self._changes[0].at_seconds) if self._changes else arrival

    def _set_fleet(self, present: Sequence[int], now: float) -> None:
        """Tell the policy who is there; whoever was not there before starts empty, under a new boot id."""
        lost = [one for number, one in self._fleet.items() if number not in present]
        fleet: dict[int, _Instance] = {}
        for number in sorted(present):
            fleet[number] = self._fleet.get(number) or _Instance(self._shapes[number], self._ahead_jobs)
        self._boot_ids = {
            number: self._boot_ids[number] if number in self._fleet else self._new_boot_id() for number in fleet
        }
        self._fleet = fleet
        self._policy.set_instances([self._view(number) for number in fleet], now)
        back = sorted(index for one in lost for index in one.open)
        if back:
            self._set_loads()
            self._policy.add(self._jobs.arrivals(np.array(back, dtype=np.int64)), now)

    def _new_boot_id(self) -> int:
        self._boots += 1
        return self._boots

    def _view(self, number: int) -> InstanceView:
        shape = self._shapes[number]
        return InstanceView(
            queue=f"engine.{number}",
            block_size=shape.block_size,
            kv_capacity_tokens=shape.kv_capacity_tokens,
            max_num_seqs=shape.max_num_seqs,
            rates=self._rates[number],
            load_seconds=self._fleet[number].open_seconds,
            boot_id=self._boot_ids[number],
        )

    def _set_loads(self) -> None:
        instances = self._fleet.values()
        self._policy.set_loads([one.open_seconds for one in instances], [len(one.open) for one in instances])

    def _change(self, now: float) -> bool:
        changed = False
        while self._changes and self._changes[0].at_seconds <= now:
            self._set_fleet(self._changes.pop(0).present, now)
            changed = True
        return changed

    def _settle(self, number: int, one: _Instance) -> bool:
        ended = one.settle()
        for job in ended:
            self.instance[job.job_id] = number
            self.finish_seconds[job.job_id] = one.clock_seconds
            self.cached_tokens[job.job_id] = job.cached_tokens
        before = self.finished_jobs // _REPORT_JOBS
        self.finished_jobs += len(ended)
        if self._on_progress and self.finished_jobs // _REPORT_JOBS > before:
            self._on_progress(self.finished_jobs)
        return bool(ended)

    def _arrive(self, now: float) -> bool:
        last = int(np.searchsorted(self._due_seconds, now, side="right"))
        if last == self._arrived:
            return False
        self._set_loads()
        self._policy.add(self._jobs.arrivals(self._due[self._arrived : last]), now)
        self._arrived = last
        return True

    def _feed(self, number: int, one: _Instance, now: float) -> None:
        if not one.is_hungry or not self._policy.pending_jobs:
            return
        place = list(self._fleet).index(number)
        while one.is_hungry:
            self._set_loads()
            cohort = self._policy.next_cohort(place, now)
            if cohort is None:
                return
            self._give(number, one, cohort)

    def _give(self, number: int, one: _Instance, cohort: PlannedCohort) -> None:
        jobs = [self._simulated(self._index_of[job_id]) for job_id in cohort.job_ids.tolist()]
        fitting = [place for place, job in enumerate(jobs) if one.core.can_hold(job)]
        self.refused[number] += len(jobs) - len(fitting)
        cached = cohort.predicted_cached_tokens[fitting].tolist()
        one.give([jobs[place] for place in fitting], cached, cohort.estimated_seconds)

    def _simulated(self, index: int) -> SimulatedJob:
        return SimulatedJob(
            job_id=index,
            key=self._jobs.jobs.keys[index],
            prompt_tokens=int(self._jobs.jobs.prompt_tokens[index]),
            output_tokens=int(self._jobs.output_tokens[index]),
            priority=0 if self._jobs.priorities is None else -int(self._jobs.priorities[index]),
        )

    def _step(self, one: _Instance, now: float) -> None:
        """A leap ends where something from outside could change what the engine does next."""
        changes = self._changes[0].at_seconds if self._changes else math.inf
        until = self._next_outside() if one.core.has_room else changes
        self.start_seconds[list(one.step(now, until - now))] = now


def replay_fleet(
    jobs: FleetJobs,
    policy: Policy,
    shapes: Sequence[EngineShape],
    *,
    ahead_jobs: int | None = None,
    changes: Sequence[FleetChange] = (),
    on_progress: Callable[[int], None] | None = None,
) -> FleetReplay:
    """Run `jobs` on one engine per shape as `policy` (with nothing in it) says.

    `ahead_jobs` may wait at each engine beyond `max_num_seqs`; as `feed.jobs_wanted` says where None. Jobs that no
    shape can hold never reach the policy. `on_progress` is called now and then with the number of finished jobs.
    Raises ReplayError where the policy keeps jobs for itself.
    """
    run = _Replay(jobs, policy, shapes, ahead_jobs, changes, on_progress)
    run.run()
    finished = np.flatnonzero(run.instance >= 0)
    keys = [jobs.jobs.keys[index] for index in finished.tolist()]
    block_size = shapes[0].block_size if shapes else 1
    return FleetReplay(
        instances=tuple(_of_instance(number, run, jobs) for number in range(len(shapes))),
        refused_jobs=len(jobs.jobs.job_ids) - len(finished),
        instance=run.instance,
        start_seconds=run.start_seconds,
        finish_seconds=run.finish_seconds,
        cached_tokens=run.cached_tokens,
        bound_tokens=bound_tokens(keys, jobs.jobs.prompt_tokens[finished], block_size),
    )


def _of_instance(number: int, run: _Replay, jobs: FleetJobs) -> InstanceReplay:
    mine: NDArray[np.bool_] = run.instance == number
    return InstanceReplay(
        jobs=int(mine.sum()),
        refused_jobs=run.refused[number],
        prompt_tokens=int(jobs.jobs.prompt_tokens[mine].sum()),
        cached_tokens=int(run.cached_tokens[mine].sum()),
        makespan_seconds=float(run.finish_seconds[mine].max()) if mine.any() else 0.0,
    )
