"""The cohorts that run in this worker now: who asks, who loses, who waits for the last one."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from workers.runner import CohortRun

_LOOK_SECONDS = 0.1


class Turnstile:
    """Lets threads through one at a time, in the order in which they came (a Lock wakes whom it likes).

    Cohorts are claimed, loaded and fed in the order of their messages, which is the planned order: a later one that
    overtook an earlier would break up its prefix group at the engine.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next_ticket = 0
        self._serving = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._changed.wait_for(lambda: self._serving == ticket)
        try:
            yield
        finally:
            with self._changed:
                self._serving += 1
                self._changed.notify_all()


class Runs:
    """A thread-safe register. A thread counts as busy from before its claim, so that none is overlooked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0
        self._runs: dict[int, CohortRun] = {}

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    @contextmanager
    def registered(self, run: CohortRun) -> Iterator[None]:
        with self._changed:
            former = self._runs.get(run.claim.cohort_id)
            self._runs[run.claim.cohort_id] = run
        try:
            if former is not None:  # claimed anew before the old run learned that its lease was lost
                former.lose()
            yield
        finally:
            with self._changed:
                if self._runs.get(run.claim.cohort_id) is run:  # else a newer claim runs here
                    del self._runs[run.claim.cohort_id]

    def ids(self) -> frozenset[int]:
        with self._changed:
            return frozenset(self._runs)

    def lose(self, cohort_ids: Collection[int]) -> None:
        """Their fence is lost: each drops what it has."""
        with self._changed:
            lost = [run for cohort_id, run in self._runs.items() if cohort_id in cohort_ids]
        for run in lost:
            run.lose()

    def wait_idle(self, seconds: float, hurry: threading.Event | None = None) -> bool:
        """Wait until no thread is busy; False when the time is up, or `hurry` is set, before that."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._busy:
                if time.monotonic() >= deadline or (hurry is not None and hurry.is_set()):
                    return False
                self._changed.wait(_LOOK_SECONDS)
            return True
