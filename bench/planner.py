"""How long the planner takes and what it holds: keys to plan, late arrivals, memory per pending job, on one core.

Jobs are made (a random tree of prefixes: groups that share a beginning, sub-groups that share more), since only their
number and the length of their keys matter here. What the plan is worth is bench.traces' business.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from service.core.plan import Backlog, InstanceView, Rates
from service.core.policy import Arrivals
from service.core.prefix import RUNG_BYTES, rungs_to_tokens
from service.core.standing import StandingPlan

_LATE_ARRIVALS = 10_000
_PARTS = 20  # pieces in which the backlog is made and added, so that no copy of it is held beside the planner's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run saw. Times are CPU seconds of the one thread: what an idle core takes, however busy the machine."""

    jobs: int
    blocks_per_job: int  # of 32 tokens: one rung of the key each, as far as 4,096 tokens
    instances: int
    plan_seconds: float  # from keys that are in memory to the first cohort of every instance
    peak_bytes: int  # of the process, keys included
    bytes_per_pending_job: float  # beside the key's 4 bytes a rung, once planned
    late_arrival_seconds_p50: float
    late_arrival_seconds_p99: float
    cohort_seconds_p99: float  # to take one
    left_bytes_per_job: float  # keys and all, when every job is taken


def made_keys(n: int, n_blocks: int, rng: np.random.Generator) -> list[bytes]:
    """n keys of n_blocks rungs: 1,000 groups share a beginning of random depth, 20,000 sub-groups share more."""
    groups = rng.integers(0, 1_000, n)
    below = rng.integers(0, 20, n)
    first = np.sort(np.random.default_rng(1).integers(1, n_blocks, (1_000, 2)), axis=1)
    rungs = rng.integers(0, 2**32, (n, n_blocks), dtype=np.uint32)
    depth = np.arange(n_blocks)
    of_group = (groups[:, None] * 7919 + depth * 104_729).astype(np.uint32)
    of_below = ((groups * 20 + below)[:, None] * 15_485_863 + depth * 32_452_843).astype(np.uint32)
    rungs = np.where(depth < first[groups][:, 1:2], of_below, rungs)
    rungs = np.where(depth < first[groups][:, 0:1], of_group, rungs)
    data = rungs.astype(">u4").tobytes()
    size = n_blocks * RUNG_BYTES
    return [data[start : start + size] for start in range(0, n * size, size)]


def arrivals(n: int, n_blocks: int, rng: np.random.Generator, first_id: int) -> Arrivals:
    tokens = rungs_to_tokens(n_blocks) + rng.integers(1, 32, n)
    jobs = Backlog(
        job_ids=np.arange(first_id, first_id + n, dtype=np.int64),
        keys=made_keys(n, n_blocks, rng),
        prompt_tokens=tokens,
        output_tokens=rng.integers(8, 512, n),
        body_bytes=tokens * 4,
    )
    nothing = np.zeros(n, dtype=np.int64)
    return Arrivals(jobs=jobs, owners=nothing, flows=nothing, deadlines=np.full(n, math.inf))


def measure(n: int, n_blocks: int, n_instances: int) -> Figures:
    """One run; the process should be fresh, since its peak is read."""
    rng = np.random.default_rng(7)
    plan = StandingPlan()
    plan.set_instances(_fleet(n_instances), 0.0)
    before_bytes = _resident_bytes()
    plan_seconds = 0.0
    for part in range(_PARTS):
        made = arrivals(n // _PARTS, n_blocks, rng, part * n // _PARTS)
        started = time.thread_time()
        plan.add(made, 0.0)
        plan_seconds += time.thread_time() - started
        del made
    started = time.thread_time()
    taken = [plan.next_cohort(number, 0.0) for number in range(n_instances)]
    plan_seconds += time.thread_time() - started
    del taken
    waiting = plan.pending_jobs
    held_bytes = _resident_bytes() - before_bytes
    late = _late_seconds(plan, n_blocks, rng, n)
    takes = _drain(plan, n_instances)
    return Figures(
        jobs=n,
        blocks_per_job=n_blocks,
        instances=n_instances,
        plan_seconds=plan_seconds,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bytes_per_pending_job=held_bytes / waiting - n_blocks * RUNG_BYTES,
        late_arrival_seconds_p50=statistics.median(late),
        late_arrival_seconds_p99=float(np.quantile(late, 0.99)),
        cohort_seconds_p99=float(np.quantile(takes, 0.99)),
        left_bytes_per_job=(_resident_bytes() - before_bytes) / n,
    )


def _fleet(n: int) -> list[InstanceView]:
    rates = Rates(prefill_tokens_per_second=10_000.0, decode_tokens_per_second=1_000.0)
    return [
        InstanceView(
            queue=f"instance.{number}",
            block_size=16,
            kv_capacity_tokens=1_000_000,
            max_num_seqs=256,
            rates=rates,
            boot_id=number + 1,
        )
        for number in range(n)
    ]


def _late_seconds(plan: StandingPlan, n_blocks: int, rng: np.random.Generator, first_id: int) -> list[float]:
    """One at a time, fewer than what makes the planner plan anew."""
    seconds = []
    for number in range(min(_LATE_ARRIVALS, max(plan.pending_jobs // 20, 1))):
        one = arrivals(1, n_blocks, rng, first_id + number)
        started = time.thread_time()
        plan.add(one, 0.0)
        seconds.append(time.thread_time() - started)
    return seconds


def _drain(plan: StandingPlan, n_instances: int) -> list[float]:
    seconds = []
    while plan.pending_jobs:
        for number in range(n_instances):
            started = time.thread_time()
            plan.next_cohort(number, 0.0)
            seconds.append(time.thread_time() - started)
    return seconds


def _resident_bytes() -> int:
    """Of this process, after the allocator gave back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def table(figures: Figures) -> Table:
    shown = Table("figure", "value", title="The planner")
    for name, value in asdict(figures).items():
        shown.add_row(name, f"{value:,.6g}" if isinstance(value, float) else f"{value:,}")
    return shown


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=100, help="of 32 tokens a job")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    options = parser.parse_args(argv)
    if options.jobs < _PARTS or options.blocks < 2 or options.instances < 1:
        parser.error(f"at least {_PARTS} jobs, 2 blocks and 1 instance")
    figures = measure(options.jobs, options.blocks, options.instances)
    Console().print(table(figures))
    if options.json:
        print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
