"""The plan: a backlog in prefix order, one run per instance, cut into cohorts. DESIGN.md section 6, steps 2 to 7.

Pure and deterministic: the same backlog in another order of arrival gives the same plan, except among jobs of equal
key and length. Sorting is by key, that is depth first through the prefix tree, so what one engine can serve from
cache is what each job shares with its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core import cut
from service.core.division import divide
from service.core.longest import long_first
from service.core.ordered import Sorted, entry_of, estimated_seconds, follow, predict, predict_cached_tokens, sort_jobs
from service.core.planrecords import (
    DEFAULT_LIMITS,
    Backlog,
    InstanceView,
    Limits,
    PlanError,
    PlannedCohort,
    Rates,
)
from service.core.prefix import IntArray, shared_tokens, shares_group

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
    jobs = sort_jobs(backlog)
    runs = divide(jobs, instances, limits)
    cohorts: list[PlannedCohort] = []
    for number, (run, view) in enumerate(zip(runs, instances, strict=True)):
        entry, _ = entry_of(run, jobs, view)
        run = np.roll(run, -entry)
        cohorts += _cohorts(number, _long_first(run, jobs, view) if long_answers_first else run, jobs, view, limits)
    return cohorts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    """A run in the order in which an instance would execute it. Arrays are [jobs of the run]."""

    shared: IntArray  # with the job before
    predicted: IntArray
    seconds: cut.FloatArray
    first: NDArray[np.bool_]  # shares less than half with the job before


def _executed(run: IntArray, jobs: Sorted, view: InstanceView) -> _Executed:
    shared = jobs.shared[run]
    jumps = np.flatnonzero(np.diff(run, prepend=run[0]) != 1)
    for index in jumps.tolist():  # the first, and wherever the run does not go on with the next position
        before = view.held_key if index == 0 else jobs.keys[run[index - 1]]
        shared[index] = 0 if before is None else shared_tokens(before, jobs.keys[run[index]])
    prompt_tokens = jobs.prompt_tokens[run]
    predicted = predict(shared, prompt_tokens, view)
    return _Executed(
        shared=shared,
        predicted=predicted,
        seconds=estimated_seconds(predicted, prompt_tokens, jobs.output_tokens[run], view),
        first=~shares_group(shared, prompt_tokens, np.concatenate((prompt_tokens[:1], prompt_tokens[:-1]))),
    )


def _long_first(run: IntArray, jobs: Sorted, view: InstanceView) -> IntArray:
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


def _cohorts(number: int, run: IntArray, jobs: Sorted, view: InstanceView, limits: Limits) -> list[PlannedCohort]:
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
