"""Priority classes: one policy for each, and an instance gets work of a lower one only where it gets none of a higher.

So priorities hold at cohort boundaries: what was taken is run, and the next cohort is of the highest class there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from service.core.model import Priority
from service.core.plan import InstanceView, PlannedCohort
from service.core.policy import Arrivals, Policy, chosen_arrivals


class PriorityClasses:
    """See `policy.Policy` for the calls. `make` gives a policy with nothing in it."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._classes: dict[int, Policy] = {}  # the highest first
        self._views: list[InstanceView] = []
        self._loads: tuple[Sequence[float], Sequence[int]] = ((), ())
        self._weights: dict[int, float] = {}

    @property
    def pending_jobs(self) -> int:
        return sum(policy.pending_jobs for policy in self._classes.values())

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        if len(views) != len(self._views):
            self._loads = ([view.load_seconds for view in views], [0] * len(views))
        self._views = list(views)
        for policy in self._classes.values():
            policy.set_instances(views, now_seconds)

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        self._loads = (list(seconds), list(jobs))
        for policy in self._classes.values():
            policy.set_loads(seconds, jobs)

    def set_weight(self, flow: int, weight: float) -> None:
        self._weights[flow] = weight
        for policy in self._classes.values():
            policy.set_weight(flow, weight)

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        priorities = arrivals.priorities
        if priorities is None:
            self._of_class(int(Priority.NORMAL), now_seconds).add(arrivals, now_seconds)
            return
        for priority in np.unique(priorities).tolist():
            part = chosen_arrivals(arrivals, np.flatnonzero(priorities == priority))
            self._of_class(priority, now_seconds).add(part, now_seconds)

    def drop(self, owner: int) -> None:
        for policy in self._classes.values():
            policy.drop(owner)

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        for priority, policy in self._classes.items():
            cohort = policy.next_cohort(instance, now_seconds) if policy.pending_jobs else None
            if cohort is not None:
                return dataclasses.replace(cohort, priority=priority)
        return None

    def _of_class(self, priority: int, now_seconds: float) -> Policy:
        if priority not in self._classes:
            policy = self._make()
            policy.set_instances(self._views, now_seconds)
            policy.set_loads(*self._loads)
            for flow, weight in self._weights.items():
                policy.set_weight(flow, weight)
            self._classes[priority] = policy
            self._classes = dict(sorted(self._classes.items(), reverse=True))
        return self._classes[priority]
