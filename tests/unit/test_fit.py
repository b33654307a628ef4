"""service.core.fit: constants of simulated engines found again from their results, and what cannot be found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import key_of

from service.core.fit import MIN_JOBS, Fit, fit, output_scale
from service.core.simulate import CostModel, SimulatedEngineCore, SimulatedJob
from service.core.timeline import UNKNOWN_TOKENS, MeasuredRun, admissions

SLOTS = 32
COSTS = {
    "a100": CostModel(),
    "flat": CostModel(
        step_seconds=0.01, prefill_token_seconds=1e-4, decode_sequence_seconds=0, context_token_seconds=0
    ),
    "faster": CostModel(
        step_seconds=0.02, prefill_token_seconds=3e-5, decode_sequence_seconds=2e-4, context_token_seconds=2e-7
    ),
    "cpu": CostModel(
        step_seconds=0.03, prefill_token_seconds=1 / 420, decode_sequence_seconds=4e-3, context_token_seconds=1e-7
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Jobs of groups with a shared prefix of some rungs, and lengths drawn for each."""

    jobs: int
    groups: int
    shared_rungs: tuple[int, int]
    own_tokens: Callable[[np.random.Generator], float]
    output_tokens: Callable[[np.random.Generator], float]

    def make(self, seed: int) -> list[SimulatedJob]:
        rng = np.random.default_rng(seed)
        shared = rng.integers(*self.shared_rungs, size=self.groups).tolist()
        made = []
        for number in range(self.jobs):
            group = number * self.groups // self.jobs
            own = int(self.own_tokens(rng))
            rungs = [1000 * group + depth for depth in range(shared[group])] + [10**6 + number] * (own // 32)
            made.append(
                SimulatedJob(
                    job_id=number + 1,
                    key=key_of(rungs),
                    prompt_tokens=32 * len(rungs) + own % 32 + 1,
                    output_tokens=int(self.output_tokens(rng)),
                )
            )
        return made


MIXES = {
    "chat": Mix(
        jobs=800,
        groups=30,
        shared_rungs=(5, 60),
        own_tokens=lambda rng: rng.lognormal(6, 0.8),
        output_tokens=lambda rng: min(1 + rng.lognormal(4.5, 0.8), 2000),
    ),
    "classify": Mix(
        jobs=1000,
        groups=5,
        shared_rungs=(20, 40),
        own_tokens=lambda rng: rng.integers(40, 400),
        output_tokens=lambda rng: rng.integers(1, 12),
    ),
    "long": Mix(
        jobs=400,
        groups=80,
        shared_rungs=(100, 120),
        own_tokens=lambda rng: rng.lognormal(8, 0.5),
        output_tokens=lambda rng: rng.lognormal(5, 0.5) + 1,
    ),
    "embed": Mix(
        jobs=600,
        groups=100,
        shared_rungs=(0, 3),
        own_tokens=lambda rng: rng.lognormal(6, 0.5),
        output_tokens=lambda rng: 1,
    ),
}
FULL = (SLOTS + 4,)
CHANGING = (1, 4, 8, 16, SLOTS + 4)  # jobs at the engine, a hundred jobs each


@cache
def measured(cost: str, mix: str, out: tuple[int, ...] = FULL) -> MeasuredRun:
    return measure(COSTS[cost], MIXES[mix].make(1), out)


def measure(
    cost: CostModel, jobs: list[SimulatedJob], out: Iterable[int] = FULL, pause_seconds: float = 0
) -> MeasuredRun:
    """Results as a worker would write them, that keeps so many jobs at its engine; a pause after each hundred."""
    core = SimulatedEngineCore(
        block_size=32, capacity_blocks=50_000, max_num_seqs=SLOTS, max_batched_tokens=8192, cost=cost
    )
    levels = list(out)
    now, fed, at_engine, rows = 0.0, 0, {}, []
    while fed < len(jobs) or at_engine:
        if not at_engine:
            now += pause_seconds
        may_feed = not pause_seconds or not at_engine or fed % 100
        while may_feed and fed < len(jobs) and len(at_engine) < levels[fed // 100 % len(levels)]:
            core.submit(jobs[fed])
            at_engine[jobs[fed].job_id] = now
            fed += 1
            may_feed = not pause_seconds or bool(fed % 100)
        report = core.step()
        now += report.seconds
        rows += [(at_engine.pop(job.job_id), now, *astuple(job)[1:]) for job in report.finished]
    return run_of(np.array(rows))


def run_of(rows: np.ndarray) -> MeasuredRun:
    """From [n, 5]: started and ended seconds, prompt, cached and completion tokens."""
    return MeasuredRun(
        started_seconds=1.7e9 + rows[:, 0],
        ended_seconds=1.7e9 + rows[:, 1],
        prompt_tokens=rows[:, 2].astype(np.int64),
        cached_tokens=rows[:, 3].astype(np.int64),
        completion_tokens=rows[:, 4].astype(np.int64),
        max_num_seqs=SLOTS,
    )


def chosen(run: MeasuredRun, places: np.ndarray) -> MeasuredRun:
    """Some of the results, in the order of `places`."""
    arrays = ("started_seconds", "ended_seconds", "prompt_tokens", "cached_tokens", "completion_tokens")
    return replace(run, **{name: getattr(run, name)[places] for name in arrays})


def fitted(run: MeasuredRun) -> Fit:
    found = fit([run])
    assert found is not None
    return found


def seconds_by_rates(found: Fit, run: MeasuredRun) -> float:
    """What the planner would reckon for these jobs."""
    prefill = (run.prompt_tokens - run.cached_tokens).sum() / found.rates.prefill_tokens_per_second
    return float(prefill + run.completion_tokens.sum() / found.rates.decode_tokens_per_second)


def step_of(cost: CostModel, *, decoding: int, context: int) -> float:
    return cost.seconds(prefill_tokens=0, decoding=decoding, context_tokens=decoding * context)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("mix", ["chat", "classify", "long"])
def test_constants_are_found_where_the_load_changes(cost: str, mix: str) -> None:
    truth, run = COSTS[cost], measured(cost, mix, CHANGING)
    found = fitted(run)
    assert found.jobs > 0.95 * len(run)
    assert found.cost.step_seconds == pytest.approx(truth.step_seconds, rel=0.1)
    assert found.cost.prefill_token_seconds == pytest.approx(truth.prefill_token_seconds, rel=0.2)
    assert found.median_error is not None
    assert found.median_error < 0.05


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("mix", ["chat", "long"])  # a handful of tokens each, as in `classify`, hardly show it
def test_the_cost_of_a_decoding_step_is_found_at_any_width(cost: str, mix: str) -> None:
    truth, run = COSTS[cost], measured(cost, mix, CHANGING)
    found = fitted(run)
    mean_context = int(run.prompt_tokens.mean() + run.completion_tokens.mean() / 2)
    for decoding in (1, SLOTS // 2, SLOTS):
        expected = step_of(truth, decoding=decoding, context=mean_context)
        assert step_of(found.cost, decoding=decoding, context=mean_context) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("out", [FULL, CHANGING])
def test_the_rates_add_up_to_the_time_that_the_engine_was_busy(cost: str, mix: str, out: tuple[int, ...]) -> None:
    run = measured(cost, mix, out)
    found = fitted(run)
    assert found.busy_seconds == pytest.approx(np.ptp(run.ended_seconds) + run.ended_seconds.min() - 1.7e9, rel=0.01)
    assert seconds_by_rates(found, run) == pytest.approx(found.busy_seconds, rel=0.04)
    assert found.median_error is not None
    assert found.median_error < 0.1


@pytest.mark.parametrize("cost", ["a100", "flat", "cpu"])
@pytest.mark.parametrize("mix", MIXES)
def test_prefill_is_told_from_decode_under_full_load(cost: str, mix: str) -> None:
    found = fitted(measured(cost, mix))
    assert found.cost.prefill_token_seconds == pytest.approx(COSTS[cost].prefill_token_seconds, rel=0.1)
    assert found.rates.prefill_tokens_per_second == pytest.approx(1 / COSTS[cost].prefill_token_seconds, rel=0.1)


def test_rates_are_exact_constants_where_tokens_alone_cost_time() -> None:
    cost = CostModel(step_seconds=0, prefill_token_seconds=2e-4, decode_sequence_seconds=1e-3, context_token_seconds=0)
    found = fitted(measure(cost, MIXES["chat"].make(4), CHANGING))
    assert found.rates.prefill_tokens_per_second == pytest.approx(5_000, rel=0.05)
    assert found.rates.decode_tokens_per_second == pytest.approx(1_000, rel=0.05)
    assert found.cost.step_seconds < 2e-4


def test_what_cannot_be_told_apart_is_said() -> None:
    """At a load that never changes, a step's constant and its sequences; where nothing decodes, all but prefill."""
    changing = fitted(measured("a100", "chat", CHANGING)).from_data
    full = fitted(measured("a100", "chat", FULL)).from_data
    embed = fitted(measured("a100", "embed", FULL)).from_data
    assert full.decode_sequence_seconds < changing.decode_sequence_seconds
    assert min(changing.step_seconds, changing.prefill_token_seconds) > 0.95
    assert embed.prefill_token_seconds > 0.95
    assert max(embed.decode_sequence_seconds, embed.context_token_seconds) < 0.01


def test_idle_gaps_and_hangs_do_not_count() -> None:
    jobs = MIXES["chat"].make(1)
    clean, gaps = measured("a100", "chat"), measure(COSTS["a100"], jobs, pause_seconds=60.0)
    found = fitted(gaps)
    assert np.ptp(gaps.ended_seconds) > found.busy_seconds + 400
    assert found.rates.prefill_tokens_per_second == pytest.approx(10_000, rel=0.1)
    hung = clean.ended_seconds.copy()
    hung[::40] += 30.0  # answers that were long in coming: ten times as long as the others
    rates, of_clean = fitted(replace(clean, ended_seconds=hung)).rates, fitted(clean).rates
    assert rates.prefill_tokens_per_second == pytest.approx(of_clean.prefill_tokens_per_second, rel=0.5)
    assert rates.decode_tokens_per_second == pytest.approx(of_clean.decode_tokens_per_second, rel=0.35)


def test_results_without_usage_spoil_only_their_surroundings() -> None:
    run = measured("a100", "chat")
    spoilt = run.completion_tokens.copy()
    spoilt[200:260] = UNKNOWN_TOKENS
    found = fitted(replace(run, completion_tokens=spoilt))
    assert found.jobs < len(run) - 60
    assert found.rates.prefill_tokens_per_second == pytest.approx(10_000, rel=0.1)
    assert fit([replace(run, completion_tokens=np.full_like(spoilt, UNKNOWN_TOKENS))]) is None


def test_a_run_that_goes_on_is_fitted_from_its_middle() -> None:
    """The newest results only, and jobs in flight at their end: what ran beside the first and the last is not here."""
    run = measure(COSTS["a100"], replace(MIXES["chat"], jobs=1500).make(8))
    middle = np.arange(250, 1250)  # in order of ending, as the store reads them
    found = fitted(replace(chosen(run, middle), is_cut=True, is_open=True))
    assert found.jobs < len(middle)
    assert found.rates.prefill_tokens_per_second == pytest.approx(10_000, rel=0.15)
    assert found.median_error is None or found.median_error < 0.1


def test_boots_of_one_kind_are_fitted_together() -> None:
    runs = [measured("a100", mix, CHANGING) for mix in ("classify", "long")]
    together = fit(runs)
    assert together == fit(runs[::-1])
    assert together is not None
    assert together.jobs > fitted(runs[0]).jobs
    assert together.cost.step_seconds == pytest.approx(COSTS["a100"].step_seconds, rel=0.1)


def test_too_little_is_no_fit() -> None:
    run = measured("a100", "chat")
    assert fit([]) is None
    assert fit([chosen(run, np.arange(0))]) is None
    assert fit([chosen(run, np.arange(MIN_JOBS - 1))]) is None
    assert fit([replace(run, ended_seconds=run.started_seconds)]) is None


def test_the_queue_at_the_engine_is_no_work() -> None:
    """Three jobs handed over at once to an engine that runs two: the third is admitted when the first ends."""
    started, ended = np.array([0.0, 0.0, 0.0, 9.0]), np.array([4.0, 6.0, 8.0, 10.0])
    assert admissions(started, ended, 2).tolist() == [0.0, 0.0, 4.0, 9.0]
    assert admissions(started, ended, 3).tolist() == [0.0, 0.0, 0.0, 9.0]
    overtaking = np.array([4.0, 6.0, 3.0, 10.0])  # ended before there was room for it, by our order
    assert admissions(started, overtaking, 2).tolist() == [0.0, 0.0, 0.0, 9.0]


RESULT = st.tuples(
    st.floats(0, 1e6),
    st.floats(0, 1e5) | st.just(0.0),
    st.integers(-1, 10**6),
    st.integers(-1, 10**6),
    st.integers(-1, 10**5),
)


@given(
    rows=st.lists(RESULT, max_size=120),
    slots=st.integers(1, 64),
    flags=st.tuples(st.booleans(), st.booleans()),
    order=st.randoms(use_true_random=False),
)
def test_any_results_give_a_usable_fit_or_none_in_any_order(
    rows: list[tuple[float, float, int, int, int]], slots: int, flags: tuple[bool, bool], order: object
) -> None:
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    table[:, 1] += table[:, 0]
    run = replace(run_of(table), max_num_seqs=slots, is_cut=flags[0], is_open=flags[1])
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    found = fit([run])
    assert found == fit([chosen(run, np.array(shuffled, dtype=np.int64))])
    if found is not None:
        numbers = [*asdict(found.cost).values(), *asdict(found.from_data).values(), found.busy_seconds]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert min(asdict(found.cost).values()) > 0
        assert math.isfinite(found.rates.prefill_tokens_per_second)
        assert math.isfinite(found.rates.decode_tokens_per_second)
        assert found.median_error is None or math.isfinite(found.median_error)


def test_output_lengths_follow_what_finished() -> None:
    assert output_scale(predicted_tokens=0, completion_tokens=0, jobs=0) == 1
    assert output_scale(predicted_tokens=256, completion_tokens=16, jobs=1) > 0.9
    assert output_scale(predicted_tokens=256_000, completion_tokens=16_000, jobs=1000) == pytest.approx(0.08, abs=0.01)
    assert output_scale(predicted_tokens=256_000, completion_tokens=512_000, jobs=1000) == pytest.approx(2, abs=0.05)
    assert output_scale(predicted_tokens=1_000, completion_tokens=0, jobs=10_000) > 0


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 10**6))
def test_the_scale_lies_between_one_and_the_ratio(predicted: float, made: float, jobs: int) -> None:
    scale = output_scale(predicted_tokens=predicted, completion_tokens=made, jobs=jobs)
    ratio = made / predicted if predicted and jobs else 1.0
    assert min(1.0, ratio) <= scale * (1 + 1e-9)
    assert scale <= max(1.0, ratio) * (1 + 1e-9)
    assert scale > 0
