"""What one engine did and when, as far as the results of its jobs tell: for the fit of its cost model.

A result says when a job was handed to the engine and when its answer was there. When the engine took it up, and when
its prompt was computed, is reconstructed from the rules of the scheduler: jobs are admitted in the order in which they
came as sequences end, and prompts are computed in the order of admission, before anything else (vLLM's chunked
prefill). The queue is one with known departures, so every admission follows from the ends before it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.prefix import IntArray

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

UNKNOWN_TOKENS = -1
_SHORTEST_SECONDS = 1e-3  # what results are rounded to; a span below it tells nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredRun:
    """Results of one boot, in any order. All arrays are [n]; times in seconds on one clock, UNKNOWN_TOKENS where the
    engine did not say."""

    started_seconds: FloatArray  # handed to the engine, where it may have waited
    ended_seconds: FloatArray
    prompt_tokens: IntArray
    cached_tokens: IntArray
    completion_tokens: IntArray
    max_num_seqs: int
    is_cut: bool = False  # there are older results than these: what ran beside the first of them is not all here
    is_open: bool = False  # jobs were in flight when these were read: what ran beside the last is not all here

    def __len__(self) -> int:
        return len(self.started_seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What was done in some spans of time. `amounts` is [spans, 4], in the order of simulate.CostModel's constants:
    engine steps, prompt tokens computed, output tokens made by decoding sequences, tokens of context they read."""

    amounts: FloatArray
    seconds: FloatArray  # [spans], of which the engine was busy
    output_tokens: FloatArray  # [spans], with the first of each job, which its prefill makes
    is_known: Mask  # [spans]: next to nothing ran in it that the results do not tell of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Spans of equal busy time, one after the other."""

    bounds: FloatArray  # [bins + 1]
    work: Work


class _Ramps:
    """The sum over jobs of amounts that each accrue evenly over a span of their own, as a function of time."""

    def __init__(self, start: FloatArray, end: FloatArray, amount: FloatArray) -> None:
        rate = amount / np.maximum(end - start, _SHORTEST_SECONDS)
        bends = np.concatenate([start, np.maximum(end, start + _SHORTEST_SECONDS)])
        order = np.argsort(bends, kind="stable")
        self._bends = bends[order]
        slopes = np.cumsum(np.concatenate([rate, -rate])[order])
        self._values = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(self._bends))])

    def between(self, start: FloatArray, end: FloatArray) -> FloatArray:
        done: FloatArray = np.interp(end, self._bends, self._values) - np.interp(start, self._bends, self._values)
        return np.maximum(done, 0.0)

    @property
    def total(self) -> float:
        return float(self._values[-1])

    def when(self, value: FloatArray) -> FloatArray:
        """The time at which the sum reaches a value."""
        found: FloatArray = np.interp(value, self._values, self._bends)
        return found


class Timeline:
    """One boot's results in order, with the time of each job's admission; what was done in any span of it."""

    def __init__(self, run: MeasuredRun, *, unknown_share: float) -> None:
        """`unknown_share`: of the job seconds in a span, what jobs of unknown usage may take of a span that counts."""
        ordered = _in_order(run)
        self.started, self.ended = ordered.started_seconds, ordered.ended_seconds
        self._unknown_share = unknown_share
        tokens = (ordered.prompt_tokens, ordered.cached_tokens, ordered.completion_tokens)
        self.has_usage = np.logical_and.reduce([array >= 0 for array in tokens])
        prompt, cached, completion = (np.where(self.has_usage, array, 0).astype(np.float64) for array in tokens)
        self._uncached = np.maximum(prompt - cached, 0.0)
        self._completion = completion
        self._context = prompt + (completion + 1) / 2  # mean over its decoding steps
        self.admitted = admissions(self.started, self.ended, ordered.max_num_seqs)
        self._presence = _Ramps(self.admitted, self.ended, self.ended - self.admitted)
        unknown = np.where(self.has_usage, 0.0, self.ended - self.admitted)
        self._unknown = _Ramps(self.admitted, self.ended, unknown)
        self._busy = _busy(self.admitted, self.ended)
        self._complete_from, self._complete_to = _complete(ordered)

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one job was in the engine."""
        return self._busy.total

    @property
    def long_seconds(self) -> float:
        """What nine jobs of ten take at most."""
        return float(np.quantile(self.ended - self.admitted, 0.9))

    @property
    def all_jobs(self) -> Mask:
        return np.ones(len(self.started), dtype=np.bool_)

    def jobs(self, prefill_token_seconds: float) -> Work:
        """A span for each job, from its admission to its end: the engine is busy throughout, and the number of steps
        is the job's own count of output tokens, as a sequence makes one a step."""
        steps = np.maximum(self._completion, 1.0)
        work = self._work(self.admitted, self.ended, steps, prefill_token_seconds)
        return Work(
            amounts=work.amounts,
            seconds=work.seconds,
            output_tokens=work.output_tokens,
            is_known=work.is_known & self.has_usage & (work.seconds > _SHORTEST_SECONDS),
        )

    def bins(self, n_bins: int, prefill_token_seconds: float) -> Bins:
        """The whole run in `n_bins` bins."""
        bounds = self._busy.when(np.linspace(0.0, self.busy_seconds, n_bins + 1))
        rate = np.where(self.has_usage, np.maximum(self._completion, 1.0), 0.0)
        # Every job in the engine sees the same steps, so their number is the mean of what each of them saw.
        seen = _Ramps(self.admitted, self.ended, rate).between(bounds[:-1], bounds[1:])
        known = self._presence.between(bounds[:-1], bounds[1:]) - self._unknown.between(bounds[:-1], bounds[1:])
        busy = self._busy.between(bounds[:-1], bounds[1:])
        steps = seen * busy / np.maximum(known, _SHORTEST_SECONDS)
        return Bins(bounds=bounds, work=self._work(bounds[:-1], bounds[1:], steps, prefill_token_seconds))

    def within(self, bounds: FloatArray, *, parity: int) -> Mask:
        """bool[jobs]: it was admitted and ended in one bin, of an even number (parity 0) or an odd one (1)."""
        first = np.searchsorted(bounds, self.admitted, side="right") - 1
        last = np.searchsorted(bounds, self.ended, side="left") - 1
        inside: Mask = (first == last) & (first % 2 == parity)
        return inside

    def _work(self, start: FloatArray, end: FloatArray, steps: FloatArray, prefill_token_seconds: float) -> Work:
        computed = _prefill_ends(self.admitted, self.ended, self._uncached * prefill_token_seconds)
        decoded = np.maximum(self._completion - 1, 0.0)  # the prefill makes the first
        amounts = np.stack(
            [
                steps,
                _Ramps(self.admitted, computed, self._uncached).between(start, end),
                _Ramps(computed, self.ended, decoded).between(start, end),
                _Ramps(computed, self.ended, decoded * self._context).between(start, end),
            ],
            axis=1,
        )
        unknown = self._unknown.between(start, end) <= self._unknown_share * self._presence.between(start, end)
        return Work(
            amounts=amounts,
            seconds=self._busy.between(start, end),
            output_tokens=_Ramps(computed, self.ended, self._completion).between(start, end),
            is_known=unknown & (start >= self._complete_from) & (end <= self._complete_to),
        )


def admissions(started: FloatArray, ended: FloatArray, max_num_seqs: int) -> FloatArray:
    """When each job entered the running set of at most `max_num_seqs`, by order of `started`, which ascends."""
    admitted = np.empty_like(started)
    running: list[float] = []  # heap of ends
    last = -np.inf
    for place, (start, end) in enumerate(zip(started.tolist(), ended.tolist(), strict=True)):
        time = max(start, last)
        while running and running[0] <= time:
            heapq.heappop(running)
        while len(running) >= max_num_seqs:
            time = heapq.heappop(running)
        if end <= time:  # it overtook others: a higher class
            time = start
        admitted[place] = time
        last = max(last, time)
        heapq.heappush(running, end)
    return admitted


def _prefill_ends(admitted: FloatArray, ended: FloatArray, prefill_seconds: FloatArray) -> FloatArray:
    """When each prompt was computed: one after the other, each at the earliest from its admission."""
    computed = np.empty_like(admitted)
    last = -np.inf
    columns = (admitted.tolist(), ended.tolist(), prefill_seconds.tolist())
    for place, (start, end, seconds) in enumerate(zip(*columns, strict=True)):
        computed[place] = last = min(max(start, last) + seconds, end)
    return computed


def _busy(admitted: FloatArray, ended: FloatArray) -> _Ramps:
    """Seconds in which any job was in the engine: the union of their spans, idle gaps left out."""
    order = np.argsort(admitted, kind="stable")
    admitted, latest = admitted[order], np.maximum.accumulate(ended[order])
    opens = np.concatenate([[True], admitted[1:] > latest[:-1]])
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:] - 1, [len(ended) - 1]])
    return _Ramps(admitted[first], latest[last], latest[last] - admitted[first])


def _complete(run: MeasuredRun) -> tuple[float, float]:
    """The time in which every job that ran is among the results.

    An older job that is not here ended before the first of these did. One that was in flight began, as a rule, less
    than a long job's time before the last end.
    """
    since = float(run.ended_seconds.min()) if run.is_cut else -np.inf
    long_seconds = float(np.quantile(run.ended_seconds - run.started_seconds, 0.9))
    until = float(run.ended_seconds.max()) - long_seconds if run.is_open else np.inf
    return since, until


def _in_order(run: MeasuredRun) -> MeasuredRun:
    """By start, without the jobs that took no time; times from the first start on."""
    keep = run.ended_seconds > run.started_seconds
    columns = [run.started_seconds, run.ended_seconds, run.prompt_tokens, run.cached_tokens, run.completion_tokens]
    order = np.flatnonzero(keep)[np.lexsort([column[keep] for column in reversed(columns)])]
    origin = run.started_seconds[order[0]] if len(order) else 0.0
    return MeasuredRun(
        started_seconds=run.started_seconds[order] - origin,
        ended_seconds=run.ended_seconds[order] - origin,
        prompt_tokens=run.prompt_tokens[order],
        cached_tokens=run.cached_tokens[order],
        completion_tokens=run.completion_tokens[order],
        max_num_seqs=run.max_num_seqs,
        is_cut=run.is_cut,
        is_open=run.is_open,
    )
