"""service.core.classes: an instance gets work of a lower class only where it gets none of a higher."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import backlog, instance

from service.core.classes import PriorityClasses
from service.core.model import Priority
from service.core.plan import InstanceView, PlannedCohort
from service.core.policy import Arrivals
from service.core.standing import StandingPlan


def arrivals(
    first_id: int, n: int, priority: Priority | None = None, *, owner: int = 0, flow: int = 0, output_tokens: int = 400
) -> Arrivals:
    made = backlog([([first_id, number], 5, output_tokens, 100) for number in range(n)], first_id=first_id)
    return Arrivals(
        jobs=made,
        owners=np.full(n, owner),
        flows=np.full(n, flow),
        deadlines=np.full(n, math.inf),
        priorities=None if priority is None else np.full(n, int(priority)),
    )


def fleet(n: int, first_boot: int = 1) -> list[InstanceView]:
    return [instance(queue=f"instance.{number}", boot_id=first_boot + number) for number in range(n)]


def with_fleet(n: int) -> PriorityClasses:
    classes = PriorityClasses(StandingPlan)
    classes.set_instances(fleet(n), 0.0)
    return classes


def drained(classes: PriorityClasses, n_instances: int) -> list[PlannedCohort]:
    taken: list[PlannedCohort] = []
    while classes.pending_jobs:
        found = [classes.next_cohort(number, 0.0) for number in range(n_instances)]
        assert any(found)
        taken += [cohort for cohort in found if cohort is not None]
    return taken


def ids(cohorts: list[PlannedCohort]) -> list[int]:
    return [job_id for cohort in cohorts for job_id in cohort.job_ids.tolist()]


def test_a_higher_class_is_next_on_every_instance_and_says_so() -> None:
    classes = with_fleet(3)
    classes.add(arrivals(1000, 300, Priority.NORMAL), 0.0)
    assert [classes.next_cohort(number, 0.0).priority for number in range(3)] == [Priority.NORMAL] * 3  # type: ignore[union-attr]
    classes.add(arrivals(5000, 300, Priority.HIGH), 1.0)
    found = [classes.next_cohort(number, 1.0) for number in range(3)]
    assert all(cohort is not None and cohort.priority == Priority.HIGH for cohort in found)
    assert all(job_id >= 5000 for cohort in found if cohort for job_id in cohort.job_ids.tolist())


def test_without_priorities_all_are_normal() -> None:
    classes = with_fleet(1)
    classes.add(arrivals(1000, 10), 0.0)
    classes.add(arrivals(5000, 10, Priority.LOW), 0.0)
    classes.add(arrivals(3000, 10, Priority.HIGH), 0.0)
    taken = [cohort.priority for cohort in drained(classes, 1)]
    assert taken == sorted(taken, reverse=True)
    assert set(taken) == {Priority.LOW, Priority.NORMAL, Priority.HIGH}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(Priority), st.integers(1, 30), st.integers(0, 2)),
            st.tuples(st.just("take"), st.just(0), st.just(0), st.just(0)),
            st.tuples(st.just("drop"), st.integers(0, 2), st.just(0), st.just(0)),
        ),
        max_size=25,
    )
)
def test_every_job_once_and_the_highest_there_is_first(events: list[tuple]) -> None:
    classes, next_id = with_fleet(1), 1000
    waiting: dict[int, tuple[int, int]] = {}  # job id -> class, owner
    for number, (event, what, n, owner) in enumerate(events):
        if event == "add":
            classes.add(arrivals(next_id, n, what, owner=owner), float(number))
            waiting |= dict.fromkeys(range(next_id, next_id + n), (int(what), owner))
            next_id += n
        elif event == "drop":
            classes.drop(what)
            waiting = {job_id: rest for job_id, rest in waiting.items() if rest[1] != what}
        else:
            cohort = classes.next_cohort(0, float(number))
            assert (cohort is None) == (not waiting)
            for job_id in cohort.job_ids.tolist() if cohort else ():
                assert cohort.priority == max(level for level, _ in waiting.values())
                assert waiting.pop(job_id)[0] == cohort.priority
        assert classes.pending_jobs == len(waiting)
    assert sorted(ids(drained(classes, 1))) == sorted(waiting)


def test_a_batch_is_dropped_in_every_class() -> None:
    classes = with_fleet(1)
    for priority in (Priority.LOW, Priority.HIGH):
        classes.add(arrivals(1000 * (priority + 1), 10, priority, owner=7), 0.0)
    classes.add(arrivals(9000, 10, Priority.NORMAL, owner=8), 0.0)
    classes.drop(7)
    assert classes.pending_jobs == 10
    assert sorted(ids(drained(classes, 1))) == list(range(9000, 9010))


def test_a_class_that_appears_after_the_fleet_changed_knows_the_new_one() -> None:
    classes = with_fleet(1)
    classes.add(arrivals(1000, 40, Priority.NORMAL), 0.0)
    assert classes.next_cohort(0, 0.0) is not None
    classes.set_instances(fleet(3), 1.0)
    classes.add(arrivals(5000, 120, Priority.HIGH), 1.0)
    found = [classes.next_cohort(number, 1.0) for number in range(3)]
    assert all(cohort is not None and cohort.priority == Priority.HIGH for cohort in found)


def test_every_class_outlives_the_whole_fleet() -> None:
    classes = with_fleet(2)
    classes.add(arrivals(1000, 40, Priority.NORMAL), 0.0)
    classes.add(arrivals(5000, 40, Priority.HIGH), 0.0)
    first = classes.next_cohort(0, 0.0)
    assert first is not None
    classes.set_instances([], 1.0)
    classes.add(arrivals(7000, 40, Priority.LOW), 2.0)
    classes.set_instances(fleet(1, first_boot=10), 3.0)
    left = drained(classes, 1)
    expected = [*range(1000, 1040), *range(5000, 5040), *range(7000, 7040)]
    assert sorted([*ids([first]), *ids(left)]) == expected
    assert [cohort.priority for cohort in left] == sorted((cohort.priority for cohort in left), reverse=True)


def test_weights_and_loads_reach_a_class_that_appears_later() -> None:
    classes = with_fleet(1)
    classes.set_weight(1, 3.0)
    classes.set_loads([500.0], [7])
    for flow in (0, 1):
        classes.add(arrivals(1000 + 4000 * flow, 400, Priority.HIGH, flow=flow, owner=flow), 0.0)
    taken: list[int] = []
    while len(taken) < 320:
        cohort = classes.next_cohort(0, 0.0)
        assert cohort is not None
        taken += cohort.job_ids.tolist()
    assert abs(sum(job_id >= 5000 for job_id in taken) / len(taken) - 0.75) <= 0.06


def test_another_weight_reaches_the_classes_that_are_there() -> None:
    classes = with_fleet(1)
    for flow in (0, 1):
        classes.add(arrivals(1000 + 4000 * flow, 400, Priority.LOW, flow=flow, owner=flow), 0.0)
    classes.set_weight(0, 3.0)
    taken: list[int] = []
    while len(taken) < 320:
        cohort = classes.next_cohort(0, 0.0)
        assert cohort is not None
        taken += cohort.job_ids.tolist()
    assert abs(sum(job_id < 5000 for job_id in taken) / len(taken) - 0.75) <= 0.06
