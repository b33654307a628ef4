"""First come, first served: what deadlines are compared with. One queue in order of arrival; instances pull."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from service.core.plan import InstanceView, PlannedCohort, estimated_seconds, follow
from service.core.policy import Arrivals, chosen_arrivals


class FirstCome:
    """See `service.core.policy.Policy` for the calls; weights, loads and classes are not heeded."""

    def __init__(self) -> None:
        self._views: list[InstanceView] = []
        self._queue: deque[Arrivals] = deque()  # one job each

    @property
    def pending_jobs(self) -> int:
        return len(self._queue)

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        self._views = list(views)

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        """Not heeded: who has room pulls."""

    def set_weight(self, flow: int, weight: float) -> None:
        """Not heeded."""

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        n = len(arrivals.flows)
        self._queue.extend(chosen_arrivals(arrivals, np.array([place])) if n > 1 else arrivals for place in range(n))

    def drop(self, owner: int) -> None:
        self._queue = deque(item for item in self._queue if int(item.owners[0]) != owner)

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        if not self._queue:
            return None
        view = dataclasses.replace(self._views[instance], held_key=None)
        n = min(max(1, view.max_num_seqs // 4), len(self._queue))
        jobs = [self._queue.popleft().jobs for _ in range(n)]
        keys = [job.keys[0] for job in jobs]
        prompts = np.concatenate([job.prompt_tokens for job in jobs])
        outputs = np.concatenate([job.output_tokens for job in jobs])
        _, cached = follow(keys, prompts, view)
        return PlannedCohort(
            instance=instance,
            job_ids=np.concatenate([job.job_ids for job in jobs]),
            predicted_cached_tokens=cached,
            first_of_group=np.zeros(n, dtype=np.bool_),
            estimated_seconds=float(estimated_seconds(cached, prompts, outputs, view).sum()),
            body_bytes=sum(int(job.body_bytes[0]) for job in jobs),
            prompt_tokens=int(prompts.sum()),
            first_key=keys[0],
            last_key=keys[-1],
        )
