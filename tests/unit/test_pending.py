"""service.core.pending: slots keep what was told of each job, whatever is taken, dropped, packed or grown meanwhile."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import backlog, key_of

from service.core.pending import Pending
from service.core.policy import Arrivals


def arrivals(first_id: int, n: int, *, owner: int = 0, deadline: float = math.inf) -> Arrivals:
    """Job i has the rungs (i,), i + 40 prompt tokens beyond them, i % 7 output tokens and 10 * i bytes."""
    made = backlog(
        [([job_id], job_id + 40, job_id % 7, 10 * job_id) for job_id in range(first_id, first_id + n)],
        first_id=first_id,
    )
    return Arrivals(jobs=made, owners=np.full(n, owner), flows=np.zeros(n, np.int64), deadlines=np.full(n, deadline))


def check_pending(pending: Pending, waiting: dict[int, float]) -> None:
    """`waiting`: deadline by job id, in order of arrival."""
    slots = pending.alive_slots()
    assert pending.count == len(slots) == len(waiting)
    assert pending.column("job_ids", slots).tolist() == list(waiting)
    assert pending.deadlines(slots).tolist() == list(waiting.values())
    found = pending.backlog(slots)
    assert found.job_ids.tolist() == slots.tolist()
    assert list(found.keys) == [key_of([job_id]) for job_id in waiting]
    assert found.prompt_tokens.tolist() == [job_id + 72 for job_id in waiting]
    assert found.output_tokens.tolist() == [job_id % 7 for job_id in waiting]
    assert found.body_bytes.tolist() == [10 * job_id for job_id in waiting]
    given_up = set(range(len(pending))) - set(slots.tolist())
    assert all(pending.keys[slot] == b"" for slot in given_up)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "come", "take", "drop", "pack"]), st.integers(0, 5), st.integers(0, 2**16)),
        max_size=30,
    )
)
def test_slots_keep_what_was_told(events: list[tuple[str, int, int]]) -> None:
    pending, next_id = Pending(), 1
    waiting: dict[int, float] = {}
    owner_of: dict[int, int] = {}
    for event, number, seed in events:
        if event == "come":
            deadline = [5.0, 7.5, math.inf][seed % 3]
            slots = pending.extend(arrivals(next_id, number, owner=seed % 4, deadline=deadline))
            assert pending.column("job_ids", slots).tolist() == list(range(next_id, next_id + number))
            waiting |= dict.fromkeys(range(next_id, next_id + number), deadline)
            owner_of |= dict.fromkeys(range(next_id, next_id + number), seed % 4)
            next_id += number
        elif event == "take":
            chosen = pending.alive_slots()[seed % 3 :: 3]
            taken = pending.column("job_ids", chosen).tolist()
            pending.take(chosen.tolist())
            pending.take(chosen.tolist())  # again is nothing
            waiting = {job_id: due for job_id, due in waiting.items() if job_id not in taken}
        elif event == "drop":
            gone = [job_id for job_id in waiting if owner_of[job_id] == seed % 4]
            assert pending.drop(seed % 4) == len(gone)
            assert pending.drop(seed % 4) == 0
            waiting = {job_id: due for job_id, due in waiting.items() if job_id not in gone}
        else:
            before = pending.alive_slots()
            ids = pending.column("job_ids", before).tolist()
            numbers = pending.pack()
            assert pending.column("job_ids", numbers[before]).tolist() == ids
            assert numbers[before].tolist() == list(range(len(waiting)))
            assert len(pending) == len(waiting)
        check_pending(pending, waiting)


def test_growth_keeps_what_is_there_and_memory_falls_when_packed() -> None:
    pending = Pending()
    for number in range(300):
        pending.extend(arrivals(1 + number * 3, 3, owner=number % 2))
    check_pending(pending, dict.fromkeys(range(1, 901), math.inf))
    pending.take(range(880))
    pending.pack()
    assert len(pending) == 20
    assert sum(map(len, pending.keys)) == 20 * 4
    check_pending(pending, dict.fromkeys(range(881, 901), math.inf))
    pending.extend(arrivals(2000, 5))
    check_pending(pending, dict.fromkeys([*range(881, 901), *range(2000, 2005)], math.inf))


def test_what_is_kept_of_deadlines_follows_its_job() -> None:
    pending = Pending()
    pending.extend(arrivals(1, 6, deadline=9.0))
    assert np.isnan(pending.due(np.arange(6))).all()
    pending.set_due(np.arange(6), np.array([1.0, math.inf, 3.0, 4.0, math.inf, 6.0]))
    pending.take([0, 3])
    numbers = pending.pack()
    assert pending.due(numbers[[1, 2, 4, 5]]).tolist() == [math.inf, 3.0, math.inf, 6.0]
    late = pending.extend(arrivals(20, 1))
    assert np.isnan(pending.due(np.array(late))).all()


def test_those_that_wait_in_the_order_asked() -> None:
    pending = Pending()
    pending.extend(arrivals(1, 5))
    pending.take([2])
    assert pending.alive([4, 2, 0, 3]) == [4, 0, 3]
