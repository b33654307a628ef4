"""The steal: what an instance that runs dry takes from another, and where a cohort is halved near the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core.cut import FloatArray
from service.core.prefix import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """Work planned on one instance. Only cohorts that no worker has claimed can be stolen; the last one first."""

    seconds_left: float  # of all its cohorts, running ones too
    stealable_cohorts: int
    tail_seconds: float = 0.0  # of the last of them
    tail_jobs: int = 0
    tail_cold_seconds: float = 0.0  # more than at home, where the thief's cache lacks what the tail shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Steal:
    """Take the tail cohort of `victim` (an index), or the second half of it."""

    victim: int
    halve: bool


def steal_from(loads: Sequence[InstanceLoad], thief: int) -> Steal | None:
    """What the instance at index `thief`, about to run dry, should take; None where nothing would end sooner.

    The tail of the instance with most work left: its head shares a prefix with what that instance runs. The whole
    cohort if the thief then ends no later than the victim would, else half of it. Ties go to the lower index.
    """
    victims = [
        number for number, load in enumerate(loads) if number != thief and load.stealable_cohorts and load.tail_jobs
    ]
    if not victims:
        return None
    victim = max(victims, key=lambda number: (loads[number].seconds_left, -number))
    left, tail = loads[victim].seconds_left, loads[victim].tail_seconds
    mine = loads[thief].seconds_left + loads[victim].tail_cold_seconds
    if mine + tail <= left - tail:
        return Steal(victim=victim, halve=False)
    if loads[victim].tail_jobs > 1 and mine + tail / 2 < left:
        return Steal(victim=victim, halve=True)
    return Steal(victim=victim, halve=False) if mine + tail < left else None


def halve(seconds: FloatArray, shared_tokens: IntArray) -> int:
    """Where to halve a cohort of two jobs or more: the index of the first job of the second half.

    `seconds` is each job's cost, `shared_tokens` what it shares with the job before it. The cut falls where least is
    shared between a third and two thirds of the work, nearest to the middle among equals.
    """
    n = len(seconds)
    if n < 2:
        raise ValueError("a cohort of fewer than two jobs cannot be halved")
    before = np.cumsum(seconds) - seconds  # work ahead of each job
    total = float(seconds.sum())
    places = np.arange(1, n)
    off_centre = np.abs(before[1:] - total / 2)
    central = places[off_centre <= max(total / 6, float(off_centre.min()))]
    chosen = np.lexsort((off_centre[central - 1], shared_tokens[central]))[0]
    return int(central[chosen])
