"""A policy that is watched: what it gave out when, for benches; and a flood that need not be run to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.core.plan import InstanceView, PlannedCohort
from service.core.policy import Arrivals, Policy

_AFTER_SECONDS = 60.0  # of the flood that is still run after everybody else's last job is taken


class Watched:
    """A policy, and what it gave out when. See `policy.Policy` for the calls."""

    def __init__(self, policy: Policy, *, drop_owner: int | None = None, small_jobs: int = 0) -> None:
        """With `drop_owner`, that owner's waiting jobs are dropped some time after `small_jobs` of all others were
        taken: the replay need not go on to the end."""
        self._policy = policy
        self._drop_owner, self._small_left = drop_owner, small_jobs
        self._flood_ids: set[int] = set()
        self._drop_at = math.inf
        self.dropped_at = math.inf
        self.taken: list[tuple[float, PlannedCohort]] = []

    @property
    def pending_jobs(self) -> int:
        return self._policy.pending_jobs

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        self._policy.set_instances(views, now_seconds)

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        self._policy.set_loads(seconds, jobs)

    def set_weight(self, flow: int, weight: float) -> None:
        self._policy.set_weight(flow, weight)

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        if self._drop_owner is not None:
            self._flood_ids.update(arrivals.jobs.job_ids[arrivals.owners == self._drop_owner].tolist())
        self._policy.add(arrivals, now_seconds)

    def drop(self, owner: int) -> None:
        self._policy.drop(owner)

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        if now_seconds >= self._drop_at and self._drop_owner is not None:
            self.dropped_at, self._drop_at = now_seconds, math.inf
            self._policy.drop(self._drop_owner)
        cohort = self._policy.next_cohort(instance, now_seconds)
        if cohort is None:
            return None
        self.taken.append((now_seconds, cohort))
        if self._drop_owner is not None and self._small_left:
            self._small_left -= sum(job_id not in self._flood_ids for job_id in cohort.job_ids.tolist())
            if not self._small_left:
                self._drop_at = now_seconds + _AFTER_SECONDS
        return cohort
