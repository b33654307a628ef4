"""The records of the plan: what goes in, its bounds, and what comes out. `plan` has the functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.prefix import IntArray


class PlanError(ValueError):
    """The plan cannot be made, or is not one: the message names the jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The cost model: a job takes uncached / prefill + output / decode seconds of its engine's time.

    Both are the engine's as a whole while it is busy, not one sequence's: decode is the sum over the running
    sequences, so that costs of jobs that run side by side add up to the time that all of them take.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_second > 0 and self.decode_tokens_per_second > 0):
            raise PlanError(f"Rates must be above 0: {self}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Jobs of one model and priority class, in any order. All arrays are [n]; tokens and bytes are int64."""

    job_ids: IntArray
    keys: Sequence[bytes]
    prompt_tokens: IntArray
    output_tokens: IntArray  # predicted
    body_bytes: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """What the planner knows of one instance."""

    queue: str
    block_size: int
    kv_capacity_tokens: int
    max_num_seqs: int
    rates: Rates
    held_key: bytes | None = None  # of the last job planned on it: what its cache will end on
    load_seconds: float = 0.0  # of work planned on it already, running or not
    boot_id: int = 0  # another one under the same queue is a cache that starts empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a cohort, and the two thresholds of the plan."""

    cohort_share: int = 30  # at least so many cohorts in an instance's run, so that what is left can be stolen
    cohort_seconds: float = 15.0  # estimated
    cohort_jobs: int = 512
    cohort_bytes: int = 8 * 1024 * 1024  # of bodies: what a worker holds
    slide_share: float = 0.03  # of the makespan that a cut may cost to fall where less is shared
    scatter_work_share: float = 0.06  # dealing out may compute again so much of all work ...
    scatter_hit_share: float = 0.02  # ... and so much of the tokens that the cache would have served
    turn_seconds: float = 2.0  # of work by which one tenant may be ahead of another, where they share an instance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedCohort:
    """Jobs for one instance, in execution order. Arrays are [jobs of the cohort]."""

    instance: int  # index into the instances given
    job_ids: IntArray
    predicted_cached_tokens: IntArray  # after the job before it in the instance's run
    first_of_group: NDArray[np.bool_]  # shares less than half with the job before it, here or in key order
    estimated_seconds: float
    body_bytes: int
    prompt_tokens: int
    first_key: bytes
    last_key: bytes
    priority: int = 1  # class; `classes.PriorityClasses` says otherwise


DEFAULT_LIMITS = Limits()
