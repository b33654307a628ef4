"""What is replayed: jobs with their arrivals and true lengths, the engines, and what becomes of the fleet meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from service.core.cut import FloatArray
from service.core.plan import Backlog, Rates
from service.core.policy import Arrivals
from service.core.prefix import IntArray
from service.core.simulate import DEFAULT_COST, CostModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetJobs:
    """What arrives, and what it turns out to be. All arrays are [n]."""

    jobs: Backlog  # job ids are unique; its output_tokens are what the planner is told
    output_tokens: IntArray  # true
    arrival_seconds: FloatArray
    owners: IntArray
    flows: IntArray
    deadlines: FloatArray  # seconds, inf for none
    priorities: IntArray | None = None  # classes, the higher the sooner; None: all of one class

    def arrivals(self, chosen: IntArray) -> Arrivals:
        """The jobs at these indices, as the policy is told of them."""
        return Arrivals(
            jobs=_chosen_jobs(self.jobs, chosen),
            owners=self.owners[chosen],
            flows=self.flows[chosen],
            deadlines=self.deadlines[chosen],
            priorities=None if self.priorities is None else self.priorities[chosen],
        )

    def take(self, chosen: IntArray) -> FleetJobs:
        """The jobs at these indices alone."""
        return FleetJobs(
            jobs=_chosen_jobs(self.jobs, chosen),
            output_tokens=self.output_tokens[chosen],
            arrival_seconds=self.arrival_seconds[chosen],
            owners=self.owners[chosen],
            flows=self.flows[chosen],
            deadlines=self.deadlines[chosen],
            priorities=None if self.priorities is None else self.priorities[chosen],
        )


def jobs_at_once(jobs: Backlog, output_tokens: IntArray | None = None) -> FleetJobs:
    """All there from the start, of one owner and flow, without deadline; as long as told, unless said otherwise."""
    n = len(jobs.job_ids)
    return FleetJobs(
        jobs=jobs,
        output_tokens=jobs.output_tokens if output_tokens is None else output_tokens,
        arrival_seconds=np.zeros(n),
        owners=np.zeros(n, dtype=np.int64),
        flows=np.zeros(n, dtype=np.int64),
        deadlines=np.full(n, math.inf),
    )


def _chosen_jobs(jobs: Backlog, chosen: IntArray) -> Backlog:
    return Backlog(
        job_ids=jobs.job_ids[chosen],
        keys=[jobs.keys[index] for index in chosen.tolist()],
        prompt_tokens=jobs.prompt_tokens[chosen],
        output_tokens=jobs.output_tokens[chosen],
        body_bytes=jobs.body_bytes[chosen],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """One engine of the fleet."""

    block_size: int
    kv_capacity_tokens: int
    max_num_seqs: int = 64
    max_batched_tokens: int = 8192
    cost: CostModel = DEFAULT_COST

    @property
    def capacity_blocks(self) -> int:
        return self.kv_capacity_tokens // self.block_size

    def rates(self, context_tokens: float = 2048.0) -> Rates:
        """The two rates that come nearest to the cost model, for sequences of `context_tokens` on average.

        Prefill: full steps. Decode: as many sequences as the cache and the limit allow, all decoding, with nothing
        prefilled beside them. Both therefore pay for whole steps, so a mix that shares its steps is a little faster
        than they say; only their ratio matters to a plan.
        """
        step = self.cost.seconds(prefill_tokens=self.max_batched_tokens, decoding=0, context_tokens=0)
        running = max(1, min(self.max_num_seqs, int(self.kv_capacity_tokens / max(context_tokens, 1.0))))
        decode = self.cost.seconds(prefill_tokens=0, decoding=running, context_tokens=int(running * context_tokens))
        return Rates(
            prefill_tokens_per_second=self.max_batched_tokens / step, decode_tokens_per_second=running / decode
        )


def mean_context_tokens(prompt_tokens: IntArray, output_tokens: IntArray) -> float:
    """Context of a decoding sequence, averaged over all decode steps of these jobs: what `EngineShape.rates` takes."""
    outputs = np.maximum(output_tokens, 1)
    return float((outputs * (prompt_tokens + outputs / 2)).sum() / outputs.sum()) if len(outputs) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """From then on just these shapes (indices) run. One that goes loses its cache, and its unfinished jobs go back to
    the policy; one that comes starts empty."""

    at_seconds: float
    present: tuple[int, ...]
