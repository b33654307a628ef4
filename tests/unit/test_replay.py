"""service.core.replay: the joint replay against one engine stepped by hand, the bound, and fleets that change."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from assigned import AsPlanned, Assigned
from hypothesis import given
from hypothesis import strategies as st
from prefixes import backlog, instance, jobs, key_of

from service.core import prefix
from service.core.plan import Backlog, plan
from service.core.replay import (
    EngineShape,
    FleetChange,
    FleetJobs,
    FleetReplay,
    ReplayError,
    jobs_at_once,
    mean_context_tokens,
    replay_fleet,
)
from service.core.simulate import CostModel, SimulatedEngineCore, SimulatedJob

Jobs = list[tuple[list[int], int, int, int]]
ROOMY = EngineShape(block_size=32, kv_capacity_tokens=32 * 10_000, max_num_seqs=4, max_batched_tokens=64)
TIGHT = EngineShape(block_size=32, kv_capacity_tokens=32 * 12, max_num_seqs=3, max_batched_tokens=40)
UNIT_COST = CostModel(
    step_seconds=1.0, prefill_token_seconds=0.0, decode_sequence_seconds=0.0, context_token_seconds=0.0
)


def by_turns(job_id: int, instances: int) -> int:
    return job_id % instances


def arriving(made: Jobs, seconds: list[float]) -> FleetJobs:
    """Job i at the i-th of these times, taken round."""
    at_once = jobs_at_once(backlog(made))
    times = np.array([seconds[index % len(seconds)] for index in range(len(made))])
    return replace(at_once, arrival_seconds=times)


def check_replay(fleet: FleetJobs, result: FleetReplay) -> None:
    """What must hold whatever the policy: every job once, after its arrival, and sums that agree."""
    done = result.instance >= 0
    assert np.array_equal(done, np.isfinite(result.finish_seconds))
    assert result.refused_jobs == int((~done).sum())
    assert (result.start_seconds[done] >= fleet.arrival_seconds[done]).all()
    assert (result.finish_seconds[done] > result.start_seconds[done]).all()
    assert sum(part.jobs for part in result.instances) == int(done.sum())
    assert sum(part.cached_tokens for part in result.instances) == int(result.cached_tokens.sum())
    assert result.prompt_tokens == int(fleet.jobs.prompt_tokens[done].sum())
    assert result.makespan_seconds == (result.finish_seconds[done].max() if done.any() else 0.0)
    assert (result.cached_tokens[done] < np.maximum(fleet.jobs.prompt_tokens[done], 1)).all()


@given(
    jobs,
    st.integers(1, 8),
    st.sampled_from([8, 40, 4096]),
    st.sampled_from([16, 32, 64]),
)
def test_one_engine_with_unbounded_cache_reaches_the_bound(
    made: Jobs, max_num_seqs: int, max_batched_tokens: int, block_size: int
) -> None:
    """In key order, whatever the batching: a prefix is published no later than the next job is admitted."""
    waiting = backlog(made)
    shape = EngineShape(
        block_size=block_size,
        kv_capacity_tokens=320_000,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
    )
    result = replay_fleet(jobs_at_once(waiting), AsPlanned(plan(waiting, [instance(block_size=block_size)])), [shape])
    assert result.cached_tokens.sum() == prefix.bound_tokens(waiting.keys, waiting.prompt_tokens, block_size)
    assert result.bound_tokens == result.cached_tokens.sum()
    assert result.replicated_tokens == 0
    assert result.prompt_tokens == waiting.prompt_tokens.sum()
    check_replay(jobs_at_once(waiting), result)


@given(jobs, st.integers(1, 4))
def test_a_plan_runs_as_predicted_where_nothing_is_evicted(made: Jobs, n_instances: int) -> None:
    waiting = backlog(made)
    cohorts = plan(waiting, [instance(queue=str(number)) for number in range(n_instances)])
    result = replay_fleet(jobs_at_once(waiting), AsPlanned(cohorts), [ROOMY] * n_instances)
    predicted = {
        job: (cohort.instance, cached)
        for cohort in cohorts
        for job, cached in zip(cohort.job_ids.tolist(), cohort.predicted_cached_tokens.tolist(), strict=True)
    }
    found = zip(result.instance.tolist(), result.cached_tokens.tolist(), strict=True)
    assert dict(zip(waiting.job_ids.tolist(), found, strict=True)) == predicted


def stepped(fleet: FleetJobs, mine: list[int], shape: EngineShape) -> dict[int, tuple[float, float, int]]:
    """Start, finish and cached tokens of an engine's jobs, step by step; each joins at the first step after it came."""
    core = SimulatedEngineCore(
        block_size=shape.block_size,
        capacity_blocks=shape.capacity_blocks,
        max_num_seqs=shape.max_num_seqs,
        max_batched_tokens=shape.max_batched_tokens,
        cost=shape.cost,
    )
    coming = sorted(mine, key=lambda index: fleet.arrival_seconds[index])
    clock, started, ended = 0.0, {}, {}
    while coming or not core.is_idle:
        if core.is_idle:
            clock = max(clock, float(fleet.arrival_seconds[coming[0]]))
        while coming and fleet.arrival_seconds[coming[0]] <= clock:
            index = coming.pop(0)
            core.submit(
                SimulatedJob(
                    job_id=index,
                    key=fleet.jobs.keys[index],
                    prompt_tokens=int(fleet.jobs.prompt_tokens[index]),
                    output_tokens=int(fleet.output_tokens[index]),
                )
            )
        report = core.step()
        started |= dict.fromkeys(report.admitted, clock)
        clock += report.seconds
        ended |= {job.job_id: (started[job.job_id], clock, job.cached_tokens) for job in report.finished}
    return ended


@given(
    jobs,
    st.integers(1, 4),
    st.lists(st.sampled_from([0.0, 0.05, 0.31, 2.0, 2.5, 7.0]), min_size=1, max_size=9),
    st.sampled_from([ROOMY, TIGHT]),
    st.sampled_from([0, 1, 50]),
)
def test_engines_side_by_side_do_what_each_would_do_alone(
    made: Jobs, n_instances: int, seconds: list[float], shape: EngineShape, ahead_jobs: int
) -> None:
    """Where the policy never moves a job, neither leaps, nor feeding just ahead, nor the neighbours change a thing."""
    fleet = arriving(made, seconds)
    result = replay_fleet(fleet, Assigned(by_turns, cohort_jobs=2), [shape] * n_instances, ahead_jobs=ahead_jobs)
    check_replay(fleet, result)
    for number in range(n_instances):
        mine = [index for index in range(len(made)) if fleet.jobs.job_ids[index] % n_instances == number]
        for index, (start, finish, cached) in stepped(fleet, mine, shape).items():
            assert result.instance[index] == number
            assert result.start_seconds[index] == pytest.approx(start)
            assert result.finish_seconds[index] == pytest.approx(finish)
            assert result.cached_tokens[index] == cached


@given(
    jobs,
    st.lists(st.tuples(st.floats(0, 20), st.sets(st.integers(0, 2), min_size=1)), max_size=5),
    st.lists(st.floats(0, 9), min_size=1, max_size=5),
    st.booleans(),
)
def test_no_job_is_lost_while_engines_come_and_go(
    made: Jobs, moments: list[tuple[float, set[int]]], seconds: list[float], shared: bool
) -> None:
    fleet = arriving(made, seconds)
    policy = Assigned(None if shared else by_turns, cohort_jobs=3)
    changes = [FleetChange(at_seconds=at, present=tuple(present)) for at, present in moments]
    result = replay_fleet(fleet, policy, [TIGHT] * 3, changes=changes)
    check_replay(fleet, result)
    assert result.refused_jobs == 0
    added = [job for what, ids, _ in policy.calls if what == "add" for job in ids]
    assert set(added) == set(fleet.jobs.job_ids.tolist())


def test_an_engine_that_dies_gives_back_what_it_had_not_finished_and_comes_back_empty() -> None:
    made: Jobs = [([1, 2, 3], 5, 10, 0) for _ in range(6)]
    shape = EngineShape(
        block_size=32, kv_capacity_tokens=3200, max_num_seqs=1, max_batched_tokens=128, cost=UNIT_COST
    )  # a job takes 10 steps of a second
    policy = Assigned(lambda job, n: 0, cohort_jobs=2)
    changes = [FleetChange(at_seconds=15.5, present=(1,)), FleetChange(at_seconds=25.5, present=(0, 1))]
    result = replay_fleet(jobs_at_once(backlog(made)), policy, [shape, shape], ahead_jobs=0, changes=changes)
    assert policy.calls == [
        ("fleet", [("engine.0", 1), ("engine.1", 2)], 0.0),
        ("add", [100, 101, 102, 103, 104, 105], 0.0),
        ("fleet", [("engine.1", 2)], 15.5),
        ("add", [101, 102, 103], 15.5),
        ("fleet", [("engine.0", 3), ("engine.1", 2)], 25.5),
    ]
    # Engine 1 took 104 and 105, which still waited, then 101 and 102; 103 was left for engine 0.
    assert result.instance.tolist() == [0, 1, 1, 0, 1, 1]
    assert result.start_seconds.tolist() == [0.0, 35.5, 45.5, 25.5, 15.5, 25.5]
    assert result.cached_tokens.tolist() == [0, 96, 96, 0, 0, 96]


def test_what_no_engine_can_hold_is_refused_and_counted() -> None:
    made: Jobs = [([1], 3, 2, 0), ([7] * 50, 1, 1, 0), ([1], 3, 500, 0), ([2] * 10, 1, 2, 0)]
    small = replace(TIGHT, kv_capacity_tokens=32 * 5)
    result = replay_fleet(jobs_at_once(backlog(made)), Assigned(lambda job, n: n - 1), [TIGHT, small])
    assert result.refused_jobs == 3
    assert [part.refused_jobs for part in result.instances] == [0, 1]  # the last one: only the other could hold it
    assert result.instance.tolist() == [1, -1, -1, -1]
    assert result.prompt_tokens == 35


def test_true_lengths_run_and_told_lengths_are_told() -> None:
    waiting = backlog([([], 5, 40, 0), ([], 6, 40, 0)])
    fleet = jobs_at_once(waiting, output_tokens=np.array([3, 7]))
    shape = EngineShape(block_size=32, kv_capacity_tokens=3200, max_num_seqs=2, max_batched_tokens=128, cost=UNIT_COST)
    result = replay_fleet(fleet, Assigned(by_turns), [shape])
    assert result.finish_seconds.tolist() == [3.0, 7.0]
    assert fleet.arrivals(np.array([1])).jobs.output_tokens.tolist() == [40]


def test_engines_are_fed_just_ahead_of_what_they_run() -> None:
    class Watched(Assigned):
        """Keeps the most jobs that were out when it was asked for more."""

        most = 0

        def next_cohort(self, number: int, now_seconds: float):
            self.most = max(self.most, self.loads[1][number])
            assert self.loads[0][number] == pytest.approx(self.loads[1][number])  # each estimated at a second
            return super().next_cohort(number, now_seconds)

    made: Jobs = [([1], 3, 5, 0) for _ in range(200)]
    shape = replace(ROOMY, max_num_seqs=8)
    for ahead_jobs, most in ((None, 11), (0, 7), (20, 27)):
        policy = Watched(by_turns, cohort_jobs=1)
        replay_fleet(jobs_at_once(backlog(made)), policy, [shape] * 2, ahead_jobs=ahead_jobs)
        assert policy.most == most
    policy = Watched(by_turns, cohort_jobs=40)
    replay_fleet(jobs_at_once(backlog(made)), policy, [shape] * 2)
    assert policy.most == 40  # a second cohort is taken however large the first


def test_an_idle_engine_asks_again_when_another_finishes() -> None:
    class Waits(Assigned):
        """Gives engine 1 nothing while engine 0 has anything."""

        def next_cohort(self, number: int, now_seconds: float):
            if number == 1 and self.loads[1][0]:
                return None
            return super().next_cohort(number, now_seconds)

    made: Jobs = [([], 5, 4, 0) for _ in range(6)]
    shape = replace(ROOMY, max_num_seqs=1, cost=UNIT_COST)
    policy = Waits(lambda job, n: int(job >= 103), cohort_jobs=1)
    result = replay_fleet(jobs_at_once(backlog(made)), policy, [shape] * 2)
    assert result.start_seconds.tolist() == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert result.max_over_mean == pytest.approx(24 / 18)


def test_higher_classes_go_first_in_an_engine_too() -> None:
    waiting = jobs_at_once(backlog([([], 5, 1, 0)] * 3))
    shape = replace(ROOMY, max_num_seqs=1, cost=UNIT_COST)
    fleet = replace(waiting, priorities=np.array([0, 5, 9]))
    result = replay_fleet(fleet, Assigned(by_turns), [shape])
    assert result.start_seconds.tolist() == [2.0, 1.0, 0.0]
    assert fleet.arrivals(np.array([2, 0])).priorities.tolist() == [9, 0]
    assert fleet.take(np.array([1])).priorities.tolist() == [5]


def test_a_policy_that_keeps_jobs_and_ids_that_repeat_are_told_of() -> None:
    class Keeps(Assigned):
        def next_cohort(self, number: int, now_seconds: float) -> None:
            return None

    waiting = backlog([([], 5, 1, 0)] * 2)
    with pytest.raises(ReplayError, match="keeps 2 jobs"):
        replay_fleet(jobs_at_once(waiting), Keeps(by_turns), [ROOMY])
    twice = replace(waiting, job_ids=np.array([4, 4]))
    with pytest.raises(ReplayError, match="unique"):
        replay_fleet(jobs_at_once(twice), Assigned(by_turns), [ROOMY])


def test_progress_is_told_and_no_job_is_no_replay() -> None:
    told: list[int] = []
    many = jobs_at_once(backlog([([], 5, 1, 0)] * 2500))
    replay_fleet(many, Assigned(by_turns), [ROOMY] * 2, on_progress=told.append)
    assert [count // 1000 for count in told] == [1, 2]
    nothing = replay_fleet(many.take(np.zeros(0, dtype=np.int64)), Assigned(by_turns), [ROOMY])
    assert (nothing.hit_rate, nothing.bound, nothing.makespan_seconds, nothing.max_over_mean) == (0, 0, 0, 1)


def test_rates_are_what_full_steps_give() -> None:
    cost = CostModel(
        step_seconds=1.0, prefill_token_seconds=0.01, decode_sequence_seconds=0.5, context_token_seconds=0.001
    )
    shape = EngineShape(block_size=16, kv_capacity_tokens=1000, max_num_seqs=64, max_batched_tokens=100, cost=cost)
    rates = shape.rates(context_tokens=250.0)  # four at a time
    assert rates.prefill_tokens_per_second == pytest.approx(100 / 2.0)
    assert rates.decode_tokens_per_second == pytest.approx(4 / (1 + 2 + 1))
    assert shape.rates(context_tokens=1.0).decode_tokens_per_second == pytest.approx(64 / (1 + 32 + 0.064))
    assert mean_context_tokens(np.array([100, 200]), np.array([10, 30])) == pytest.approx((10 * 105 + 30 * 215) / 40)


def test_two_engines_of_different_kinds_share_a_queue_by_speed() -> None:
    slow = replace(ROOMY, cost=UNIT_COST, max_num_seqs=1)
    fast = replace(slow, cost=replace(UNIT_COST, step_seconds=0.25))
    made: Jobs = [([group] * 4, 1, 4, 0) for group in range(50)]
    result = replay_fleet(jobs_at_once(backlog(made)), Assigned(None, cohort_jobs=1), [slow, fast], ahead_jobs=0)
    assert result.instances[1].jobs == pytest.approx(40, abs=1)
    assert result.max_over_mean < 1.1  # one job of the slow engine


def test_a_timeless_key_is_not_needed() -> None:
    """Prompts below one rung have the empty key."""
    jobs_of = Backlog(
        job_ids=np.array([1, 2]),
        keys=[b"", key_of([1])],
        prompt_tokens=np.array([0, 40]),
        output_tokens=np.array([0, 1]),
        body_bytes=np.array([1, 1]),
    )
    result = replay_fleet(jobs_at_once(jobs_of), Assigned(by_turns), [ROOMY])
    assert not math.isnan(result.finish_seconds.sum())
