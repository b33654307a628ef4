"""Backlogs for tests: small prefix trees, made from their rungs rather than from tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from service.core.plan import Backlog, InstanceView, Rates

RATES = Rates(prefill_tokens_per_second=1000.0, decode_tokens_per_second=500.0)


def key_of(rungs: list[int]) -> bytes:
    """A key of the given rungs; equal numbers at equal depths below equal parents are one prefix."""
    return b"".join(rung.to_bytes(4, "big") for rung in rungs)


def backlog(jobs: list[tuple[list[int], int, int, int]], first_id: int = 100) -> Backlog:
    """From (rungs, prompt tokens beyond the last rung, output tokens, body bytes), ids ascending from first_id."""
    n = len(jobs)
    return Backlog(
        job_ids=np.arange(first_id, first_id + n, dtype=np.int64),
        keys=[key_of(rungs) for rungs, _, _, _ in jobs],
        prompt_tokens=np.array([32 * len(rungs) + extra for rungs, extra, _, _ in jobs], dtype=np.int64),
        output_tokens=np.array([output for _, _, output, _ in jobs], dtype=np.int64),
        body_bytes=np.array([size for _, _, _, size in jobs], dtype=np.int64),
    )


def reordered(original: Backlog, order: list[int]) -> Backlog:
    """The same jobs arriving in another order."""
    return Backlog(
        job_ids=original.job_ids[order],
        keys=[original.keys[index] for index in order],
        prompt_tokens=original.prompt_tokens[order],
        output_tokens=original.output_tokens[order],
        body_bytes=original.body_bytes[order],
    )


def instance(**changes: object) -> InstanceView:
    fields: dict = {
        "queue": "instance.a",
        "block_size": 32,
        "kv_capacity_tokens": 100_000,
        "max_num_seqs": 4,
        "rates": RATES,
    }
    return InstanceView(**(fields | changes))


rungs = st.lists(st.integers(0, 2), max_size=6)
jobs = st.lists(st.tuples(rungs, st.integers(1, 31), st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)
held_keys = st.none() | rungs.map(key_of)


@st.composite
def instances(draw: st.DrawFn, *, alike: bool = False) -> list[InstanceView]:
    """One to five instances; alike: of one kind, idle, holding nothing."""
    n = draw(st.integers(1, 5))
    if alike:
        return [instance(queue=f"instance.{number}") for number in range(n)]
    return [
        instance(
            queue=f"instance.{number}",
            block_size=draw(st.sampled_from([16, 32, 64])),
            kv_capacity_tokens=draw(st.sampled_from([64, 128, 100_000])),
            rates=draw(st.sampled_from([RATES, Rates(prefill_tokens_per_second=300, decode_tokens_per_second=9)])),
            held_key=draw(held_keys),
            load_seconds=draw(st.sampled_from([0.0, 0.1, 5.0])),
        )
        for number in range(n)
    ]
