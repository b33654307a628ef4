"""The store's rows as the planner and the ledger see them, with cautious defaults for what an engine does not say."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.broker import BULK_SLOTS, INTERACTIVE_SLOTS
from service.core import plan as planning
from service.core.cut import FloatArray
from service.core.feed import jobs_wanted
from service.core.ledger import BootView
from service.core.model import Priority
from service.core.prefix import cacheable_tokens, shared_tokens
from service.store import backlog, stealing
from service.store.backlog import NewCohort, WaitingJob
from service.store.dispatching import OpenWork, QueueLoad, Room
from service.store.instances import Boot

_DEFAULT_BLOCK_TOKENS = 16  # vLLM's on a GPU; for engines that do not say
_DEFAULT_KV_TOKENS = 1_000_000
_DEFAULT_SEQUENCES = 64
# Until rates are fitted: only their ratio matters to a plan, and ten to one is common on GPUs.
_DEFAULT_RATES = planning.Rates(prefill_tokens_per_second=10_000.0, decode_tokens_per_second=1_000.0)


@dataclass(slots=True)
class FleetLoad:
    """The ready boots and what is planned for them, as one pass sees it."""

    boots: list[Boot]
    loads: list[QueueLoad]

    def of_model(self, model: str) -> list[Boot]:
        return [boot for boot in self.boots if boot.model == model]

    def seconds(self, queue: str) -> float:
        return sum(load.seconds for load in self.loads if load.queue == queue)

    def bulk_jobs(self, queue: str) -> int:
        """Written for it and not done, as far as cohorts tell; without single jobs, which no plan gave it."""
        return sum(self.count(queue, what, interactive=False) for what in ("ready_jobs", "active_jobs"))

    def count(self, queue: str, what: str, *, interactive: bool) -> int:
        of_queue = (load for load in self.loads if load.queue == queue)
        chosen = (load for load in of_queue if (load.priority >= Priority.INTERACTIVE) == interactive)
        return sum(int(getattr(load, what)) for load in chosen)


def instance_view(boot: Boot, held_key: bytes | None, load_seconds: float) -> planning.InstanceView:
    """A boot as the planner sees it; what its engine does not say gets a cautious default."""
    return planning.InstanceView(
        queue=boot.queue,
        block_size=boot.block_size or _DEFAULT_BLOCK_TOKENS,
        kv_capacity_tokens=kv_tokens(boot),
        max_num_seqs=boot.max_num_seqs or _DEFAULT_SEQUENCES,
        rates=_rates(boot),
        held_key=held_key,
        load_seconds=load_seconds,
        boot_id=boot.id,
    )


def single_cohort(
    boot: Boot, model: str, single: WaitingJob, priority: int, sequence: int, cached_tokens: int
) -> NewCohort:
    """A single job as a cohort of its own, with its estimated cost on that boot."""
    rates = _rates(boot)
    prefill_seconds = (single.prompt_tokens - cached_tokens) / rates.prefill_tokens_per_second
    return NewCohort(
        model=model,
        queue=boot.queue,
        sequence=sequence,
        priority=priority,
        alone=False,
        body_bytes=single.body_bytes,
        estimated_seconds=prefill_seconds + single.output_tokens / rates.decode_tokens_per_second,
        job_ids=[single.job_id],
        predicted_cached_tokens=[cached_tokens],
        first_of_group=[cached_tokens == 0],
    )


def bulk_room(boot: Boot, active_cohorts: int, work: OpenWork) -> Room:
    """What may be out for a boot: what `core.feed` says, so that its engine never waits for the next look; two cohorts
    at least, however large; and no more, since what is out cannot be stolen."""
    rates = _rates(boot)
    prefill_seconds = work.new_tokens / rates.prefill_tokens_per_second
    wanted = jobs_wanted(
        jobs=work.jobs,
        seconds=prefill_seconds + work.output_tokens / rates.decode_tokens_per_second,
        new_tokens=work.new_tokens,
        max_num_seqs=boot.max_num_seqs or _DEFAULT_SEQUENCES,
        kv_capacity_tokens=kv_tokens(boot),
    )
    return Room(
        jobs=wanted,
        least_cohorts=max(0, 2 - active_cohorts),
        most_cohorts=BULK_SLOTS - active_cohorts,
    )


def singles_room(active_cohorts: int) -> Room:
    """Single jobs go out at once, as long as there are threads."""
    free = INTERACTIVE_SLOTS - active_cohorts
    return Room(jobs=free, least_cohorts=0, most_cohorts=free)


def kv_tokens(boot: Boot) -> int:
    """What its cache holds."""
    return boot.kv_capacity_tokens or _DEFAULT_KV_TOKENS


def ledger_view(boot: Boot, load_seconds: float) -> BootView:
    """A boot as the ledger sees it."""
    block_size = boot.block_size or _DEFAULT_BLOCK_TOKENS
    return BootView(boot_id=boot.id, block_size=block_size, rates=_rates(boot), load_seconds=load_seconds)


def backlog_arrays(jobs: Sequence[backlog.WaitingJob], output_scale: float = 1.0) -> planning.Backlog:
    """Rows of the backlog as the planner's arrays; answers are `output_scale` times as long as intake predicted."""
    return planning.Backlog(
        job_ids=np.array([item.job_id for item in jobs], dtype=np.int64),
        keys=[item.prefix_key for item in jobs],
        prompt_tokens=np.array([item.prompt_tokens for item in jobs], dtype=np.int64),
        output_tokens=np.array([round(item.output_tokens * output_scale) for item in jobs], dtype=np.int64),
        body_bytes=np.array([item.body_bytes for item in jobs], dtype=np.int64),
    )


def _rates(boot: Boot) -> planning.Rates:
    if not boot.prefill_tokens_per_second or not boot.decode_tokens_per_second:
        return _DEFAULT_RATES
    return planning.Rates(
        prefill_tokens_per_second=boot.prefill_tokens_per_second,
        decode_tokens_per_second=boot.decode_tokens_per_second,
    )


def job_seconds(tail: stealing.Tail, boot: Boot) -> FloatArray:
    """float64[jobs]: estimated cost of each job of a tail on that boot, for choosing where to halve it."""
    prefill = np.array([item.prompt_tokens - item.predicted_cached_tokens for item in tail.jobs], dtype=np.float64)
    decode = np.array([item.output_tokens for item in tail.jobs], dtype=np.float64)
    rates = _rates(boot)
    return prefill / rates.prefill_tokens_per_second + decode / rates.decode_tokens_per_second


def predict_moved(boot: Boot, jobs: Sequence[stealing.TailJob], held_sorted: Sequence[bytes]) -> dict[int, int]:
    """For jobs that a boot is to run in the order given, after others with the keys `held_sorted`: job id -> tokens
    that it should find there, for those for which that is not what was predicted."""
    changed = {}
    for before, item in zip((None, *jobs), jobs, strict=False):
        at = bisect_left(held_sorted, item.prefix_key)
        near = [*held_sorted[max(at - 1, 0) : at + 1], *((before.prefix_key,) if before else ())]
        shared = max((shared_tokens(key, item.prefix_key) for key in near), default=0)
        found = cacheable_tokens(shared, item.prompt_tokens, boot.block_size or _DEFAULT_BLOCK_TOKENS)
        if before is None or found > item.predicted_cached_tokens:
            changed[item.job_id] = found
    return changed
