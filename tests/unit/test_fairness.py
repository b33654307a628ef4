"""Tenants, deadlines and priorities on simulated engines, at small scale, with the bounds that are promised at large.

`python -m bench.sharing` measures the same at full size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from bench.first_come import FirstCome
from bench.sharing import after_arrival, due_seconds, flood, joined, longest_cohort_seconds, made
from bench.watched import Watched
from service.core.classes import PriorityClasses
from service.core.model import Priority
from service.core.plan import Backlog
from service.core.policy import Policy
from service.core.replay import EngineShape, FleetChange, FleetJobs, FleetReplay, jobs_at_once, replay_fleet
from service.core.simulate import DEFAULT_COST, CostModel
from service.core.standing import StandingPlan

SHAPE = EngineShape(block_size=16, kv_capacity_tokens=200_000)
SLOW = CostModel(**{field.name: 4 * getattr(DEFAULT_COST, field.name) for field in fields(DEFAULT_COST)})
BATCHES = 30


def of_tenants(parts: Sequence[Backlog]) -> FleetJobs:
    """One tenant and one batch a part, all there at the start."""
    numbers = np.repeat(np.arange(len(parts)), [len(part.keys) for part in parts])
    return replace(jobs_at_once(joined(parts)), flows=numbers, owners=numbers)


def last_finishes(found: FleetReplay, jobs: FleetJobs) -> list[float]:
    return [float(found.finish_seconds[jobs.flows == flow].max()) for flow in np.unique(jobs.flows)]


@pytest.mark.parametrize(("n_instances", "weight"), [(4, 1.0), (4, 3.0), (4, 1 / 3), (8, 1.0)])
def test_a_small_tenant_beside_a_flood_is_as_fast_as_alone_on_its_share(n_instances: int, weight: float) -> None:
    parts = made(1000, 1, 30), made(100, 51, 5, salt=77)
    found = flood(parts, SHAPE, n_instances, weight, 0.0, is_whole=False)
    assert found["ratio"] <= 1.2


def test_sharing_costs_few_hits_and_little_time() -> None:
    parts = made(1000, 2, 30), made(100, 52, 5, salt=77)
    found = flood(parts, SHAPE, 4, 1.0, 0.0, is_whole=True)
    assert found["hit_rate"] >= 0.98 * found["hit_rate_one_tenant"]
    # The small tenant's instances end with what they steal: some seconds, however long the flood.
    assert found["makespan_seconds"] <= found["makespan_one_tenant_seconds"] + 6.0


def test_a_weight_holds_where_shares_are_less_than_an_instance() -> None:
    jobs = of_tenants([made(500, 1, 10), made(500, 2, 10, salt=5)])
    policy = StandingPlan()
    policy.set_weight(0, 1000.0)
    heavy, light = last_finishes(replay_fleet(jobs, policy, [SHAPE] * 2), jobs)
    assert heavy <= 0.65 * light  # half the work, and the light tenant's first cohort


def test_many_tenants_on_few_instances_all_progress() -> None:
    jobs = of_tenants([made(15, seed, 2, salt=seed) for seed in range(60)])
    shared = replay_fleet(jobs, StandingPlan(), [SHAPE] * 3)
    one = replay_fleet(replace(jobs, flows=np.zeros_like(jobs.flows)), StandingPlan(), [SHAPE] * 3)
    assert not shared.refused_jobs
    assert shared.makespan_seconds <= 1.2 * one.makespan_seconds
    assert shared.hit_rate >= 0.95 * one.hit_rate


def test_every_tenant_ends_though_all_instances_go_and_come_back() -> None:
    jobs = of_tenants([made(60, seed, 3, salt=seed) for seed in range(4)])
    changes = [FleetChange(at_seconds=at, present=who) for at, who in ((2.0, ()), (20.0, (1,)), (21.0, (0, 2)))]
    found = replay_fleet(jobs, StandingPlan(), [SHAPE] * 3, changes=changes)
    assert not found.refused_jobs
    assert max(last_finishes(found, jobs)) < 60


def test_a_trickle_beside_a_flood_keeps_few_instances_idle() -> None:
    jobs = of_tenants([made(800, 1, 20), made(8, 51, 2, salt=77)])
    arrival_seconds = np.where(jobs.flows == 1, 2.0 * (np.arange(len(jobs.flows)) - 799), 0.0)
    jobs = replace(jobs, arrival_seconds=arrival_seconds)
    shared = replay_fleet(jobs, StandingPlan(), [SHAPE] * 4)
    one = replay_fleet(replace(jobs, flows=np.zeros_like(jobs.flows)), StandingPlan(), [SHAPE] * 4)
    assert shared.makespan_seconds <= 1.15 * one.makespan_seconds


def batches(seed: int, per_batch: int = 20) -> FleetJobs:
    parts = [made(per_batch, seed * 100 + number, 3, salt=number % 10) for number in range(BATCHES)]
    return replace(of_tenants(parts), flows=np.zeros(per_batch * BATCHES, dtype=np.int64))


def told(jobs: FleetJobs, output_tokens: int) -> FleetJobs:
    """The planner is told so of every job."""
    return replace(jobs, jobs=replace(jobs.jobs, output_tokens=np.full(len(jobs.flows), output_tokens)))


@pytest.mark.parametrize("between", [(0.8, 2.0), (0.2, 1.0)])
def test_no_deadline_that_first_come_meets_is_missed_by_more_than_a_cohort(between: tuple[float, float]) -> None:
    jobs, shapes = batches(1), [SHAPE] * 2
    first = replay_fleet(jobs, FirstCome(), shapes)
    due = due_seconds(jobs, first, between, 1)
    policy = Watched(StandingPlan())
    found = replay_fleet(replace(jobs, deadlines=due), policy, shapes)
    late, met = found.finish_seconds - due, first.finish_seconds <= due
    assert late[met].max() <= longest_cohort_seconds(policy.taken, found.finish_seconds)
    assert (late > 0).sum() <= (~met).sum()
    assert found.hit_rate >= first.hit_rate


def test_unknown_lengths_cost_one_miss_in_a_hundred_at_most() -> None:
    jobs, shapes = told(batches(2), 256), [SHAPE] * 2
    first = replay_fleet(jobs, FirstCome(), shapes)
    due = due_seconds(jobs, first, (0.8, 2.0), 2)
    found = replay_fleet(replace(jobs, deadlines=due), StandingPlan(), shapes)
    assert (found.finish_seconds > due).sum() <= (first.finish_seconds > due).sum() + 0.01 * len(due)


def test_deadlines_hold_on_engines_of_unequal_speed() -> None:
    """The first of the fleet says nothing of the others: what a job costs is what it costs on the mean of them."""
    shapes = [replace(SHAPE, cost=SLOW), SHAPE, SHAPE]
    jobs = batches(1)
    first = replay_fleet(jobs, FirstCome(), shapes)
    due = due_seconds(jobs, first, (0.8, 2.0), 1)
    found = replay_fleet(replace(jobs, deadlines=due), StandingPlan(), shapes)
    missed = (found.finish_seconds > due) & (first.finish_seconds <= due)
    assert missed.sum() <= 0.05 * len(due)


def order(policy: Policy, jobs: FleetJobs) -> list[float]:
    return replay_fleet(jobs, policy, [SHAPE] * 2).start_seconds.tolist()


def test_deadlines_that_are_past_change_nothing() -> None:
    jobs = jobs_at_once(made(500, 1, 20))
    past = np.where(np.arange(500) % 50 == 3, 0.0, math.inf)
    assert order(StandingPlan(), replace(jobs, deadlines=past)) == order(StandingPlan(), jobs)


def test_a_late_arrival_whose_deadline_is_past_does_not_go_first() -> None:
    jobs = jobs_at_once(joined([made(500, 1, 20), made(1, 2, 1, salt=9)]))
    is_late = np.arange(501) == 500
    jobs = replace(jobs, arrival_seconds=np.where(is_late, 3.0, 0.0))
    assert order(StandingPlan(), replace(jobs, deadlines=np.where(is_late, 2.0, math.inf))) == order(
        StandingPlan(), jobs
    )


def test_jobs_that_say_nothing_end_and_keep_their_deadlines() -> None:
    backlog = made(300, 1, 10)
    backlog = replace(backlog, output_tokens=np.zeros(300, dtype=np.int64))
    due = np.where(np.arange(300) % 3 == 0, 3.0, math.inf)
    found = replay_fleet(
        replace(jobs_at_once(backlog), flows=np.arange(300) % 50, deadlines=due), StandingPlan(), [SHAPE]
    )
    assert not found.refused_jobs
    assert np.isfinite(found.finish_seconds).all()


def test_a_high_batch_is_next_on_every_instance() -> None:
    parts = [made(800, 1, 20), made(80, 51, 3, salt=77)]
    jobs = of_tenants(parts)
    is_high = jobs.flows == 1
    arrival_seconds = np.where(is_high, 8.0, 0.0)
    classes = np.where(is_high, int(Priority.HIGH), int(Priority.NORMAL))
    jobs = replace(jobs, flows=np.zeros_like(jobs.flows), arrival_seconds=arrival_seconds, priorities=classes)
    policy = Watched(PriorityClasses(StandingPlan))
    found = replay_fleet(jobs, policy, [SHAPE] * 3)
    next_high, lower_ahead, _ = after_arrival(policy.taken, 8.0)
    assert next_high == 3
    # In the end an instance may go on with lower work, where the rest of the batch ends sooner on its own instance.
    assert lower_ahead <= 3
    assert found.start_seconds[is_high].max() <= 8.0 + 0.25 * (found.makespan_seconds - 8.0)
