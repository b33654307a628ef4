"""service.core.shares: over any stretch in which two flows have work, they are served by weight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.shares import Shares


@given(
    st.lists(st.floats(0.1, 2.0), min_size=200, max_size=200),
    st.sampled_from([1.0, 2.0, 5.0]),
)
def test_two_flows_share_by_weight(costs: list[float], weight: float) -> None:
    shares, served = Shares(), {0: 0.0, 1: 0.0}
    shares.set_weight(1, weight)
    for flow in served:
        shares.activate(flow)
    for cost in costs:
        flow = shares.order()[0]
        shares.charge(flow, cost)
        served[flow] += cost
        assert abs(served[0] - served[1] / weight) <= 2 * 2.0


def test_an_idle_flow_saves_nothing_up() -> None:
    shares = Shares()
    shares.activate(0)
    for _ in range(100):
        shares.charge(0, 1.0)
    shares.activate(1)
    turns = []
    for _ in range(10):
        turns.append(shares.order()[0])
        shares.charge(turns[-1], 1.0)
    assert turns.count(1) in (5, 6)


def test_leaving_and_coming_back_gains_nothing() -> None:
    shares = Shares()
    shares.activate(0)
    shares.activate(1)
    shares.charge(1, 10.0)
    shares.retire(1)
    shares.activate(1)
    assert shares.order() == [0, 1]


def test_a_share_is_of_those_who_have_work() -> None:
    shares = Shares()
    shares.set_weight(0, 3.0)
    shares.activate(0)
    assert shares.share(0) == 1.0
    shares.activate(1)
    assert shares.share(0) == 0.75
    shares.retire(1)
    assert shares.share(0) == 1.0


def test_a_weight_is_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Shares().set_weight(0, 0.0)
