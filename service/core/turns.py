"""Whose turn it is on which instance: tenants share the fleet by weight, by whole instances first, else by time.

An instance belongs to one tenant as long as that has work and is not served beyond its share: changing tenants at
every cohort would mix their jobs in one engine, where the prefill of one slows the decoding of the other. So a tenant
with few jobs beside a flood runs them on its share of the instances as if it were alone. Where there are more tenants
than instances, or shares are no whole instances, virtual time (`shares`) says when an instance changes hands.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from service.core.shares import Shares

_HOLD_FACTOR = 2.0  # on the estimate of what is out: so long an instance is kept free for the last jobs of a tenant ...
_SHORTEST_HOLD_SECONDS, _LONGEST_HOLD_SECONDS = 20.0, 120.0  # ... since an answer takes long however little is out
_FEW_JOBS = 0  # of a tenant left on an instance: it is free again


class Turns:
    """Owners of instances (by index), and what is out of whom. Times are the driver's."""

    def __init__(self, shares: Shares, patience_seconds: float) -> None:
        """`patience_seconds`: work by which a tenant may be ahead of another before it gives an instance up."""
        self._shares = shares
        self._patience_seconds = patience_seconds
        self._owners: list[int | None] = []
        self._out: list[deque[tuple[int, int]]] = []  # by instance: (flow, jobs) of what was taken, the oldest first
        self._hold_until: list[float] = []

    def change_fleet(self, origins: Sequence[int | None]) -> None:
        """For each instance now, its index before, None for a new one."""
        self._owners = [None if origin is None else self._owners[origin] for origin in origins]
        self._out = [deque() if origin is None else self._out[origin] for origin in origins]
        self._hold_until = [-math.inf if origin is None else self._hold_until[origin] for origin in origins]

    def set_out(self, jobs: Sequence[int]) -> None:
        """How many jobs are unfinished at each instance: the ones that were taken last."""
        for out, left in zip(self._out, jobs, strict=True):
            known = sum(n for _, n in out)
            while out and known - out[0][1] >= left:
                known -= out.popleft()[1]
            if out and known > left:
                flow, n = out.popleft()
                out.appendleft((flow, n - (known - left)))

    def owner(self, instance: int) -> int | None:
        """The flow that an instance belongs to; None for one that has done nothing yet."""
        return self._owners[instance]

    def candidates(self, instance: int, now_seconds: float) -> list[int]:
        """Flows in the order in which they may have the instance; empty while it is held for what is out there."""
        order = self._shares.order()
        owner = self._owners[instance]
        if owner is None:
            return self._wanting(order)
        if owner not in order:
            return [] if self.is_held(instance, now_seconds) else self._wanting(order)
        successor = self._successor(instance, owner, order)
        first = owner if successor is None else successor
        return [first, *(flow for flow in order if flow != first)]

    def claim(self, flow: int, wanted: int) -> list[int]:
        """The instances of a flow, after it was given as many as it is due: `wanted` if that is to be had, then those
        of nobody, then of those who have more than they are due, where least is out."""
        mine = [number for number, owner in enumerate(self._owners) if owner == flow]
        owned = Counter(self._owners)
        jobs_out = [sum(n for _, n in out) for out in self._out]
        others = [number for number, owner in enumerate(self._owners) if owner != flow]
        for number in sorted(others, key=lambda n: (n != wanted, self._owners[n] is not None, jobs_out[n])):
            owner = self._owners[number]
            if len(mine) >= self._due(flow):
                break
            if owner is None or not self._shares.is_active(owner) or owned[owner] > self._due(owner):
                owned[owner] -= 1
                self._owners[number] = flow
                mine.append(number)
        return mine

    def took(self, instance: int, flow: int, jobs: int, out_seconds: float, now_seconds: float) -> None:
        """A cohort of a flow was taken; `out_seconds` of estimated work are now unfinished at the instance."""
        self._owners[instance] = flow
        self._out[instance].append((flow, jobs))
        hold_seconds = min(max(_HOLD_FACTOR * out_seconds, _SHORTEST_HOLD_SECONDS), _LONGEST_HOLD_SECONDS)
        self._hold_until[instance] = now_seconds + hold_seconds

    def _wanting(self, order: Sequence[int]) -> list[int]:
        """Those first who have fewer instances than their share."""
        owned = Counter(self._owners)
        return sorted(order, key=lambda flow: owned[flow] >= self._due(flow))

    def _due(self, flow: int) -> int:
        """Whole instances that are due to a flow: one at least."""
        return max(1, math.floor(self._exact(flow)))

    def _exact(self, flow: int) -> float:
        """Instances that are due to a flow, parts of one too; what rounding took from a whole one is given back."""
        return round(self._shares.share(flow) * len(self._owners), 9)

    def _successor(self, instance: int, owner: int, order: Sequence[int]) -> int | None:
        """Who takes an instance over from an owner that still has work; None where it stays."""
        owned = Counter(other for other in self._owners if other in order)
        has_spare = owned[owner] > self._due(owner)
        is_crowded = owned.total() == len(self._owners)
        for flow in order:  # the one that is furthest behind first
            if flow == owner:
                return None
            behind_seconds = self._shares.lead(owner, flow) * self._shares.weight(flow)
            is_behind = behind_seconds > self._patience_seconds
            if has_spare and (is_behind or owned[flow] < self._due(flow)):
                return flow
            is_short = owned[owner] > self._exact(owner) and owned[flow] < self._exact(flow)
            if is_crowded and is_behind and (is_short or not owned[flow]):
                return flow
        return None

    def is_held(self, instance: int, now_seconds: float) -> bool:
        """The owner, entitled to whole instances, has nothing left to take here, but jobs that others would slow down:
        the instance waits for them, a while."""
        owner = self._owners[instance]
        if owner is None or now_seconds >= self._hold_until[instance]:
            return False
        if self._exact(owner) < 1:
            return False
        return sum(n for flow, n in self._out[instance] if flow == owner) > _FEW_JOBS
