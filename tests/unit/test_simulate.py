"""service.core.simulate: a plain LRU with one sequence at a time, and vLLM's habits with more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import jobs, key_of

from service.core.blockcache import check_cache
from service.core.simulate import CostModel, FinishedJob, SimulatedEngineCore, SimulatedJob

Jobs = list[tuple[list[int], int, int, int]]
UNIT_COST = CostModel(
    step_seconds=1.0, prefill_token_seconds=0.0, decode_sequence_seconds=0.0, context_token_seconds=0.0
)


def simulated(made: Jobs) -> list[SimulatedJob]:
    return [
        SimulatedJob(job_id=n, key=key_of(path), prompt_tokens=32 * len(path) + extra, output_tokens=out)
        for n, (path, extra, out, _) in enumerate(made)
    ]


def engine(**changes: object) -> SimulatedEngineCore:
    options: dict = {"block_size": 32, "capacity_blocks": 1000, "max_num_seqs": 8, "max_batched_tokens": 2048}
    return SimulatedEngineCore(**(options | {"cost": UNIT_COST} | changes))


def drain(core: SimulatedEngineCore, *, leap: bool = False) -> tuple[float, dict[int, FinishedJob]]:
    seconds, finished = 0.0, {}
    while not core.is_idle:
        report = core.step(leap=leap)
        assert report.seconds > 0
        seconds += report.seconds
        finished |= {job.job_id: job for job in report.finished}
        check_cache(core.cache)
    assert core.cache.free_blocks == core.cache.capacity_blocks
    return seconds, finished


def plain_lru(requests: list[SimulatedJob], capacity_blocks: int) -> list[int]:
    """Cached tokens of jobs run one after the other; blocks are prefixes with the time of their last use."""
    used: dict[tuple, tuple[int, int]] = {}
    cached = []
    for now, job in enumerate(requests):
        rungs = [job.key[i : i + 4] for i in range(0, len(job.key), 4)]
        held = job.prompt_tokens + job.output_tokens - 1
        own = [(now, depth) for depth in range(len(rungs), held // 32)]
        names = [*(tuple(rungs[: depth + 1]) for depth in range(len(rungs))), *own]
        hits = 0
        while hits < (job.prompt_tokens - 1) // 32 and names[hits] in used:
            hits += 1
        pinned = set(names[:hits])
        needed = -(-held // 32) - hits
        while len(used) + needed > capacity_blocks:
            victim = min((name for name in used if name not in pinned), key=lambda name: used[name])
            del used[victim]
        for depth, name in enumerate(names):
            used[name] = (now, -depth)
        cached.append(hits * 32)
    return cached


@given(jobs, st.integers(9, 40), st.sampled_from([8, 64, 2048]))
def test_one_sequence_at_a_time_agrees_with_a_plain_lru(made: Jobs, capacity: int, budget: int) -> None:
    # A prompt that ends on a block holds its last block twice for a while (it is computed again): left out here.
    requests = simulated(made)
    core = engine(capacity_blocks=capacity, max_num_seqs=1, max_batched_tokens=budget)
    for job in requests:
        core.submit(job)
    _, finished = drain(core)
    assert [finished[job.job_id].cached_tokens for job in requests] == plain_lru(requests, capacity)


@given(jobs, st.integers(9, 40), st.integers(1, 8), st.sampled_from([8, 64]))
def test_leaping_changes_nothing(made: Jobs, capacity: int, max_num_seqs: int, budget: int) -> None:
    cost = CostModel()
    ends = []
    for leap in (False, True):
        core = engine(capacity_blocks=capacity, max_num_seqs=max_num_seqs, max_batched_tokens=budget, cost=cost)
        for job in simulated(made):
            core.submit(job)
        ends.append(drain(core, leap=leap))
    assert ends[0][1] == ends[1][1]
    assert ends[0][0] == pytest.approx(ends[1][0])
    assert len(ends[0][1]) == len(made)


def test_jobs_of_one_step_share_what_the_step_computes() -> None:
    core = engine()
    for job in simulated([([1, 2, 3], 5, 1, 0), ([1, 2, 3], 7, 1, 0)]):
        core.submit(job)
    finished = core.step().finished
    assert [job.cached_tokens for job in finished] == [0, 96]


def test_a_chunk_shares_only_what_it_has_computed() -> None:
    core = engine(max_batched_tokens=64)
    for job in simulated([([1, 2, 3], 5, 1, 0), ([1, 2, 3], 7, 1, 0)]):
        core.submit(job)
    assert core.step().finished == ()
    finished = core.step().finished
    assert [job.cached_tokens for job in finished] == [0, 96]
    _, finished = drain(SimulatedEngineCore(block_size=32, capacity_blocks=9, max_num_seqs=1, max_batched_tokens=8))
    assert finished == {}


def test_admission_is_in_order_of_priority_then_arrival_and_waits_for_the_first() -> None:
    core = engine(capacity_blocks=6, max_num_seqs=8)
    for job_id, (n_blocks, priority) in enumerate([(4, 5), (3, 5), (1, 5), (2, 1)]):
        core.submit(
            SimulatedJob(job_id=job_id, key=b"", prompt_tokens=n_blocks * 32, output_tokens=1, priority=priority)
        )
    assert [[job.job_id for job in core.step().finished] for _ in range(2)] == [[0, 3], [1, 2]]


def test_steps_cost_what_the_model_says() -> None:
    cost = CostModel(
        step_seconds=1.0, prefill_token_seconds=0.1, decode_sequence_seconds=0.01, context_token_seconds=0.001
    )
    core = engine(cost=cost)
    core.submit(SimulatedJob(job_id=1, key=b"", prompt_tokens=10, output_tokens=3))
    assert core.step().seconds == pytest.approx(2.0)
    assert core.step().seconds == pytest.approx(1.01 + 0.011)
    report = core.step()
    assert report.seconds == pytest.approx(1.01 + 0.012)
    assert report.finished == (FinishedJob(job_id=1, prompt_tokens=10, cached_tokens=0, output_tokens=3),)
    assert core.step().seconds == 0.0
    assert core.is_idle


def test_a_budget_below_the_sequences_and_jobs_that_never_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"):
        engine(max_batched_tokens=4)
    core = engine(capacity_blocks=2)
    job = SimulatedJob(job_id=1, key=b"", prompt_tokens=60, output_tokens=6)
    assert not core.can_hold(job)
    with pytest.raises(ValueError, match="too long"):
        core.submit(job)


@given(
    seconds=st.floats(0, 50),
    prefill=st.integers(0, 1000),
    decoding=st.integers(0, 9),
    context=st.integers(0, 10_000),
    context_seconds=st.sampled_from([0.0, 1e-7, 1e-3]),
)
def test_steps_until_counts_the_fewest_that_last_so_long(
    seconds: float, prefill: int, decoding: int, context: int, context_seconds: float
) -> None:
    cost = CostModel(step_seconds=0.5, prefill_token_seconds=0.01, context_token_seconds=context_seconds)
    found = cost.steps_until(seconds, prefill_tokens=prefill, decoding=decoding, context_tokens=context)
    passed = [0.0]
    for step in range(found):
        now = cost.seconds(
            prefill_tokens=0 if step else prefill, decoding=decoding, context_tokens=context + step * decoding
        )
        passed.append(passed[-1] + now)
    assert found >= 1
    assert passed[-1] >= seconds - 1e-6
    assert found == 1 or passed[-2] <= seconds + 1e-6


def test_a_leap_ends_at_the_horizon() -> None:
    core = engine()
    core.submit(SimulatedJob(job_id=1, key=b"", prompt_tokens=10, output_tokens=100))
    assert core.step().admitted == (1,)
    assert core.has_room
    report = core.step(leap=True, horizon_seconds=6.5)
    assert (report.seconds, report.admitted, report.finished) == (7.0, (), ())
    assert core.step(leap=True, horizon_seconds=0.0).seconds == 1.0
    assert core.step(leap=True).seconds == 91.0


@given(jobs, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=20), st.integers(9, 40))
def test_aborts_free_what_they_held(made: Jobs, aborts: list[tuple[int, int]], capacity: int) -> None:
    core = engine(capacity_blocks=capacity, max_num_seqs=3, max_batched_tokens=40, cost=CostModel())
    for job in simulated(made):
        core.submit(job)
    aborted, seen = set(), set()
    for job_id, steps in aborts:
        seen |= {job.job_id for _ in range(steps) for job in core.step().finished}
        if core.abort(job_id):
            aborted.add(job_id)
    assert core.abort(10_000) is False
    _, finished = drain(core, leap=True)
    assert seen | set(finished) == set(range(len(made))) - aborted
    assert core._context_tokens == core._running == 0


@pytest.mark.parametrize("leap", [False, True])
def test_an_empty_prompt_ends_too(leap: bool) -> None:
    core = engine(block_size=16)
    core.submit(SimulatedJob(job_id=1, key=b"", prompt_tokens=0, output_tokens=0))
    core.submit(SimulatedJob(job_id=2, key=b"", prompt_tokens=0, output_tokens=3))
    seconds, finished = drain(core, leap=leap)
    assert seconds == 3.0
    assert sorted(finished) == [1, 2]


def test_an_aborted_job_may_come_again() -> None:
    core = engine()
    [job] = simulated([([1, 2], 5, 9, 0)])
    core.submit(job)
    core.step()
    assert core.abort(0)
    core.submit(job)
    _, finished = drain(core)
    assert finished[0].cached_tokens == 64
