"""One life of an instance: its boot row, its engine, its feeder, and the watch over its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from workers.engines.base import Engine, EngineFacts
from workers.feeder import Feeder
from workers.watch import Watch

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From a ready engine to its death, its drain, or the loss of its boot row."""

    boot_id: int
    engine: Engine
    facts: EngineFacts
    key_agrees: bool | None  # the canaries' word at the engine's start
    feeder: Feeder
    loop: asyncio.AbstractEventLoop
    watch: Watch

    def call(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the event loop do it, in the order of the calls; from any thread."""
        self.loop.call_soon_threadsafe(lambda: work(*args, **kwargs))
