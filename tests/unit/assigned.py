"""Policies for tests: every job goes where the test, or a plan, says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from service.core.plan import InstanceView, PlannedCohort
from service.core.policy import Arrivals


class Assigned:
    """In order of arrival, a few at a time. `place(job id, number of instances)` says where; with None there is one
    queue that all take from."""

    def __init__(self, place: Callable[[int, int], int] | None, cohort_jobs: int = 16) -> None:
        self._place, self._cohort_jobs = place, cohort_jobs
        self._queues: list[deque[tuple[int, bytes, int]]] = []
        self.calls: list[tuple[str, object, float]] = []  # what the driver told, in order
        self.loads: tuple[list[float], list[int]] = ([], [])

    @property
    def pending_jobs(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        self.calls.append(("fleet", [(view.queue, view.boot_id) for view in views], now_seconds))
        waiting = sorted(job for queue in self._queues for job in queue)
        self._queues = [deque() for _ in (views if self._place else views[:1])]
        for job in waiting:
            self._queue_of(job[0]).append(job)

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        self.loads = list(seconds), list(jobs)

    def set_weight(self, flow: int, weight: float) -> None:
        raise NotImplementedError("no replay sets weights")

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        ids = arrivals.jobs.job_ids.tolist()
        self.calls.append(("add", ids, now_seconds))
        for job in zip(ids, arrivals.jobs.keys, arrivals.jobs.prompt_tokens.tolist(), strict=True):
            self._queue_of(job[0]).append(job)

    def drop(self, owner: int) -> None:
        raise NotImplementedError("no replay drops jobs")

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        queue = self._queues[instance if self._place else 0]
        if not queue:
            return None
        jobs = [queue.popleft() for _ in range(min(self._cohort_jobs, len(queue)))]
        return PlannedCohort(
            instance=instance,
            job_ids=np.array([job[0] for job in jobs], dtype=np.int64),
            predicted_cached_tokens=np.zeros(len(jobs), dtype=np.int64),
            first_of_group=np.ones(len(jobs), dtype=np.bool_),
            estimated_seconds=float(len(jobs)),
            body_bytes=0,
            prompt_tokens=sum(job[2] for job in jobs),
            first_key=jobs[0][1],
            last_key=jobs[-1][1],
        )

    def _queue_of(self, job_id: int) -> deque[tuple[int, bytes, int]]:
        return self._queues[self._place(job_id, len(self._queues)) if self._place else 0]


class AsPlanned:
    """The cohorts of a plan, each instance its own in their order: what a plan is worth without any stealing."""

    def __init__(self, cohorts: Sequence[PlannedCohort]) -> None:
        self._cohorts = list(cohorts)
        self._queues: list[deque[PlannedCohort]] = []

    @property
    def pending_jobs(self) -> int:
        return sum(len(cohort.job_ids) for queue in self._queues for cohort in queue)

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        self._queues = [deque(c for c in self._cohorts if c.instance == number) for number in range(len(views))]

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        pass

    def set_weight(self, flow: int, weight: float) -> None:
        raise NotImplementedError("no replay sets weights")

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        planned = {job for cohort in self._cohorts for job in cohort.job_ids.tolist()}
        assert planned == set(arrivals.jobs.job_ids.tolist())

    def drop(self, owner: int) -> None:
        raise NotImplementedError("no replay drops jobs")

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        return self._queues[instance].popleft() if self._queues[instance] else None
