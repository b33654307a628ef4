"""Rates and the cost model of an engine from the results of its jobs, and the length of a batch's answers.

Each job that ran is one equation: from its admission to its end the engine was busy, made as many steps as the job
has output tokens, and computed, decoded and read what its neighbours needed meanwhile (timeline.py). The constants
of simulate.CostModel solve these equations by least squares without a negative (Lawson and Hanson, Solving Least
Squares Problems, 1974, chapter 23), in relative error, with outliers weighted down (Huber, Robust Estimation of a
Location Parameter, 1964).

What cannot be told apart: where the number of running sequences never changes, a step's constant and the cost of each
sequence in it; where contexts are of one length, the sequences and the context; where nothing is decoded, all but the
prefill. A weak pull (ridge; Hoerl and Kennard 1970) then keeps these in the proportions of the default cost model,
scaled to this engine: their sum is right for the mix that ran, and `from_data` says how little each rests on.

Wrong by construction for an engine that others use too, and for requests of several choices, which are several
sequences with one count of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from service.core.plan import Rates
from service.core.simulate import DEFAULT_COST, CostModel
from service.core.timeline import FloatArray, Mask, MeasuredRun, Timeline

MIN_JOBS = 40  # of known usage with complete surroundings; fewer say more of themselves than of the engine
_UNKNOWN_SHARE = 0.05
# The pull towards the default's proportions, for each equation, is the square of the equations' usual relative error:
# what differs by less cannot be told apart. Never below this, 0.3 % squared.
_LEAST_RIDGE = 1e-5
# Of the default's proportions. Engines differ most in what a sequence costs: on a GPU next to nothing, on a CPU nearly
# as much as a token of a prompt.
_DEFAULT_TRUST = (1.0, 1.0, 0.01, 0.01)
_LEAST_FACTOR = 1e-3  # of the scaled default: nothing is for nothing, and a model in which it is cannot be divided by
_ROUNDS = 3  # the constants say when prompts were computed, which the constants follow from
_REWEIGHTINGS = 6
_HUBER = 1.345  # times the spread of the residuals: 95 % efficient where they are normal
_FAR = 30.0  # a job that took so many times more or less than the others, for its work, is not measured right
_RATE_BINS = 60
_MOST_BINS = 20  # of those that are predicted to judge the fit
_LEAST_SHARE = 0.02  # of busy time that prefill costs at least, and decode, however well the other explains it all
_PREFILL_OVER_DECODE = 10.0  # the rates' ratio where results show only one of the two
_PRIOR_JOBS = 20.0  # how many finished jobs intake's prediction of the output length is worth

_PRIOR = np.array(
    [
        DEFAULT_COST.step_seconds,
        DEFAULT_COST.prefill_token_seconds,
        DEFAULT_COST.decode_sequence_seconds,
        DEFAULT_COST.context_token_seconds,
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromData:
    """How much of each constant the measurements say: 1 all of it, 0 nothing, it is the default's in proportion."""

    step_seconds: float
    prefill_token_seconds: float
    decode_sequence_seconds: float
    context_token_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What an engine's results say of its speed.

    `median_error` comes from a second fit, to the jobs within every other bin of time, and is over the bins between:
    |predicted / measured busy time - 1|. None where half the results are too few for one,
    or nobody asked.
    """

    rates: Rates
    cost: CostModel
    from_data: FromData
    jobs: int  # that the fit rests on
    busy_seconds: float
    median_error: float | None


def fit(runs: Sequence[MeasuredRun], *, is_judged: bool = True) -> Fit | None:
    """One cost model for boots of one kind; None below MIN_JOBS. The order of results and of runs does not matter.

    Without `is_judged` there is no `median_error`, and half the time is saved: 2,000 jobs take 40 ms.
    """
    timelines = [
        Timeline(run, unknown_share=_UNKNOWN_SHARE) for run in runs if (run.ended_seconds > run.started_seconds).any()
    ]
    timelines.sort(key=lambda item: (item.busy_seconds, len(item.started), float(item.ended.sum())))
    found = _solve_rounds(timelines, [item.all_jobs for item in timelines], MIN_JOBS)
    rates = _rates(timelines, found.constants) if found is not None else None
    if found is None or rates is None:
        return None
    return Fit(
        rates=rates,
        cost=CostModel(**_named(found.constants)),
        from_data=FromData(**_named(found.from_data)),
        jobs=found.jobs,
        busy_seconds=sum(item.busy_seconds for item in timelines),
        median_error=_held_out_error(timelines) if is_judged else None,
    )


def output_scale(*, predicted_tokens: float, completion_tokens: float, jobs: int) -> float:
    """What to multiply the predicted output lengths of a batch by, given the sums over `jobs` finished ones of it.

    The ratio of the sums, shrunk towards 1: intake's prediction counts as _PRIOR_JOBS more jobs that came out as
    predicted (a normal prior on a ratio estimator; Cochran, Sampling Techniques, 1977, chapter 6). The first jobs to
    finish are the short ones, which is one reason not to believe a handful. Above 0, and 1 where nothing is known.
    """
    if jobs <= 0 or predicted_tokens <= 0:
        return 1.0
    prior_tokens = _PRIOR_JOBS * predicted_tokens / jobs
    return (max(completion_tokens, 0.0) + prior_tokens) / (predicted_tokens + prior_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Solution:
    """The constants, [4] in the order of CostModel; and what `FromData` says of each."""

    constants: FloatArray
    from_data: FloatArray
    jobs: int


def _named(values: FloatArray) -> dict[str, float]:
    return dict(zip(CostModel.__dataclass_fields__, values.tolist(), strict=True))


def _solve_rounds(timelines: Sequence[Timeline], chosen: Sequence[Mask], least_jobs: int) -> _Solution | None:
    """The constants from the chosen jobs of each timeline; None where fewer than `least_jobs` of them are of use."""
    found: _Solution | None = None
    prefill = DEFAULT_COST.prefill_token_seconds
    for _ in range(_ROUNDS):
        parts = [item.jobs(prefill) for item in timelines]
        masks = [part.is_known & mask for part, mask in zip(parts, chosen, strict=True)]
        if sum(int(mask.sum()) for mask in masks) < least_jobs:
            return None
        amounts = np.concatenate([part.amounts[mask] for part, mask in zip(parts, masks, strict=True)])
        seconds = np.concatenate([part.seconds[mask] for part, mask in zip(parts, masks, strict=True)])
        if found is None:  # where the default's prompts end is of another scale: the first guess has this engine's
            prefill *= float(np.median(seconds / (amounts @ _PRIOR)))
            found = _Solution(constants=_PRIOR, from_data=np.zeros(4), jobs=0)
            continue
        found = _solve(amounts, seconds)
        prefill = float(found.constants[1])
    return found


def _solve(amounts: FloatArray, seconds: FloatArray) -> _Solution:
    """Least squares in relative error. In units of the scaled default, so that the unknowns are all near 1."""
    expected = amounts @ _PRIOR
    units = _PRIOR * float(np.median(seconds / expected))
    near = np.abs(np.log(seconds / (amounts @ units))) < np.log(_FAR)
    rows = amounts[near] * units / seconds[near, None]
    factors = np.ones(4)
    for round_ in range(_REWEIGHTINGS):
        misses = np.abs(1.0 - rows @ factors)
        weights = _huber_weights(misses, least_spread=1e-3)
        gram = rows.T @ (rows * weights[:, None])
        # The errors are those of the weakest pull: a stronger one from the start would justify itself.
        pull = max(_spread(misses) ** 2, _LEAST_RIDGE) if round_ == _REWEIGHTINGS - 1 else _LEAST_RIDGE
        ridge = pull * len(rows) * np.diag(_DEFAULT_TRUST)
        factors = _without_negatives(gram + ridge, rows.T @ weights + ridge.sum(axis=1))
    from_data = 1.0 - np.diag(np.linalg.inv(gram + ridge) @ ridge)
    factors = np.maximum(factors, _LEAST_FACTOR)
    return _Solution(constants=factors * units, from_data=np.clip(from_data, 0.0, 1.0), jobs=len(rows))


def _spread(misses: FloatArray) -> float:
    """The standard deviation of normal errors with this median of their size."""
    return 1.4826 * float(np.median(misses))


def _huber_weights(misses: FloatArray, least_spread: float) -> FloatArray:
    """1 for a relative error within the usual; below `least_spread` every error is usual."""
    spread = max(_spread(misses), least_spread)
    weights: FloatArray = np.minimum(1.0, _HUBER * spread / np.maximum(misses, 1e-9))
    return weights


def _without_negatives(gram: FloatArray, moments: FloatArray) -> FloatArray:
    """The x >= 0 with the least x'Gx - 2 m'x, for a positive definite G of few unknowns.

    The best x is the unconstrained one on its own support (Lawson and Hanson's conditions), and there are but 2^n
    supports: try each.
    """
    best, least = np.zeros(len(moments)), 0.0
    for size in range(1, len(moments) + 1):
        for support in combinations(range(len(moments)), size):
            places = list(support)
            values = np.linalg.solve(gram[np.ix_(places, places)], moments[places])
            value = -float(values @ moments[places])  # of the objective, at its unconstrained minimum
            if (values >= 0).all() and value < least:
                best, least = np.zeros(len(moments)), value
                best[places] = values
    return best


def _rates(timelines: Sequence[Timeline], constants: FloatArray) -> Rates | None:
    """Prefill at its marginal cost, decode at all the rest of the busy time, so that the two add up to it.

    Over bins of busy time, of which those that the cost model does not explain count less. Each of the two gets at
    least _LEAST_SHARE of the time. None where no bin is of use.
    """
    seconds = computed = made = 0.0
    for timeline in timelines:
        work = timeline.bins(_RATE_BINS, float(constants[1])).work
        known = work.is_known & (work.seconds > 0)
        if not known.any():
            continue
        misses = np.abs(1.0 - (work.amounts @ constants)[known] / work.seconds[known])
        weights = _huber_weights(misses, least_spread=0.1)
        seconds += float(weights @ work.seconds[known])
        computed += float(weights @ work.amounts[known, 1])
        made += float(weights @ work.output_tokens[known])
    if seconds <= 0 or computed + made <= 0:
        return None
    share = min(max(computed * float(constants[1]) / seconds, _LEAST_SHARE), 1 - _LEAST_SHARE)
    prefill = computed / (share * seconds)
    decode = made / ((1 - share) * seconds)
    return Rates(
        prefill_tokens_per_second=prefill or decode * _PREFILL_OVER_DECODE,
        decode_tokens_per_second=decode or prefill / _PREFILL_OVER_DECODE,
    )


def _held_out_error(timelines: Sequence[Timeline]) -> float | None:
    """Fit the jobs that lie in every other bin of time, and predict the busy time of the bins between."""
    bins = [item.bins(_held_out_bins(item), DEFAULT_COST.prefill_token_seconds) for item in timelines]
    seen = [item.within(part.bounds, parity=0) for item, part in zip(timelines, bins, strict=True)]
    found = _solve_rounds(timelines, seen, MIN_JOBS // 2)
    if found is None:
        return None
    errors = []
    for timeline, part in zip(timelines, bins, strict=True):
        work = timeline.bins(len(part.bounds) - 1, float(found.constants[1])).work
        unseen = work.is_known & (work.seconds > 0) & (np.arange(len(work.seconds)) % 2 == 1)
        errors.append(np.abs((work.amounts @ found.constants)[unseen] / work.seconds[unseen] - 1))
    joined = np.concatenate(errors)
    return float(np.median(joined)) if len(joined) else None


def _held_out_bins(timeline: Timeline) -> int:
    """Bins of three long jobs' time, so that jobs lie within; at most _MOST_BINS."""
    return int(min(max(timeline.busy_seconds / (3 * timeline.long_seconds), 2), _MOST_BINS))
