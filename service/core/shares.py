"""Who is next: tenants share the fleet by weight, a cohort at a time.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each flow has a virtual time that grows by work / weight when it is
served, the flow with the least goes next, and one that was idle starts where the others are, so that nobody saves up.
"""

from __future__ import annotations


class Shares:
    """Virtual times of the flows that have work. A flow's work is in seconds of one instance."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self._virtual: dict[int, float] = {}  # of active flows only
        self._left: dict[int, float] = {}  # of flows that retired ahead of the others
        self._now = 0.0  # virtual time of the flow that was served last
        self._total: float | None = None  # weight of the active flows, once asked for

    def set_weight(self, flow: int, weight: float) -> None:
        """Raises ValueError for a weight that is not above 0."""
        if not weight > 0:
            raise ValueError(f"a weight must be above 0, not {weight}")
        self._weights[flow] = weight
        self._total = None

    def weight(self, flow: int) -> float:
        """1 where never set."""
        return self._weights.get(flow, 1.0)

    def share(self, flow: int) -> float:
        """The part of the fleet that is due to a flow, active or not, beside the flows that are active now."""
        if self._total is None:
            self._total = sum(map(self.weight, self._virtual))
        mine = self.weight(flow)
        return mine / (self._total if flow in self._virtual else self._total + mine)

    def activate(self, flow: int) -> None:
        """The flow has work. Without effect while it is active."""
        if flow not in self._virtual:
            self._virtual[flow] = max(self._now, self._left.pop(flow, 0.0))
            self._total = None

    def retire(self, flow: int) -> None:
        """The flow has no work left. Idempotent."""
        left = self._virtual.pop(flow, 0.0)
        self._total = None
        if left > self._now:
            self._left[flow] = left
        self._left = {other: at for other, at in self._left.items() if at > self._now}

    def is_active(self, flow: int) -> bool:
        """Whether the flow has work."""
        return flow in self._virtual

    def order(self) -> list[int]:
        """Active flows, the one to serve first in front; of equal ones the lower number."""
        return sorted(self._virtual, key=lambda flow: (self._virtual[flow], flow))

    def lead(self, flow: int, other: int) -> float:
        """Virtual seconds by which an active flow is ahead of another."""
        return self._virtual[flow] - self._virtual[other]

    def charge(self, flow: int, seconds: float) -> None:
        """So much of the flow's work was taken."""
        self._now = max(self._now, self._virtual[flow])
        self._virtual[flow] += seconds / self.weight(flow)
