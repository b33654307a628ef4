"""Cutting a sequence of jobs in key order: into one run per instance, and into messages and cohorts. Arrays only.

A position p is a cut *before* the job at p. `shared[p]` is what that job shares with the job before it, so a cut at p
loses at most `shared[p]` tokens of cache: the engine that starts there computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core.prefix import IntArray

FloatArray = NDArray[np.float64]

_BISECTIONS = 40  # halvings of the makespan: far below the cost of one job
_TINY = 1e-9  # relative; keeps rounding from calling a feasible makespan infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What the jobs in key order cost one instance."""

    cumulative_seconds: FloatArray  # [n + 1]; of the jobs before a position, each after its neighbour
    cold_seconds: FloatArray  # [n]; more, when a run starts at this job with nothing in the cache
    cached_tokens: IntArray  # [n]; what the cache serves of the job after its neighbour

    def run_seconds(self, start: int, end: int) -> float:
        """Cost of the run [start, end) that starts cold."""
        if start >= end:
            return 0.0
        span = self.cumulative_seconds[end] - self.cumulative_seconds[start]
        return float(span + self.cold_seconds[start])

    def reach(self, start: int, seconds: float) -> int:
        """The farthest end of a run from `start` that costs at most `seconds`; `start` itself for none."""
        if start >= len(self.cold_seconds):
            return start
        limit = self.cumulative_seconds[start] - self.cold_seconds[start] + seconds
        return max(start, int(np.searchsorted(self.cumulative_seconds, limit, side="right")) - 1)


def smallest_makespan(costs: Sequence[RunCosts], load_seconds: Sequence[float]) -> tuple[float, list[int]]:
    """The least makespan (seconds) at which greedy filling fits all jobs, and each instance's end position.

    Instances are filled in the order given, each up to the makespan less the work it has; a run may be empty. This is
    the classic partition of a sequence by bisection on the answer: greedy filling is optimal for a given makespan,
    and takes len(costs) binary searches in the cumulative costs.
    """
    n = len(costs[0].cold_seconds)
    low = min(load_seconds)
    high = max(load_seconds[0] + costs[0].run_seconds(0, n), low) * (1 + _TINY) + _TINY
    best = _fill(costs, load_seconds, high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        ends = _fill(costs, load_seconds, middle)
        if ends[-1] == n:
            high, best = middle, ends
        else:
            low = middle
    return high, best


def _fill(costs: Sequence[RunCosts], load_seconds: Sequence[float], makespan_seconds: float) -> list[int]:
    ends, start = [], 0
    for cost, load in zip(costs, load_seconds, strict=True):
        start = cost.reach(start, makespan_seconds - load) if makespan_seconds > load else start
        ends.append(start)
    return ends


def slide_cuts(
    ends: Sequence[int], costs: Sequence[RunCosts], load_seconds: Sequence[float], longest_seconds: float
) -> list[int]:
    """Move each cut to where least is lost, as long as no instance ends after `longest_seconds`.

    From the left; of equal losses the place nearest to the old cut. The ends given must keep the limit themselves.
    """
    slid = list(ends)
    for left in range(len(slid) - 1):
        start, cut, end = (slid[left - 1] if left else 0), slid[left], slid[left + 1]
        if not start < cut < end:
            continue
        after = costs[left + 1]
        last = min(costs[left].reach(start, longest_seconds - load_seconds[left]), end - 1)
        room_after = longest_seconds - load_seconds[left + 1]
        least = after.cumulative_seconds[end] - room_after
        first = max(int(np.searchsorted(after.cumulative_seconds, least)), start + 1)
        places = np.arange(first, last + 1)
        seconds = after.cumulative_seconds[end] - after.cumulative_seconds[places] + after.cold_seconds[places]
        places = places[seconds <= room_after]
        if places.size:
            loss = after.cold_seconds[places]
            slid[left] = int(places[np.lexsort((np.abs(places - cut), loss))[0]])
    return slid


def chop(
    cumulative_seconds: FloatArray,
    shared: IntArray,
    *,
    seconds: float,
    min_jobs: int = 1,
    max_jobs: int | None = None,
    cumulative_bytes: IntArray | None = None,
    max_bytes: int = 0,
) -> list[int]:
    """Ends of pieces of at most `seconds`, each cut at the smallest `shared` in the last half of what it may hold.

    A piece holds `min_jobs` or more even where that takes longer; `max_jobs` and `max_bytes` (a body larger than that
    goes alone) are hard. The last piece takes what is left. Of equal places the last is taken.
    """
    n, start = len(shared), 0
    ends: list[int] = []
    while start < n:
        end = int(np.searchsorted(cumulative_seconds, cumulative_seconds[start] + seconds, side="right")) - 1
        end = max(end, start + min_jobs)
        if max_jobs is not None:
            end = min(end, start + max_jobs)
        if cumulative_bytes is not None:
            most = cumulative_bytes[start] + max_bytes
            end = min(end, int(np.searchsorted(cumulative_bytes, most, side="right")) - 1)
        end = max(end, start + 1)
        if end >= n:
            return [*ends, n]
        half = (cumulative_seconds[start] + cumulative_seconds[end]) / 2
        first = min(max(int(np.searchsorted(cumulative_seconds, half)), start + min_jobs, start + 1), end)
        end -= int(np.argmin(shared[first : end + 1][::-1]))
        ends.append(end)
        start = end
    return ends


def deal(ends: Sequence[int], costs: Sequence[RunCosts], load_seconds: Sequence[float]) -> list[list[int]]:
    """Piece numbers per instance, ascending: longest processing time first, each to who would finish it earliest.

    Graham's rule (1969): the makespan is at most 4/3 of the best, and within a piece of even here.
    """
    starts = [0, *ends[:-1]]
    seconds = np.array([cost.cumulative_seconds[ends] - cost.cumulative_seconds[starts] for cost in costs])
    finish = np.array(load_seconds, dtype=np.float64)
    dealt: list[list[int]] = [[] for _ in costs]
    for piece in np.argsort(-seconds[0], kind="stable").tolist():
        chosen = int(np.argmin(finish + seconds[:, piece]))
        finish[chosen] += seconds[chosen, piece]
        dealt[chosen].append(piece)
    return [sorted(pieces) for pieces in dealt]


def replicated_tokens(pieces: Sequence[int], ends: Sequence[int], shared: IntArray, cached_tokens: IntArray) -> int:
    """Tokens that one instance computes again because it has not the whole sequence but these (ascending) pieces.

    What the first job of a piece finds is what it shares with the end of the piece before it: the least of `shared`
    in between.
    """
    lost, before = 0, None
    for piece in pieces:
        start = ends[piece - 1] if piece else 0
        found = 0
        if before is not None:
            found = int(shared[ends[before] : start + 1].min())
        lost += max(int(cached_tokens[start]) - found, 0)
        before = piece
    return lost
