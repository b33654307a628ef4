"""A backlog in key order, and what an instance would serve of it from its cache and take for it. DESIGN.md section 6,
step 2.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core.cut import FloatArray
from service.core.planrecords import Backlog, InstanceView
from service.core.prefix import (
    IntArray,
    cacheable_tokens,
    cacheable_tokens_each,
    neighbour_shared_tokens,
    shared_tokens,
    sort_order,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The backlog in key order; `order` maps a position to the caller's index. A run is an array of positions."""

    order: IntArray
    keys: list[bytes]
    job_ids: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    body_bytes: IntArray
    shared: IntArray  # tokens, with the job before


def sort_jobs(backlog: Backlog) -> Sorted:
    order = sort_order(backlog.keys, backlog.prompt_tokens)
    keys = [backlog.keys[place] for place in order.tolist()]
    return Sorted(
        order=order,
        keys=keys,
        job_ids=backlog.job_ids[order],
        prompt_tokens=backlog.prompt_tokens[order],
        output_tokens=backlog.output_tokens[order],
        body_bytes=backlog.body_bytes[order],
        shared=neighbour_shared_tokens(keys),
    )


def predict(shared: IntArray, prompt_tokens: IntArray, view: InstanceView) -> IntArray:
    """Cached tokens of jobs in execution order, given what each shares with the one before it.

    A prompt beyond the cache is refused by the engine: 0, and the next job finds what was there before it.
    """
    predicted = np.zeros(len(shared), dtype=np.int64)
    fitting = np.flatnonzero(prompt_tokens <= view.kv_capacity_tokens)
    if not fitting.size:
        return predicted
    since_last = np.concatenate(([0], fitting[:-1] + 1))
    found = np.minimum.reduceat(shared[: fitting[-1] + 1], since_last)
    predicted[fitting] = cacheable_tokens_each(found, prompt_tokens[fitting], view.block_size)
    return predicted


def follow(keys: Sequence[bytes], prompt_tokens: IntArray, view: InstanceView) -> tuple[IntArray, IntArray]:
    """For jobs that run on an instance in the order given, after its `held_key`: int64[n] tokens that each shares with
    the one before it, and int64[n] tokens that the instance should serve from cache."""
    shared = neighbour_shared_tokens(keys)
    if len(keys) and view.held_key is not None:
        shared[0] = shared_tokens(view.held_key, keys[0])
    return shared, predict(shared, prompt_tokens, view)


def predict_cached_tokens(keys: Sequence[bytes], prompt_tokens: IntArray, view: InstanceView) -> IntArray:
    """The second of what `follow` gives."""
    return follow(keys, prompt_tokens, view)[1]


def estimated_seconds(
    cached: IntArray,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    view: InstanceView,
) -> FloatArray:
    """Cost of each job; nothing for one that the engine will refuse."""
    prefill = (prompt_tokens - cached) / view.rates.prefill_tokens_per_second
    seconds = prefill + output_tokens / view.rates.decode_tokens_per_second
    result: FloatArray = np.where(prompt_tokens <= view.kv_capacity_tokens, seconds, 0.0)
    return result


def entry_of(run: IntArray, jobs: Sorted, view: InstanceView) -> tuple[int, int]:
    """Step 6: the index in a run at which the instance goes on from what it holds, and the tokens that saves.

    The run is then executed from there to its end, and on from its beginning: that loses nothing, since its beginning
    was to be computed cold in any case. (0, 0) where nothing held is of use.
    """
    held = view.held_key
    if held is None or not run.size:
        return 0, 0

    def shared_at(index: int) -> int:
        return shared_tokens(held, jobs.keys[run[index]])

    after = bisect_left(range(len(run)), held, key=lambda index: jobs.keys[run[index]])
    most = max(shared_at(index) for index in (after - 1, after) if 0 <= index < len(run))
    # What is shared with the held key grows towards its place: the first job that shares the most.
    entry = bisect_left(range(after), most, key=shared_at)
    prompt = int(jobs.prompt_tokens[run[entry]])
    before = shared_tokens(jobs.keys[run[entry - 1]], jobs.keys[run[entry]]) if entry else 0
    gain = cacheable_tokens(most, prompt, view.block_size) - cacheable_tokens(before, prompt, view.block_size)
    return (entry, gain) if gain > 0 else (0, 0)
