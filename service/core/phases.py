"""Deadlines: which jobs go first, so that none misses one that first-come-first-served would have met.

Earliest deadline first meets every set of deadlines that any order meets (Jackson 1955; Horn 1974 for servers that
share the work), so the set to protect is what first-come-first-served would meet; the others never push one of it
out. Inside a phase the order is the prefix order, and a phase is as long as its earliest deadline allows: where
deadlines are far off, which is the normal case, there is one phase and the order is nothing but the prefix order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.core.cut import FloatArray
from service.core.prefix import IntArray


def met_first_come(
    *, seconds: FloatArray, deadlines: FloatArray, arrivals: IntArray, now_seconds: float, servers: float
) -> NDArray[np.bool_]:
    """Which deadlines first-come-first-served would meet from now on: bool[n]; true where there is none.

    To be asked once, when jobs come: later, what waits is what our order left, not what that order would have left.
    Arrays are [n], in any order: estimated cost on one instance, deadline (inf for none), place in order of arrival.
    """
    first_come = np.argsort(arrivals, kind="stable")
    finish = np.empty(len(seconds))
    finish[first_come] = now_seconds + np.cumsum(seconds[first_come] / servers)
    return finish <= deadlines


def keep_more(
    *, seconds: FloatArray, due: FloatArray, deadlines: FloatArray, now_seconds: float, servers: float
) -> FloatArray:
    """`due`, with deadlines that were given up and can be met after all: those that push no other past its own.

    Estimates are better later than when jobs came. All of them are tried, then the half that is due last, and so on.
    """
    work = seconds / servers
    before = _finishes(work, due, now_seconds)
    hopeful = np.flatnonzero(np.isinf(due) & np.isfinite(deadlines) & (deadlines > now_seconds))
    while hopeful.size:
        more = due.copy()
        more[hopeful] = deadlines[hopeful]
        after = _finishes(work, more, now_seconds)
        if not np.any((after > more) & ((before <= due) | np.isinf(due))):
            return more
        middle = np.median(deadlines[hopeful])
        hopeful = hopeful[deadlines[hopeful] > middle]
    return due


def _finishes(work: FloatArray, due: FloatArray, now_seconds: float) -> FloatArray:
    """float64[n]: when each ends, the earliest due first."""
    order = np.argsort(due, kind="stable")
    finish = np.empty(len(work))
    finish[order] = now_seconds + np.cumsum(work[order])
    return finish


def split_phases(
    *,
    seconds: FloatArray,
    due: FloatArray,
    groups: IntArray,
    now_seconds: float,
    servers: float,
    slack_seconds: float,
) -> list[IntArray]:
    """Positions in phases that run one after the other; every position once, ascending within a phase.

    All arrays are [n] and in key order: estimated cost of each job on one instance, when it is due (inf for never), the
    number of its prefix group. `servers` is how many instances' worth of work is done per second. `slack_seconds`: how
    much earlier than its deadline a phase should end, and the least it takes.
    """
    n = len(seconds)
    everything: IntArray = np.arange(n, dtype=np.int64)
    work = seconds / servers
    end_seconds = now_seconds + float(work.sum())
    if not n or float(due.min()) >= end_seconds + slack_seconds:
        return [everything]
    group_due = np.full(int(groups.max()) + 1, np.inf)
    np.minimum.at(group_due, groups, due)
    order, ordered_due = _ordered(group_due[groups])
    finish = now_seconds + np.cumsum(work[order])
    boundaries = groups[order]
    if np.any(finish > due[order]):
        order, ordered_due = _ordered(due)
        finish = now_seconds + np.cumsum(work[order])
        boundaries = everything
    ends = _phase_ends(finish, ordered_due, boundaries, now_seconds, slack_seconds)
    return [np.sort(part) for part in np.split(order, ends[:-1])]


def _ordered(due: FloatArray) -> tuple[IntArray, FloatArray]:
    """Positions by due time, of equal ones in key order, and their due times."""
    order = np.argsort(due, kind="stable")
    return order, due[order]


def _phase_ends(
    finish: FloatArray, due: FloatArray, boundaries: IntArray, now_seconds: float, slack_seconds: float
) -> list[int]:
    """Ends of phases: as much as is done before the first of it is due, and no group begun that does not end there."""
    n, start, begun = len(finish), 0, now_seconds
    ends: list[int] = []
    while start < n:
        if not np.isfinite(due[start]):
            return [*ends, n]
        until = max(float(due[start]) - slack_seconds, begun + slack_seconds)
        end = max(int(np.searchsorted(finish, until, side="right")), start + 1)
        if end < n:
            others = np.flatnonzero(boundaries[start:end] != boundaries[end])
            end = start + int(others[-1]) + 1 if others.size else end
        ends.append(end)
        begun = float(finish[end - 1])
        start = end
    return ends
