"""StandingPlan, the policy of Trunkline: the whole backlog in prefix order, shared among tenants, kept as it changes.

One `FlowPlan` a tenant; `Turns` says whose cohort an instance takes next, and each of them goes on where it was in its
own prefix order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.core.flowplan import Fleet, FlowPlan
from service.core.plan import DEFAULT_LIMITS, InstanceView, Limits, PlannedCohort
from service.core.policy import Arrivals, chosen_arrivals
from service.core.shares import Shares
from service.core.turns import Turns

_PACE_AFTER_COHORTS = 2  # taken per instance, before the pace says anything
_SMALL_SHARE = 0.25  # of the backlog: a tenant with less keeps to its own share of the instances
_SLOWEST, _FASTEST = 1e-3, 1e3  # estimated / real seconds: rates that nobody fitted may be off by so much


class StandingPlan:
    """See `policy.Policy` for the calls."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, window_jobs: int | None = None) -> None:
        """`window_jobs`: how many jobs of a tenant are planned at once; None for all of them."""
        self._limits = limits
        self._window_jobs = window_jobs
        self._fleet = Fleet()
        self._flows: dict[int, FlowPlan] = {}
        self._shares = Shares()
        self._turns = Turns(self._shares, limits.turn_seconds)
        self._taken_seconds = 0.0  # estimated, since `_since`
        self._taken_cohorts = 0
        self._since = -math.inf

    @property
    def pending_jobs(self) -> int:
        return sum(flow.count for flow in self._flows.values())

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        before = {(view.queue, view.boot_id): number for number, view in enumerate(self._fleet.views)}
        origins = [before.get((view.queue, view.boot_id)) for view in views]
        old_out = self._fleet.out_seconds
        is_same = origins == list(range(len(self._fleet.views)))
        self._fleet.views = list(views)
        self._fleet.out_seconds = [0.0 if origin is None else old_out[origin] for origin in origins]
        if is_same:
            return
        self._since = -math.inf
        self._turns.change_fleet(origins)
        for flow in self._flows.values():
            flow.change_fleet(origins)

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        self._fleet.out_seconds[:] = seconds
        self._turns.set_out(jobs)

    def set_weight(self, flow: int, weight: float) -> None:
        self._shares.set_weight(flow, weight)

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        for number in np.unique(arrivals.flows).tolist():
            if number not in self._flows:
                self._flows[number] = FlowPlan(self._limits, self._window_jobs, self._fleet)
            self._shares.activate(number)
            part = chosen_arrivals(arrivals, np.flatnonzero(arrivals.flows == number))
            self._flows[number].add(part, now_seconds, self._servers(number, now_seconds))

    def drop(self, owner: int) -> None:
        for number, flow in self._flows.items():
            flow.drop(owner)
            if not flow.count:
                self._shares.retire(number)
        if not self._shares.order():
            self._since = -math.inf  # what follows is idle time, and no slowness

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        owner = self._turns.owner(instance)
        for number in self._turns.candidates(instance, now_seconds):
            flow = self._flows[number]
            servers = self._servers(number, now_seconds)
            if flow.is_due(now_seconds, servers):
                flow.replan(now_seconds, servers, self._lanes(number, instance))
            cohort = flow.take(instance)
            if cohort is not None:
                self._charge(number, cohort, now_seconds)
                return cohort
            if number == owner and self._turns.is_held(instance, now_seconds):
                return None
        return None

    def _lanes(self, number: int, instance: int) -> Sequence[int]:
        """Instances over which a flow is planned: all, but for one that is done long before the others are."""
        if _SMALL_SHARE * self.pending_jobs < self._flows[number].count:
            return range(len(self._fleet.views))
        return self._turns.claim(number, instance) or range(len(self._fleet.views))

    def _charge(self, number: int, cohort: PlannedCohort, now_seconds: float) -> None:
        if self._since == -math.inf:
            self._since, self._taken_seconds, self._taken_cohorts = now_seconds, -sum(self._fleet.out_seconds), 0
        self._taken_seconds += cohort.estimated_seconds
        self._taken_cohorts += 1
        self._fleet.out_seconds[cohort.instance] += cohort.estimated_seconds
        self._shares.charge(number, cohort.estimated_seconds)
        out_seconds = self._fleet.out_seconds[cohort.instance] / self._speed(now_seconds)
        self._turns.took(cohort.instance, number, len(cohort.job_ids), out_seconds, now_seconds)
        if not self._flows[number].count:
            self._shares.retire(number)
            if not self._shares.order():
                self._since = -math.inf  # what follows may be idle time

    def _servers(self, number: int, now_seconds: float) -> float:
        """Seconds of estimated work that are done for a flow per second: its share of the instances, as fast as they
        were seen to be."""
        return max(len(self._fleet.views), 1) * self._shares.share(number) * self._speed(now_seconds)

    def _speed(self, now_seconds: float) -> float:
        """Estimated seconds done per second and instance since the fleet is busy; 1 until that can be told."""
        n = len(self._fleet.views)
        done = self._taken_seconds - sum(self._fleet.out_seconds)
        passed = now_seconds - self._since
        if self._taken_cohorts < _PACE_AFTER_COHORTS * n or done <= 0 or not 0 < passed < math.inf:
            return 1.0
        return min(max(done / (passed * n), _SLOWEST), _FASTEST)
