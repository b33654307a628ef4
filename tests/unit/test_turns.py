"""service.core.turns: whole instances first, then time; nobody starves, nobody waits for what never comes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.shares import Shares
from service.core.turns import Turns

PATIENCE_SECONDS = 15.0
COHORT_SECONDS = 10.0


def started(weights: dict[int, float], n_instances: int) -> tuple[Shares, Turns]:
    """All flows have work, and the instances have done nothing yet."""
    shares = Shares()
    for flow, weight in weights.items():
        shares.set_weight(flow, weight)
        shares.activate(flow)
    turns = Turns(shares, PATIENCE_SECONDS)
    turns.change_fleet([None] * n_instances)
    return shares, turns


def serve(shares: Shares, turns: Turns, instance: int, now_seconds: float, jobs: int = 4) -> int | None:
    """The first candidate takes a cohort, as one that never runs out of work does."""
    found = turns.candidates(instance, now_seconds)
    if not found:
        return None
    shares.charge(found[0], COHORT_SECONDS)
    turns.took(instance, found[0], jobs, COHORT_SECONDS, now_seconds)
    return found[0]


def owners(turns: Turns, n_instances: int) -> Counter[int | None]:
    return Counter(turns.owner(number) for number in range(n_instances))


def served_rounds(weights: dict[int, float], n_instances: int, rounds: int) -> list[list[int]]:
    """Who was served by each instance in each round, all as fast as each other and always busy."""
    shares, turns = started(weights, n_instances)
    found = []
    for number in range(rounds):
        flows = [serve(shares, turns, instance, number * COHORT_SECONDS) for instance in range(n_instances)]
        found.append([flow for flow in flows if flow is not None])
    return found


@given(st.integers(1, 8), st.integers(2, 6))
def test_whole_shares_are_whole_instances_at_once(each: int, flows: int) -> None:
    n = each * flows
    shares, turns = started(dict.fromkeys(range(flows), 1.0), n)
    for instance in range(n):
        serve(shares, turns, instance, 0.0)
    assert owners(turns, n) == dict.fromkeys(range(flows), each)


def test_thirds_are_whole_shares_too() -> None:
    rounds = served_rounds(dict.fromkeys(range(3), 0.1), 6, 40)  # 0.1 / (0.1 + 0.1 + 0.1) < 1 / 3
    assert all(served == rounds[0] for served in rounds)
    assert Counter(rounds[0]) == {0: 2, 1: 2, 2: 2}


def test_whole_shares_stay_where_they_are() -> None:
    rounds = served_rounds({0: 1.0, 1: 3.0}, 4, 40)
    assert all(served == rounds[0] for served in rounds)
    assert Counter(rounds[0]) == {0: 1, 1: 3}


def test_a_newcomer_takes_its_share_of_a_full_fleet() -> None:
    shares, turns = started({0: 1.0}, 4)
    for number in range(20):
        serve(shares, turns, number % 4, 0.0)
    shares.activate(1)
    for instance in range(4):
        serve(shares, turns, instance, 10.0)
    assert owners(turns, 4) == {0: 2, 1: 2}


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=2, max_size=10), st.integers(1, 5))
def test_service_follows_the_weights_within_a_bound(weights: list[float], n_instances: int) -> None:
    """Over a long time each flow has its share of the work, within a few cohorts of an instance."""
    rounds = served_rounds(dict(enumerate(weights)), n_instances, 200)
    served = Counter(flow for round_ in rounds for flow in round_)
    total = sum(served.values())
    for flow, weight in enumerate(weights):
        exact = total * weight / sum(weights)
        slack = (PATIENCE_SECONDS / COHORT_SECONDS + 2) * max(n_instances, 2) * max(1.0, weight)
        assert abs(served[flow] - exact) <= slack, (flow, served, exact)


def test_hundreds_of_tenants_on_three_instances_all_progress() -> None:
    rounds = served_rounds(dict.fromkeys(range(200), 1.0), 3, 150)
    first = {flow: number for number, served in reversed(list(enumerate(rounds))) for flow in served}
    assert len(first) == 200
    served = Counter(flow for round_ in rounds for flow in round_)
    assert max(served.values()) - min(served.values()) <= 3


@pytest.mark.parametrize("unit", [1 / 128, 128.0])  # powers of 2: nothing is rounded
def test_only_the_ratio_of_weights_matters(unit: float) -> None:
    assert served_rounds({0: unit, 1: unit}, 1, 50) == served_rounds({0: 1.0, 1: 1.0}, 1, 50)
    assert served_rounds({0: unit, 1: 3 * unit}, 2, 50) == served_rounds({0: 1.0, 1: 3.0}, 2, 50)


@pytest.mark.parametrize(("weight", "n_instances"), [(3.0, 2), (15.0, 4), (1000.0, 2)])
def test_a_share_below_one_instance_is_no_whole_one(weight: float, n_instances: int) -> None:
    rounds = served_rounds({0: 1.0, 1: weight}, n_instances, 400)
    served = Counter(flow for round_ in rounds for flow in round_)
    assert served[0] / served.total() == pytest.approx(1 / (1 + weight), abs=0.01)
    assert served[0] > 0


def held_instance() -> tuple[Shares, Turns]:
    """Two tenants, two instances; tenant 1 took its last 4 jobs on the second one."""
    shares, turns = started({0: 1.0, 1: 1.0}, 2)
    assert [serve(shares, turns, instance, 100.0) for instance in range(2)] == [0, 1]
    shares.retire(1)
    return shares, turns


def test_an_instance_is_held_for_the_last_jobs_of_its_owner() -> None:
    _, turns = held_instance()
    assert turns.candidates(1, 101.0) == []
    turns.set_out([4, 1])
    assert turns.candidates(1, 101.0) == []
    turns.set_out([4, 0])
    assert turns.candidates(1, 101.0) == [0]


def test_a_hold_ends_though_the_jobs_never_do() -> None:
    _, turns = held_instance()
    assert turns.candidates(1, 100.0 + 121.0) == [0]


def test_what_others_have_out_holds_nothing() -> None:
    shares, turns = started({0: 1.0, 1: 1.0}, 2)
    for instance, now in ((0, 0.0), (1, 0.0)):
        serve(shares, turns, instance, now)
    turns.took(1, 1, 2, 1.0, 1.0)
    shares.retire(1)
    turns.set_out([4, 0])
    turns.took(1, 0, 8, 1.0, 1.0)  # somebody else took it over since
    assert turns.candidates(1, 2.0) == [0]


def test_a_share_below_one_instance_holds_nothing() -> None:
    shares, turns = started({0: 1.0, 1: 1.0, 2: 1.0}, 2)
    for instance in range(2):
        serve(shares, turns, instance, 0.0)
    shares.retire(1)
    assert not turns.is_held(1, 0.0)
    assert turns.candidates(1, 0.0)


def test_jobs_end_the_oldest_first() -> None:
    shares, turns = started({0: 1.0, 1: 1.0}, 2)
    turns.took(0, 0, 5, 1.0, 0.0)
    turns.took(0, 1, 3, 1.0, 0.0)
    shares.retire(1)
    turns.set_out([4, 0])  # one of tenant 0, three of tenant 1
    assert turns.is_held(0, 1.0)
    turns.set_out([3, 0])
    assert turns.is_held(0, 1.0)
    turns.set_out([0, 0])
    assert not turns.is_held(0, 1.0)


def test_a_claim_is_of_what_is_due_and_takes_from_nobody_who_has_no_more() -> None:
    shares, turns = started({0: 1.0, 1: 1.0}, 4)
    for instance in range(4):
        turns.took(instance, 0, 4 - instance, 1.0, 0.0)
    assert sorted(turns.claim(1, 0)) == [0, 3]  # the one that asked, then the one with least out
    assert owners(turns, 4) == {0: 2, 1: 2}
    assert sorted(turns.claim(0, 0)) == [1, 2]
    assert shares.order() == [0, 1]


def test_an_instance_that_stays_keeps_its_owner_and_one_that_comes_has_none() -> None:
    shares, turns = started({0: 1.0, 1: 1.0}, 2)
    for instance in range(2):
        serve(shares, turns, instance, 0.0)
    turns.change_fleet([None, 1, 0])
    assert [turns.owner(number) for number in range(3)] == [None, 1, 0]
    turns.set_out([0, 4, 4])
    shares.retire(1)
    assert turns.is_held(1, 1.0)
    turns.change_fleet([])
    turns.change_fleet([None])
    turns.set_out([0])
    assert turns.owner(0) is None
    assert turns.candidates(0, 2.0) == [0]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_whoever_has_work_is_served_in_a_bounded_time(data: st.DataObject) -> None:
    """Tenants come, go and come back, and instances come and go. One that waits is served before the others were
    given more than their shares of that time and what patience allows."""
    n_flows, n = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 4))
    shares, turns = started(dict.fromkeys(range(n_flows), 1.0), n)
    waited = dict.fromkeys(range(n_flows), 0)
    bound = (n_flows + 2) * (math.ceil(PATIENCE_SECONDS / COHORT_SECONDS) + 2) * 2
    for number in range(60):
        event = data.draw(st.sampled_from(["serve"] * 6 + ["retire", "come", "fleet"]))
        flow = data.draw(st.integers(0, n_flows - 1))
        if event == "retire" and len(waited) > 1 and flow in waited:
            shares.retire(flow)
            del waited[flow]
        elif event == "come" and flow not in waited:
            shares.activate(flow)
            waited[flow] = 0
        elif event == "fleet":
            n = data.draw(st.integers(1, 4))
            turns.change_fleet([data.draw(st.sampled_from([0, None])), *[None] * (n - 1)])
        for instance in range(n):
            turns.set_out([0] * n)
            flow_served = serve(shares, turns, instance, number * COHORT_SECONDS)
            assert flow_served in waited
            waited = {other: 0 if other == flow_served else since + 1 for other, since in waited.items()}
        assert max(waited.values()) <= bound * n, waited
