"""What ran on one boot: tells a prefix that was evicted from one that never was here, or was still being computed.

Times are seconds on one clock of the caller's. The cache is measured by a clock of its own: the tokens that jobs have
written into it. A block that nobody used while more was written than the cache holds may be gone; one that was used
when less than half of that was written cannot be, where nobody else uses the engine.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from service.core.prefix import RUNG_BYTES, rungs_covered, shared_tokens

# Keys of some hundred bytes each, in each of two generations. What is older is evicted in all but the largest caches.
_KEPT_JOBS = 10_000
_NEIGHBOURS = 32  # looked at on either side in key order
_SURE_SHARE = 0.5  # of the capacity: the rest is for what runs, and for what we do not see exactly
_RECENT_SHARE = 0.8


class Neighbour(StrEnum):
    """Where the prefix that a job was to find had been computed."""

    COMPUTED = "computed"  # here, before the job was fed, and too little was written since to evict it
    RECENT = "recent"  # the same, and an eviction is improbable; or nobody knows what the cache holds
    OLD = "old"  # here, before the job was fed; what was written since may well have evicted it
    IN_FLIGHT = "in_flight"  # here, by a job ahead of it that had not ended when it was fed, and not lately by another
    FORMER = "former"  # on an earlier boot of this instance
    NOWHERE = "nowhere"  # not here, as far as is remembered


class _Use(NamedTuple):
    """The end of a job."""

    ended_at: float
    written_tokens: int  # by all jobs until then
    number: int  # in order of arrival


@dataclass(slots=True)
class _Generation:
    """Jobs that ended, by key, and by the prefix that each was predicted to find."""

    keys: list[bytes] = field(default_factory=list)  # sorted, each once
    last: dict[bytes, _Use] = field(default_factory=dict)  # by key
    by_prefix: dict[bytes, list[_Use]] = field(default_factory=lambda: defaultdict(list))
    jobs: int = 0

    def add(self, key: bytes, prefix: bytes, use: _Use) -> None:
        self.jobs += 1
        if key not in self.last:
            bisect.insort(self.keys, key)
        self.last[key] = use
        if prefix:
            bisect.insort(self.by_prefix[prefix], use)

    def alike(self, prefix: bytes, fed_at: float) -> list[_Use]:
        """Of the jobs that were to find the same prefix, the last to end before `fed_at` and the first after it."""
        same = self.by_prefix.get(prefix, [])
        before = bisect.bisect_right(same, fed_at, key=lambda use: use.ended_at)
        return same[max(0, before - 1) : before + 1]

    def near(self, key: bytes, tokens: int) -> Iterator[_Use]:
        """Of jobs next in key order that share `tokens` with the key."""
        return (self.last[other] for other in sharing(self.keys, key, tokens))


class History:
    """Filled and asked by whoever ends jobs. Not safe for threads.

    `capacity_tokens` is what the cache holds (None: nobody knows), `most_running` how many jobs run at once.
    """

    def __init__(
        self, *, capacity_tokens: int | None = None, most_running: int = 1, former_keys: Iterable[bytes] = ()
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._most_running = most_running
        self._former = sorted(set(former_keys))
        self._numbers: dict[int, tuple[bytes, int]] = {}  # job id -> key and number: expected, and not ended
        self._waiting: list[bytes] = []  # their keys, sorted
        self._arrived = 0
        self._old, self._new = _Generation(), _Generation()
        self._written_tokens = 0
        self._ended = 0

    def expect(self, job_id: int, key: bytes) -> None:
        """A job is to run here, behind all that are expected already."""
        self.leave(job_id)
        self._arrived += 1
        self._numbers[job_id] = (key, self._arrived)
        bisect.insort(self._waiting, key)

    def leave(self, job_id: int) -> None:
        """A job does not run here after all. Without effect for one that is not expected."""
        if job_id in self._numbers:
            key, _ = self._numbers.pop(job_id)
            del self._waiting[bisect.bisect_left(self._waiting, key)]

    def end(
        self, job_id: int, key: bytes, tokens: int, *, fed_at: float, ended_at: float, written_tokens: int
    ) -> Neighbour:
        """A job ended that wrote so many tokens of prompt and answer into the cache, where its prompt now is. Where
        its first `tokens` had been computed before."""
        _, number = self._numbers.get(job_id, (key, self._arrived + 1))
        self.leave(job_id)
        found = self._find(key, tokens, fed_at, number) if tokens else Neighbour.NOWHERE
        self._written_tokens += written_tokens
        self._ended += 1
        if self._new.jobs >= _KEPT_JOBS:
            self._old, self._new = self._new, _Generation()
        self._new.add(key, prefix_of(key, tokens), _Use(ended_at, self._written_tokens, number))
        return found

    def _find(self, key: bytes, tokens: int, fed_at: float, number: int) -> Neighbour:
        prefix = prefix_of(key, tokens)
        parts = (self._new, self._old)
        uses = [use for part in parts for use in part.alike(prefix, fed_at)]
        age = self._age(uses, fed_at)
        if age is not Neighbour.COMPUTED:  # the common case needs no more
            uses += [use for part in parts for use in part.near(key, tokens)]
            age = self._age(uses, fed_at)
        if age in (Neighbour.COMPUTED, Neighbour.RECENT):
            return age
        beside = any(use.number < number and use.ended_at > fed_at for use in uses)
        if beside or self._waits_ahead(key, tokens, number):
            return Neighbour.IN_FLIGHT
        if age is not None:
            return age
        return Neighbour.FORMER if any(sharing(self._former, key, tokens)) else Neighbour.NOWHERE

    def _waits_ahead(self, key: bytes, tokens: int, number: int) -> bool:
        """Whether a job expected before this one shares its prefix and has not ended. Asked for a few jobs only."""
        if not any(sharing(self._waiting, key, tokens)):
            return False
        return any(
            earlier < number and shared_tokens(key, other) >= tokens for other, earlier in self._numbers.values()
        )

    def _age(self, uses: Iterable[_Use], fed_at: float) -> Neighbour | None:
        """Of what was last used before `fed_at`; None where nothing was. What runs now is counted as the mean of what
        has ended."""
        last = max((use.written_tokens for use in uses if use.ended_at <= fed_at), default=None)
        if last is None:
            return None
        if self._capacity_tokens is None:
            return Neighbour.RECENT
        running = min(len(self._waiting), self._most_running)
        since = self._written_tokens - last + running * self._written_tokens / max(self._ended, 1)
        if since <= self._capacity_tokens * _SURE_SHARE:
            return Neighbour.COMPUTED
        return Neighbour.RECENT if since <= self._capacity_tokens * _RECENT_SHARE else Neighbour.OLD


def prefix_of(key: bytes, tokens: int) -> bytes:
    """The part of a key that stands for its first `tokens`, rounded down to a rung; empty for none."""
    return key[: RUNG_BYTES * rungs_covered(tokens)]


def sharing(keys: list[bytes], key: bytes, tokens: int) -> Iterator[bytes]:
    """Of sorted keys those next to `key` that share at least `tokens` with it, some on either side."""
    index = bisect.bisect_left(keys, key)
    for place in range(index, min(index + _NEIGHBOURS, len(keys))):
        if shared_tokens(key, keys[place]) < tokens:
            break
        yield keys[place]
    for place in range(index - 1, max(index - 1 - _NEIGHBOURS, -1), -1):
        if shared_tokens(key, keys[place]) < tokens:
            break
        yield keys[place]
