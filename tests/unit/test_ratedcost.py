"""A cost model from two fitted rates gives these rates back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.planrecords import Rates
from service.core.ratedcost import cost_of_rates
from service.core.scenario import EngineShape


@given(
    prefill=st.floats(100, 1e6),
    decode=st.floats(10, 1e5),
    sequences=st.integers(1, 512),
    capacity=st.integers(4_096, 4_000_000),
    context=st.floats(1, 100_000),
)
def test_the_rates_come_back(prefill: float, decode: float, sequences: int, capacity: int, context: float) -> None:
    wanted = Rates(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode)
    bare = EngineShape(block_size=16, kv_capacity_tokens=capacity, max_num_seqs=sequences)
    cost = cost_of_rates(wanted, bare, context)
    found = EngineShape(block_size=16, kv_capacity_tokens=capacity, max_num_seqs=sequences, cost=cost).rates(context)
    assert found.decode_tokens_per_second == pytest.approx(decode, rel=1e-2)
    # Where steps alone take longer than the prefill rate allows, the decode rate goes first.
    assert found.prefill_tokens_per_second <= prefill * 1.0001
    if cost.step_seconds / bare.max_batched_tokens < 0.9 / prefill:
        assert found.prefill_tokens_per_second == pytest.approx(prefill, rel=1e-3)
