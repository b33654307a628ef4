"""The policies that the planner is compared with: online routers, and one shared queue.

They keep the planner's contract (`service.core.policy`), so the dispatcher and the simulator drive either. They know
nothing of fairness and deadlines: weights and deadlines are taken and not heeded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np

from service.core import cut
from service.core.plan import DEFAULT_LIMITS, InstanceView, Limits, PlannedCohort, predict_cached_tokens
from service.core.policy import Arrivals
from service.core.prefix import IntArray, neighbour_shared_tokens
from service.core.routers import Fleet, Router, Waiting

_Item = tuple[int, int, Waiting]  # class, negated; number of the arrival; the job
_LATE_SHARE = 0.05  # of what waits in the shared queue: that many late jobs are worth sorting it again


class Routed:
    """A router as a policy: each job is placed when it arrives, and waits in the queue of its instance.

    An instance works its queue off in order of arrival, the higher class first. When the fleet changes, what waits is
    placed anew.
    """

    def __init__(self, router: Router, limits: Limits = DEFAULT_LIMITS) -> None:
        self._router = router
        self._limits = limits
        self._fleet = Fleet()
        self._names: tuple[tuple[str, int], ...] = ()  # queue and boot id of each instance
        self._last_boot = 0
        self._queues: list[list[_Item]] = []  # heaps
        self._queued_seconds: list[float] = []
        self._homeless: list[_Item] = []  # while there is no instance
        self._arrived = 0

    @property
    def pending_jobs(self) -> int:
        return sum(map(len, self._queues)) + len(self._homeless)

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        names = tuple((view.queue, view.boot_id) for view in views)
        known = dict(zip(self._names, self._fleet.boots, strict=True))
        self._fleet.views = list(views)
        if names == self._names:
            return
        for name in set(known).difference(names):
            self._fleet.ledger.forget(known[name])
        self._fleet.boots = [known.get(name) or self._new_boot(view) for name, view in zip(names, views, strict=True)]
        self._names = names
        pending = [*self._homeless, *(item for queue in self._queues for item in queue)]
        self._queues, self._queued_seconds = [[] for _ in views], [0.0] * len(views)
        self._homeless = []
        self.set_loads([view.load_seconds for view in views], [0] * len(views))
        for item in sorted(pending, key=lambda item: item[1]):
            self._place(item)

    def _new_boot(self, view: InstanceView) -> int:
        self._last_boot += 1
        self._fleet.ledger.open(self._last_boot, view.kv_capacity_tokens)
        return self._last_boot

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        self._fleet.jobs = [taken + len(queue) for taken, queue in zip(jobs, self._queues, strict=True)]
        self._fleet.seconds = [taken + ours for taken, ours in zip(seconds, self._queued_seconds, strict=True)]

    def set_weight(self, flow: int, weight: float) -> None:
        """Not heeded."""

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        for job in _waiting(arrivals):
            self._place((-job.priority, self._arrived, job))
            self._arrived += 1

    def _place(self, item: _Item) -> None:
        job, fleet = item[2], self._fleet
        if not fleet.views:
            self._homeless.append(item)
            return
        chosen = self._router.choose(job, fleet)
        if job.prompt_tokens > fleet.views[chosen].kv_capacity_tokens:  # routers do not look; one of these may hold it
            larger = [n for n, view in enumerate(fleet.views) if job.prompt_tokens <= view.kv_capacity_tokens]
            chosen = fleet.least_busy(larger) if larger else chosen
        job.place(fleet.views[chosen], fleet.cached_tokens(job, chosen))
        fleet.ledger.record(fleet.boots[chosen], job.key, job.prompt_tokens, job.output_tokens)
        heapq.heappush(self._queues[chosen], item)
        self._queued_seconds[chosen] += job.seconds
        fleet.jobs[chosen] += 1
        fleet.seconds[chosen] += job.seconds

    def drop(self, owner: int) -> None:
        self._homeless = [item for item in self._homeless if item[2].owner != owner]
        for number, queue in enumerate(self._queues):
            kept = [item for item in queue if item[2].owner != owner]
            seconds = sum(item[2].seconds for item in kept)
            self._fleet.jobs[number] -= len(queue) - len(kept)
            self._fleet.seconds[number] -= self._queued_seconds[number] - seconds
            heapq.heapify(kept)
            self._queues[number], self._queued_seconds[number] = kept, seconds

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        """A handful of jobs of one class from the head of the queue, counted as its load until the next set_loads."""
        queue, view = self._queues[instance], self._fleet.views[instance]
        if not queue:
            return None
        first = heapq.heappop(queue)
        taken, room = [first[2]], self._limits.cohort_bytes - first[2].body_bytes
        while queue and queue[0][0] == first[0] and len(taken) < _handful(view) and queue[0][2].body_bytes <= room:
            taken.append(heapq.heappop(queue)[2])
            room -= taken[-1].body_bytes
        left = self._queued_seconds[instance] - sum(job.seconds for job in taken)
        self._queued_seconds[instance] = max(left, 0.0) if queue else 0.0  # no rounding is carried on
        return _cohort(instance, taken)


class SharedQueue:
    """One queue of cohorts in key order, from which the instances take in turn: the simplest use of a backlog.

    Cohorts are as large as the planner's, and cut where little is shared as the planner's are. The higher class goes
    first. Jobs that come late are sorted in when they are a twentieth of what waits, or above what is next in class.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._views: list[InstanceView] = []
        self._held: dict[tuple[str, int], bytes] = {}  # the last key that each boot took
        self._cohorts: deque[list[Waiting]] = deque()  # in key order
        self._late: list[Waiting] = []
        self._late_class = 0  # the highest of theirs
        self.pending_jobs = 0

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        names = {(view.queue, view.boot_id) for view in views}
        if len(views) != len(self._views):
            self._late, self._cohorts = self._pending(), deque()  # cohorts are a share of an instance's part
        self._views = list(views)
        self._held = {name: key for name, key in self._held.items() if name in names}

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        """Not heeded: who has room takes."""

    def set_weight(self, flow: int, weight: float) -> None:
        """Not heeded."""

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        jobs = list(_waiting(arrivals))
        self._late += jobs
        self._late_class = max([self._late_class, *(job.priority for job in jobs)])
        self.pending_jobs += len(jobs)

    def drop(self, owner: int) -> None:
        self._late = [job for job in self._pending() if job.owner != owner]
        self._cohorts.clear()
        self.pending_jobs = len(self._late)

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        """The next cohort in key order, less what only another instance's cache can hold: that goes back."""
        view = self._views[instance]
        largest = max(view.kv_capacity_tokens for view in self._views)
        cohort: PlannedCohort | None = None
        passed: list[Waiting] = []
        self._sort_late()
        while cohort is None and self._cohorts:
            jobs = self._cohorts.popleft()
            mine = [job for job in jobs if not view.kv_capacity_tokens < job.prompt_tokens <= largest]
            passed += (job for job in jobs if view.kv_capacity_tokens < job.prompt_tokens <= largest)
            cohort = self._take(instance, mine) if mine else None
        self._late += passed
        return cohort

    def _pending(self) -> list[Waiting]:
        return [*chain.from_iterable(self._cohorts), *self._late]

    def _sort_late(self) -> None:
        """All that waits in cohorts anew, where the late jobs are worth it."""
        if not self._late:
            return
        few = len(self._late) <= _LATE_SHARE * self.pending_jobs
        if few and self._cohorts and self._late_class <= self._cohorts[0][0].priority:
            return
        jobs, self._late, self._late_class = sorted(self._pending(), key=_in_key_order), [], 0
        ends = self._ends(jobs)
        self._cohorts = deque(jobs[start:end] for start, end in pairwise([0, *ends]))

    def _ends(self, jobs: Sequence[Waiting]) -> list[int]:
        """Where the cohorts of jobs in key order end."""
        keys = [job.key for job in jobs]
        view, limits = self._views[0], self._limits
        _price(jobs, view, predict_cached_tokens(keys, _prompts(jobs), view))
        cumulative = np.array([0.0, *accumulate(job.seconds for job in jobs)])
        ends = cut.chop(
            cumulative,
            neighbour_shared_tokens(keys),
            seconds=min(limits.cohort_seconds, float(cumulative[-1]) / (limits.cohort_share * len(self._views))),
            min_jobs=_handful(view),
            max_jobs=limits.cohort_jobs,
            cumulative_bytes=np.array([0, *accumulate(job.body_bytes for job in jobs)], dtype=np.int64),
            max_bytes=limits.cohort_bytes,
        )
        classes = [job.priority for job in jobs]
        return sorted({*ends, *(place for place in range(1, len(jobs)) if classes[place - 1] != classes[place])})

    def _take(self, instance: int, jobs: list[Waiting]) -> PlannedCohort:
        view = self._views[instance]
        name = (view.queue, view.boot_id)
        holding = replace(view, held_key=self._held.get(name, view.held_key))
        _price(jobs, view, predict_cached_tokens([job.key for job in jobs], _prompts(jobs), holding))
        self._held[name] = jobs[-1].key
        self.pending_jobs -= len(jobs)
        return _cohort(instance, jobs)


def _waiting(arrivals: Arrivals) -> Iterator[Waiting]:
    jobs = arrivals.jobs
    rows = zip(
        jobs.job_ids.tolist(),
        arrivals.owners.tolist(),
        jobs.keys,
        jobs.prompt_tokens.tolist(),
        jobs.output_tokens.tolist(),
        jobs.body_bytes.tolist(),
        [0] * len(jobs.keys) if arrivals.priorities is None else arrivals.priorities.tolist(),
        strict=True,
    )
    for job_id, owner, key, prompt_tokens, output_tokens, body_bytes, priority in rows:
        yield Waiting(
            job_id=job_id,
            owner=owner,
            key=key,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            body_bytes=body_bytes,
            priority=priority,
        )


def _in_key_order(job: Waiting) -> tuple[int, bytes, int]:
    return -job.priority, job.key, job.prompt_tokens


def _handful(view: InstanceView) -> int:
    """Jobs of which some cohorts fill the engine."""
    return max(1, -(-view.max_num_seqs // 4))


def _price(jobs: Sequence[Waiting], view: InstanceView, cached_tokens: IntArray) -> None:
    for job, cached in zip(jobs, cached_tokens.tolist(), strict=True):
        job.place(view, cached)


def _prompts(jobs: Iterable[Waiting]) -> IntArray:
    return np.array([job.prompt_tokens for job in jobs], dtype=np.int64)


def _cohort(instance: int, jobs: Sequence[Waiting]) -> PlannedCohort:
    """The first of a group is a job of which the instance should hold less than half."""
    cached, prompts = np.array([job.cached_tokens for job in jobs], dtype=np.int64), _prompts(jobs)
    return PlannedCohort(
        instance=instance,
        job_ids=np.array([job.job_id for job in jobs], dtype=np.int64),
        predicted_cached_tokens=cached,
        first_of_group=2 * cached < prompts,
        estimated_seconds=sum(job.seconds for job in jobs),
        body_bytes=sum(job.body_bytes for job in jobs),
        prompt_tokens=int(prompts.sum()),
        first_key=jobs[0].key,
        last_key=jobs[-1].key,
    )
