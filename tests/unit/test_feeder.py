"""Admission: order, room in the cache, places for interactive jobs."""

from __future__ import annotations

from feeding import make_claim, make_job, waiting

from service.core.model import Priority
from workers.feeder import Admission


def take_all(admission: Admission) -> list[int]:
    taken = []
    while (item := admission.take()) is not None:
        taken.append(item.job.job_id)
    return taken


def test_the_order_is_class_then_sequence_then_position() -> None:
    admission = Admission(max_num_seqs=16, kv_capacity_tokens=None)
    late, early = make_claim(1, sequence=2), make_claim(2, sequence=1)
    urgent = make_claim(3, sequence=9, priority=Priority.HIGH)
    admission.add(waiting(late, make_job(1)))
    admission.add(waiting(early, make_job(3), 1))
    admission.add(waiting(early, make_job(2), 0))
    admission.add(waiting(urgent, make_job(4)))
    assert take_all(admission) == [4, 2, 3, 1]


def test_in_flight_is_what_fits_the_cache_and_never_past_one_that_does_not() -> None:
    admission = Admission(max_num_seqs=16, kv_capacity_tokens=1000)
    claim = make_claim()
    items = [
        waiting(claim, make_job(1, prompt=900, output=10), 0),  # a whole prefix
        waiting(claim, make_job(2, prompt=920, cached=890, output=10), 1),  # 40 more
        waiting(claim, make_job(3, prompt=1000, cached=0, output=10), 2),  # another prefix: must wait
        waiting(claim, make_job(4, prompt=900, cached=895, output=1), 3),  # would fit, must not overtake
    ]
    for item in items:
        admission.add(item)
    assert take_all(admission) == [1, 2]
    admission.leave(items[0])
    assert take_all(admission) == []  # job 2 still holds the prefix that it found
    admission.leave(items[1])
    assert take_all(admission) == [3]  # larger than the cache, and alone: at least one runs


def test_bulk_leaves_two_places_to_interactive_jobs() -> None:
    admission = Admission(max_num_seqs=4, kv_capacity_tokens=None)
    for number in range(20):
        admission.add(waiting(make_claim(), make_job(number), number))
    assert len(take_all(admission)) == 4 + 4 - 2
    chat = make_claim(2, priority=Priority.INTERACTIVE)
    for number in range(100, 103):
        admission.add(waiting(chat, make_job(number), number))
    assert take_all(admission) == [100, 101]


def test_a_suspect_runs_beside_nothing() -> None:
    admission = Admission(max_num_seqs=4, kv_capacity_tokens=None)
    first, suspect = waiting(make_claim(1), make_job(1)), waiting(make_claim(2, sequence=2, alone=True), make_job(2))
    admission.add(first)
    admission.add(suspect)
    admission.add(waiting(make_claim(3, sequence=3), make_job(3)))
    assert take_all(admission) == [1]
    admission.leave(first)
    assert take_all(admission) == [2]
    admission.leave(suspect)
    assert take_all(admission) == [3]


def test_no_answer_is_expected_to_be_longer_than_the_model_allows() -> None:
    admission = Admission(max_num_seqs=16, kv_capacity_tokens=1000, max_model_len=200)
    for number in range(6):
        admission.add(waiting(make_claim(), make_job(number, prompt=100, output=2**31 - 1), number))
    assert take_all(admission) == [0, 1, 2, 3, 4]  # 200 tokens each
    admission = Admission(max_num_seqs=16, kv_capacity_tokens=1000, max_model_len=200)
    for number in range(3):  # longer than the model allows: the engine refuses them, they hold what they are
        admission.add(waiting(make_claim(), make_job(number, prompt=400, output=50), number))
    assert take_all(admission) == [0, 1]
