"""service.core.standing: nothing is lost or run twice, whatever comes, goes, dies or is dropped in between."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import backlog, instance, jobs, key_of

from service.core.plan import Backlog, InstanceView, PlannedCohort
from service.core.policy import Arrivals
from service.core.prefix import bound_tokens
from service.core.standing import StandingPlan


def arrivals(of: Backlog, *, owner: int = 0, flow: int = 0, deadline: float = math.inf) -> Arrivals:
    n = len(of.job_ids)
    return Arrivals(
        jobs=of, owners=np.full(n, owner), flows=np.full(n, flow), deadlines=np.full(n, deadline, dtype=np.float64)
    )


def fleet(n: int, **changes: object) -> list[InstanceView]:
    return [instance(queue=f"instance.{number}", boot_id=number + 1, **changes) for number in range(n)]


def drained(plan: StandingPlan, n_instances: int) -> list[PlannedCohort]:
    """Everything, each instance taking a cohort in turn and answering it at once."""
    taken: list[PlannedCohort] = []
    while plan.pending_jobs:
        plan.set_loads([0.0] * n_instances, [0] * n_instances)
        found = [plan.next_cohort(number, 0.0) for number in range(n_instances)]
        assert any(found), f"{plan.pending_jobs} jobs wait, and no instance gets one"
        taken += [cohort for cohort in found if cohort is not None]
    assert all(plan.next_cohort(number, 0.0) is None for number in range(n_instances))
    return taken


def ids(cohorts: list[PlannedCohort]) -> list[int]:
    return [job_id for cohort in cohorts for job_id in cohort.job_ids.tolist()]


class Story:
    """A random course of events, with what must come out of it."""

    def __init__(self, seed: int, window_jobs: int | None) -> None:
        self.random = random.Random(seed)
        self.plan = StandingPlan(window_jobs=window_jobs)
        self.views: list[InstanceView] = []
        self.boots = 0
        self.now = 0.0
        self.next_id = 0
        self.owner_of: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.taken: list[int] = []

    def boot(self) -> None:
        self.boots += 1
        self.views.append(instance(queue=f"instance.{self.boots}", boot_id=self.boots))
        self.plan.set_instances(self.views, self.now)

    def death(self) -> None:
        if self.views:
            self.views.pop(self.random.randrange(len(self.views)))
            self.plan.set_instances(self.views, self.now)

    def come(self) -> None:
        n = self.random.choice([1, 1, 2, 30])
        made = backlog(
            [([self.random.randrange(3) for _ in range(self.random.randrange(6))], 5, 9, 100) for _ in range(n)],
            first_id=self.next_id,
        )
        owner, self.next_id = self.random.randrange(4), self.next_id + n
        due = self.now + self.random.choice([0.1, 5.0, math.inf])
        self.plan.add(arrivals(made, owner=owner, flow=owner % 2, deadline=due), self.now)
        self.waiting.update(made.job_ids.tolist())
        self.owner_of |= dict.fromkeys(made.job_ids.tolist(), owner)

    def drop(self) -> None:
        owner = self.random.randrange(4)
        self.plan.drop(owner)
        self.waiting = {job_id for job_id in self.waiting if self.owner_of[job_id] != owner}

    def take(self) -> None:
        if not self.views:
            return
        cohort = self.plan.next_cohort(self.random.randrange(len(self.views)), self.now)
        if cohort is not None:
            got = cohort.job_ids.tolist()
            assert self.waiting.issuperset(got)
            assert len(got) == len(set(got))
            self.waiting.difference_update(got)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.random.choice([0.0, 0.01, 3.0])
            self.random.choices([self.boot, self.death, self.come, self.drop, self.take], [2, 1, 6, 1, 8])[0]()
            assert self.plan.pending_jobs == len(self.waiting)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([None, 20]))
def test_every_job_is_taken_once_or_dropped(seed: int, window_jobs: int | None) -> None:
    story = Story(seed, window_jobs)
    story.run(60)
    story.boot()
    left = drained(story.plan, len(story.views))
    assert sorted(ids(left)) == sorted(story.waiting)


@settings(deadline=None)
@given(jobs)
def test_one_instance_with_room_reaches_the_bound(made: list) -> None:
    plan, all_jobs = StandingPlan(), backlog(made)
    plan.set_instances(fleet(1), 0.0)
    plan.add(arrivals(all_jobs), 0.0)
    predicted = sum(int(cohort.predicted_cached_tokens.sum()) for cohort in drained(plan, 1))
    assert predicted == bound_tokens(all_jobs.keys, all_jobs.prompt_tokens, 32)


def test_a_late_arrival_joins_the_run_that_shares_its_prefix() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(2), 0.0)
    paths = [[group, 7, 7, 7, number] for group in range(2) for number in range(40)]
    plan.add(arrivals(backlog([(path, 5, 9, 100) for path in paths])), 0.0)
    first = [plan.next_cohort(number, 0.0) for number in range(2)]
    assert first[0] is not None
    assert first[1] is not None
    group_of_second = first[1].first_key[:4]
    late = backlog([([int.from_bytes(group_of_second, "big"), 7, 7, 7, 99], 5, 9, 100)], first_id=900)
    plan.add(arrivals(late), 0.0)
    where = {job_id: cohort.instance for cohort in drained(plan, 2) for job_id in cohort.job_ids.tolist()}
    assert where[900] == 1


def test_a_late_arrival_leaves_an_overloaded_instance() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(2), 0.0)
    plan.add(arrivals(backlog([([1, 7, number], 5, 9, 100) for number in range(40)])), 0.0)
    plan.set_loads([1000.0, 0.0], [1, 0])
    assert plan.next_cohort(1, 0.0) is not None
    plan.set_loads([1000.0, 0.0], [1, 0])
    plan.add(arrivals(backlog([([1, 7, 0, 5], 5, 9, 100)], first_id=900)), 0.0)
    alive = plan._flows[0]._runs
    homes = {plan._flows[0]._pending.column("job_ids", piece.slots)[-1]: piece.instance for piece in alive}
    assert homes[900] == 1


def test_tenants_take_turns_by_weight() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    plan.set_weight(1, 3.0)
    for flow in (0, 1):
        made = backlog([([flow, number], 5, 400, 100) for number in range(400)], first_id=1000 * flow)
        plan.add(arrivals(made, flow=flow, owner=flow), 0.0)
    taken = []
    while len(taken) < 360:
        cohort = plan.next_cohort(0, 0.0)
        assert cohort is not None
        taken += cohort.job_ids.tolist()
    of_second = sum(job_id >= 1000 for job_id in taken)
    assert of_second / len(taken) == pytest.approx(0.75, abs=0.06)


def test_a_tight_deadline_goes_first_and_the_rest_in_prefix_order() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    urgent = backlog([([2, number], 5, 400, 100) for number in range(50)], first_id=900)
    plan.add(arrivals(urgent, owner=2, deadline=60.0), 0.0)  # first come, first served ends them at 42 s
    plan.add(arrivals(backlog([([1, number], 5, 400, 100) for number in range(100)]), owner=1), 0.0)
    cohorts = drained(plan, 1)
    ended_at = np.cumsum([cohort.estimated_seconds for cohort in cohorts])
    assert all(at <= 60.0 for at, cohort in zip(ended_at, cohorts, strict=True) if cohort.job_ids.max() >= 900)
    assert ids(cohorts)[-80:] == list(range(120, 200))


def test_a_deadline_far_off_changes_nothing() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    late = backlog([([2, number], 5, 400, 100) for number in range(50)], first_id=900)
    plan.add(arrivals(late, owner=2, deadline=86_400.0), 0.0)
    plan.add(arrivals(backlog([([1, number], 5, 400, 100) for number in range(100)]), owner=1), 0.0)
    assert ids(drained(plan, 1))[-50:] == list(range(900, 950))


def test_an_idle_instance_takes_the_tail_of_the_busiest() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    plan.add(arrivals(backlog([([1, number], 5, 40, 100) for number in range(64)])), 0.0)
    first = plan.next_cohort(0, 0.0)
    assert first is not None
    plan.set_instances(fleet(2), 0.0)
    stolen = plan.next_cohort(1, 1e-9)  # too soon for a new plan
    assert stolen is not None
    assert key_of([1, 63]) == stolen.last_key


def test_a_prompt_is_given_up_when_it_is_taken() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    plan.add(arrivals(backlog([([1] * 6 + [number], 5, 9, 100) for number in range(10_000)])), 0.0)
    while plan.pending_jobs > 2_000:
        assert plan.next_cohort(0, 0.0) is not None
    held = plan._flows[0]._pending
    assert sum(map(len, held.keys)) <= plan.pending_jobs * 28
    assert len(held) < 5_000


@pytest.mark.parametrize("capacities", [[500, 5_000, 20_000], [300, 400, 1_000]])
def test_no_instance_gets_what_only_a_larger_cache_holds(capacities: list[int]) -> None:
    plan = StandingPlan()
    views = [
        instance(queue=f"instance.{number}", boot_id=number + 1, kv_capacity_tokens=capacity)
        for number, capacity in enumerate(capacities)
    ]
    plan.set_instances(views, 0.0)
    paths = [[number % 7] * (number % 30) + [number] for number in range(400)]
    made = backlog([(path, 5, 40, 100) for path in paths])
    plan.add(arrivals(made), 0.0)
    first = plan.next_cohort(0, 0.0)
    plan.add(arrivals(backlog([(path, 5, 40, 100) for path in paths[:60]], first_id=900)), 0.0)
    needed = {job_id: int(tokens) + 40 for job_id, tokens in zip(range(100, 500), made.prompt_tokens, strict=True)}
    needed |= {900 + number: needed[100 + number] for number in range(60)}
    cohorts = ([first] if first else []) + drained(plan, 3)
    for cohort in cohorts:
        capacity = capacities[cohort.instance]
        assert all(needed[job_id] <= capacity or needed[job_id] > max(capacities) for job_id in cohort.job_ids.tolist())


def test_idle_time_after_a_cancel_is_no_slowness() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    plan.add(arrivals(backlog([([1, number], 5, 400, 100) for number in range(100)]), owner=1), 0.0)
    for _ in range(4):
        plan.next_cohort(0, 0.0)
    plan.set_loads([0.0], [0])
    plan.drop(1)
    assert plan._speed(36_000.0) == 1.0


def test_what_an_instance_ran_not_long_ago_is_still_found() -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(1), 0.0)
    for first_id, group in ((100, 1), (200, 2), (300, 1)):
        made = backlog([([group] * 4 + [first_id + number], 5, 9, 100) for number in range(3)], first_id=first_id)
        plan.add(arrivals(made), 0.0)
        cohorts = drained(plan, 1)
    assert cohorts[0].predicted_cached_tokens[0] == 4 * 32
    assert not cohorts[0].first_of_group[0]


@pytest.mark.parametrize(("n_more", "is_first"), [(30, False), (200, True)])
def test_long_answers_are_put_first_when_most_of_what_waits_is_new(n_more: int, is_first: bool) -> None:
    plan = StandingPlan()
    plan.set_instances(fleet(2), 0.0)
    plan.add(arrivals(backlog([([1, number], 5, 40, 100) for number in range(100)])), 0.0)
    assert plan.next_cohort(0, 0.0) is not None
    more = [([2, number], 5, 40, 100) for number in range(n_more)]
    plan.add(arrivals(backlog([*more, ([3], 5, 4_000, 100)], first_id=900)), 100.0)  # a new plan either way
    cohorts = [plan.next_cohort(number, 100.0) for number in (0, 1)]
    taken = {job_id for cohort in cohorts if cohort for job_id in cohort.job_ids.tolist()}
    assert (900 + n_more in taken) == is_first
