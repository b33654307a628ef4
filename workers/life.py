"""One life of an instance: its boot row, its engine, its feeder, and what ran on it."""

from __future__ import annotations

import asyncio
import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec

from service.core.prefix import shared_tokens
from workers.engines.base import Engine, EngineFacts
from workers.feeder import Feeder

P = ParamSpec("P")

# Keys of some hundred bytes each. Beyond this the memory starts anew, and a miss may be called unknown for a while.
_REMEMBERED_KEYS = 20_000


class Memory:
    """The prefix keys of jobs that ran on this boot: tells an eviction from a job whose neighbour never was here."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._lock = threading.Lock()

    def remember(self, key: bytes) -> None:
        with self._lock:
            if len(self._keys) >= _REMEMBERED_KEYS:
                self._keys.clear()
            index = bisect.bisect_left(self._keys, key)
            if index == len(self._keys) or self._keys[index] != key:
                self._keys.insert(index, key)

    def holds(self, key: bytes, tokens: int) -> bool:
        """Whether a job that shares at least `tokens` ran here. In sorted order the best match is a neighbour."""
        with self._lock:
            index = bisect.bisect_left(self._keys, key)
            return any(shared_tokens(key, other) >= tokens for other in self._keys[max(0, index - 1) : index + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From a ready engine to its death, its drain, or the loss of its boot row."""

    boot_id: int
    engine: Engine
    facts: EngineFacts
    key_agrees: bool | None
    feeder: Feeder
    loop: asyncio.AbstractEventLoop
    memory: Memory = field(default_factory=Memory)

    def call(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the event loop do it, in the order of the calls; from any thread."""
        self.loop.call_soon_threadsafe(lambda: work(*args, **kwargs))
