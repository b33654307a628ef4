"""What the dispatcher and the simulator ask of a policy: it holds the backlog of one model and priority class, and says
what each instance runs next.

`standing.StandingPlan` is ours; `baselines` holds the others. A driver tells of arrivals and of the fleet, and takes
cohorts for an instance when that has room; what it took is out of the policy's hands. Times are seconds on the
driver's clock, which only has to be the same in every call. Instances are given in a fixed order, and named by their
index in it until the next `set_instances`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.core.cut import FloatArray
from service.core.plan import Backlog, InstanceView, PlannedCohort
from service.core.prefix import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Jobs that join the backlog, with what decides who goes first. All arrays are [n]."""

    jobs: Backlog  # in order of arrival
    owners: IntArray  # a batch's number: its jobs can be dropped together
    flows: IntArray  # a tenant's number: tenants share the fleet by weight
    deadlines: FloatArray  # seconds on the driver's clock, inf for none
    priorities: IntArray | None = None  # classes, the higher the sooner; None: all of one class


def chosen_arrivals(arrivals: Arrivals, places: IntArray) -> Arrivals:
    """The arrivals at these ascending places."""
    if len(places) == len(arrivals.flows):
        return arrivals
    jobs = arrivals.jobs
    return Arrivals(
        jobs=Backlog(
            job_ids=jobs.job_ids[places],
            keys=[jobs.keys[place] for place in places.tolist()],
            prompt_tokens=jobs.prompt_tokens[places],
            output_tokens=jobs.output_tokens[places],
            body_bytes=jobs.body_bytes[places],
        ),
        owners=arrivals.owners[places],
        flows=arrivals.flows[places],
        deadlines=arrivals.deadlines[places],
        priorities=None if arrivals.priorities is None else arrivals.priorities[places],
    )


class Policy(Protocol):
    """A backlog and the order in which instances work it off. Not safe for threads."""

    @property
    def pending_jobs(self) -> int:
        """Jobs added and neither taken nor dropped."""

    def set_instances(self, views: Sequence[InstanceView], now_seconds: float) -> None:
        """The fleet, again whenever an instance comes, goes, starts anew or is rated otherwise; the backlog stays."""

    def set_loads(self, seconds: Sequence[float], jobs: Sequence[int]) -> None:
        """What was taken for each instance and is not finished: estimated seconds, and jobs."""

    def set_weight(self, flow: int, weight: float) -> None:
        """A tenant's share against the others'; 1 where never set."""

    def add(self, arrivals: Arrivals, now_seconds: float) -> None:
        """Jobs join the backlog. Ids must be new to it."""

    def drop(self, owner: int) -> None:
        """Forget the pending jobs of a batch: it was cancelled, paused, or given another priority."""

    def next_cohort(self, instance: int, now_seconds: float) -> PlannedCohort | None:
        """Take the next jobs for an instance, in execution order; None where there is nothing for it to do."""
