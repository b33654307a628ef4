"""How online routers choose an instance for one job: the rules that the planner is compared with.

Each is written after the source that it names, with that source's defaults. A router sees jobs one by one in order of
arrival, what every instance has been given and has not finished, and what it remembers; never what is yet to come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from service.core.ledger import BootView, Ledger
from service.core.plan import InstanceView
from service.core.prefix import RUNG_BYTES, rungs_covered


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A job, and (once an instance is chosen for it) what it should find and cost there."""

    job_id: int
    owner: int
    key: bytes
    prompt_tokens: int
    output_tokens: int  # predicted
    body_bytes: int
    priority: int = 0  # the higher the sooner
    cached_tokens: int = 0
    seconds: float = 0.0

    def place(self, view: InstanceView, cached_tokens: int) -> None:
        """The job is the instance's, which should serve so many of its tokens from cache."""
        self.cached_tokens = cached_tokens
        prefill = (self.prompt_tokens - cached_tokens) / view.rates.prefill_tokens_per_second
        decode = self.output_tokens / view.rates.decode_tokens_per_second
        # An engine refuses a prompt beyond its cache, and that takes no time.
        self.seconds = prefill + decode if self.prompt_tokens <= view.kv_capacity_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class Fleet:
    """The instances as a router sees them; lists are [instances]. Loads are of jobs that are given and not finished."""

    views: Sequence[InstanceView] = ()
    boots: Sequence[int] = ()  # a number for each life of an instance, never used again
    jobs: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)  # what was given to each boot, in an LRU of its capacity

    def cached_tokens(self, job: Waiting, number: int) -> int:
        """What the instance should serve of the job from cache."""
        block_size = self.views[number].block_size
        return self.ledger.predict(self.boots[number], job.key, job.prompt_tokens, block_size)

    def least_busy(self, among: Sequence[int] | None = None) -> int:
        """The instance with the fewest jobs, of all or of some; the first of equals."""
        return min(range(len(self.views)) if among is None else among, key=self.jobs.__getitem__)


class Router(Protocol):
    """Chooses an instance for each job. May remember what it chose: the job is the chosen instance's."""

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        """The index of an instance; there is one at least."""


class RoundRobin:
    """Each instance in its turn: nginx's default (`ngx_http_upstream_module`), which knows neither load nor cache."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        chosen = self._turn % len(fleet.views)
        self._turn = chosen + 1
        return chosen


class LeastLoaded:
    """The least work outstanding: `least_load` of SGLang's gateway (sgl-model-gateway/src/policies/least_load.rs).

    There a request weighs as much as its text is long; here, what its instance should take for it.
    """

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        return min(range(len(fleet.views)), key=fleet.seconds.__getitem__)


@dataclass(slots=True, kw_only=True)
class Affinity:
    """The longest match, among instances whose load is at most `slack` x the mean + the biggest job.

    The strongest of the online rules here, after Preble's E2 (Srivatsa et al., ICLR 2025), which goes where the match
    is unless that instance has too much work, and llm-d's prefix scorer, which keeps an LRU of what each instance was
    sent, of the size of its cache. Of equal matches the one with the least work.
    """

    slack: float = 1.05
    biggest_seconds: float = 0.0  # of the jobs so far, nothing cached

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        alone = [job.prompt_tokens / view.rates.prefill_tokens_per_second for view in fleet.views]
        decode = [job.output_tokens / view.rates.decode_tokens_per_second for view in fleet.views]
        self.biggest_seconds = max(self.biggest_seconds, *map(sum, zip(alone, decode, strict=True)))
        most = self.slack * sum(fleet.seconds) / len(fleet.seconds) + self.biggest_seconds
        allowed = [number for number, seconds in enumerate(fleet.seconds) if seconds <= most]
        return max(allowed, key=lambda number: (fleet.cached_tokens(job, number), -fleet.seconds[number]))


@dataclass(slots=True, kw_only=True)
class CacheAware:
    """SGLang's `cache_aware` with its defaults (sgl-model-gateway/src/policies/cache_aware.rs, also in vllm-router).

    Where loads (requests outstanding) are apart by more than `balance_abs` and by `balance_rel`, the shortest queue.
    Else the instance that was sent the longest match, if that is more than `match` of the prompt, and else again the
    shortest queue (earlier versions: the smallest tree). It does not know how much an engine's cache holds: its tree
    is cut back at `tree_tokens` an instance, which stands for the default of 2**26 characters.
    """

    match: float = 0.5
    balance_abs: int = 32
    balance_rel: float = 1.1
    tree_tokens: int = 2**24
    sent: Ledger = field(default_factory=Ledger)

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        least, most = min(fleet.jobs), max(fleet.jobs)
        chosen = fleet.least_busy()
        if not (most - least > self.balance_abs and most > self.balance_rel * least):
            # Block 1: it matches text, of which the last character may match too.
            matches = [self.sent.predict(boot, job.key, job.prompt_tokens + 1, 1) for boot in fleet.boots]
            longest = max(matches)
            if longest > self.match * job.prompt_tokens:
                chosen = matches.index(longest)
        boot = fleet.boots[chosen]
        self.sent.open(boot, self.tree_tokens)
        self.sent.record(boot, job.key, job.prompt_tokens)
        return chosen


_RING_PLACES = 150  # of each instance, as in SGLang's HashRing


@dataclass(slots=True, kw_only=True)
class PrefixHash:
    """Consistent hashing of the first `prefix_length` tokens with bounded loads.

    After SGLang's `prefix_hash` (sgl-model-gateway/src/policies/prefix_hash.rs): the instance that follows the hash
    on a ring, unless it has more requests outstanding than `load_factor` x the mean with the new one; then the
    shortest queue. The bound is Mirrokni, Thorup and Zadimoghaddam's (Consistent Hashing with Bounded Loads, 2018).
    With `concurrency_threshold` the bound is instead that many requests, as in SageMaker's prefix-aware routing
    (PrefixAwareRoutingConfig). A prompt below one rung has no prefix to hash, and goes to the shortest queue.
    """

    prefix_length: int = 256  # tokens
    load_factor: float = 1.25
    concurrency_threshold: int | None = None
    ring: list[tuple[bytes, int]] = field(default_factory=list)  # (hash, instance)
    ring_of: tuple[str, ...] = ()

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        prefix = job.key[: RUNG_BYTES * rungs_covered(self.prefix_length)]
        if not prefix:
            return fleet.least_busy()
        self._renew(tuple(view.queue for view in fleet.views))
        place = bisect_left(self.ring, (_hash(prefix), 0))
        chosen = self.ring[place % len(self.ring)][1]
        if self.concurrency_threshold is None:
            bound = self.load_factor * (sum(fleet.jobs) + 1) / len(fleet.jobs)
            return chosen if fleet.jobs[chosen] <= bound else fleet.least_busy()
        return chosen if fleet.jobs[chosen] < self.concurrency_threshold else fleet.least_busy()

    def _renew(self, queues: tuple[str, ...]) -> None:
        """Instances stay where their names put them, so that few prefixes move when one comes or goes."""
        if queues == self.ring_of:
            return
        self.ring_of = queues
        places = range(_RING_PLACES)
        self.ring = sorted(
            (_hash(f"{name}#{n}".encode()), number) for number, name in enumerate(queues) for n in places
        )


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


class ByLedger:
    """Our own rule for jobs that arrive one by one: `Ledger.choose`, uncached prefill weighed with work ahead."""

    def choose(self, job: Waiting, fleet: Fleet) -> int:
        boots = [
            BootView(boot_id=boot, block_size=view.block_size, rates=view.rates, load_seconds=seconds)
            for boot, view, seconds in zip(fleet.boots, fleet.views, fleet.seconds, strict=True)
        ]
        choice = fleet.ledger.choose(job.key, job.prompt_tokens, boots, job.output_tokens)
        assert choice is not None  # there is an instance
        return fleet.boots.index(choice.boot_id)
