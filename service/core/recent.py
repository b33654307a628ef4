"""What the instances' caches should hold of the jobs taken last: for late arrivals, whose group may have run just now.

The ledger keeps the same for jobs that come one by one, rung by rung; this is for the plan, where every job of a
backlog passes, and costs a few microseconds a job.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.core.prefix import IntArray, cacheable_tokens, shared_tokens

# Python keeps objects of up to 512 bytes side by side in pages that it frees as a whole: a few thousand keys would hold
# on to the memory of the whole backlog's. What is put behind a key is no rung that it could share with another.
_LEAST_KEY_BYTES = 512
_FILLING = b"\xff"
_LOOK_AROUND = 256  # keys on either side: other instances' may lie between
_MOST_KEYS = 1024  # of an instance: half a megabyte at 100 rungs, however small the jobs


class Recent:
    """Keys in order of taking per instance, bounded by its cache, and all of them in key order."""

    def __init__(self, n_instances: int) -> None:
        self._taken: list[deque[tuple[bytes, int, int]]] = [deque() for _ in range(n_instances)]  # key, serial, tokens
        self._tokens = [0] * n_instances
        self._sorted: list[tuple[bytes, int, int]] = []  # key, serial, instance
        self._serials = 0

    def add(self, instance: int, key: bytes, new_tokens: int, kv_capacity_tokens: int) -> None:
        """A job was taken that needs `new_tokens` of the cache beyond what it shares. The oldest keys that the cache
        then has no room for are forgotten."""
        self._serials += 1
        key = key.ljust(_LEAST_KEY_BYTES, _FILLING)
        insort(self._sorted, (key, self._serials, instance))
        self._taken[instance].append((key, self._serials, new_tokens))
        self._tokens[instance] += new_tokens
        while self._tokens[instance] > kv_capacity_tokens or len(self._taken[instance]) > _MOST_KEYS:
            self._forget_oldest(instance)

    def longest_match(self, key: bytes) -> tuple[int, int]:
        """Tokens that `key` shares with a job taken, the most there are, and the instance of that; (0, -1) for none."""
        at = bisect_left(self._sorted, (key.ljust(_LEAST_KEY_BYTES, _FILLING), 0, 0))
        around = self._sorted[max(at - 1, 0) : at + 1]
        best = max(((shared_tokens(held, key), instance) for held, _, instance in around), default=(0, -1))
        return best if best[0] else (0, -1)

    def best_on(self, instance: int, key: bytes) -> bytes | None:
        """The key that shares most with `key` of those taken for one instance; None where none is near in key order."""
        at = bisect_left(self._sorted, (key.ljust(_LEAST_KEY_BYTES, _FILLING), 0, 0))
        below = reversed(self._sorted[max(at - _LOOK_AROUND, 0) : at])
        above = self._sorted[at : at + _LOOK_AROUND]
        near = [next((held for held, _, owner in side if owner == instance), None) for side in (below, above)]
        return max((held for held in near if held is not None), key=lambda held: shared_tokens(held, key), default=None)

    def recall(
        self,
        instance: int,
        keys: Sequence[bytes],
        prompt_tokens: IntArray,
        cached_tokens: IntArray,
        begins_group: NDArray[np.bool_],
        block_size: int,
    ) -> None:
        """Raise `cached_tokens` (int64[n], of a run for one instance in execution order) where a group begins, but for
        the first job, to what the instance holds of the group from before."""
        for place in (np.flatnonzero(begins_group[1:]) + 1).tolist() if self._taken[instance] else ():
            held = self.best_on(instance, keys[place])
            if held is not None:
                found = cacheable_tokens(shared_tokens(held, keys[place]), int(prompt_tokens[place]), block_size)
                cached_tokens[place] = max(int(cached_tokens[place]), found)

    def change_fleet(self, origins: Sequence[int | None]) -> None:
        """For each instance now its index before, None for one whose cache is empty."""
        before = self._taken
        self._taken = [deque() if origin is None else before[origin] for origin in origins]
        self._tokens = [sum(tokens for _, _, tokens in taken) for taken in self._taken]
        self._sorted = sorted(
            (key, serial, instance) for instance, taken in enumerate(self._taken) for key, serial, _ in taken
        )

    def _forget_oldest(self, instance: int) -> None:
        key, serial, tokens = self._taken[instance].popleft()
        self._tokens[instance] -= tokens
        del self._sorted[bisect_left(self._sorted, (key, serial, instance))]
