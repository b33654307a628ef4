"""Policies by name, as the command line and the dispatcher's setting give them."""

from __future__ import annotations

from collections.abc import Callable

from service.core.baselines import Routed, SharedQueue
from service.core.model import PolicyName
from service.core.plan import DEFAULT_LIMITS, Limits
from service.core.policy import Policy
from service.core.routers import Affinity, ByLedger, CacheAware, LeastLoaded, PrefixHash, RoundRobin, Router
from service.core.standing import StandingPlan

_ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "affinity": Affinity,
    "cache_aware": CacheAware,
    "prefix_hash": PrefixHash,
    "ledger": ByLedger,
}
POLICIES = ("prefix", *_ROUTERS, "shared_queue")  # the first is the planner; the others are compared with it


def make_policy(name: str, limits: Limits = DEFAULT_LIMITS, window_jobs: int | None = None) -> Policy:
    """A policy with nothing in it; `window_jobs` is the planner's alone. Raises ValueError for an unknown name."""
    if name == PolicyName.PREFIX:
        return StandingPlan(limits, window_jobs)
    if name == PolicyName.SHARED_QUEUE:
        return SharedQueue(limits)
    if name not in _ROUTERS:
        raise ValueError(f"There is no policy {name!r}; there are {', '.join(POLICIES)}.")
    return Routed(_ROUTERS[name](), limits)
