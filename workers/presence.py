"""The heartbeat of a worker: says that its boot lives, sounds its alarm, renews its leases, and learns what is
to be aborted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import sqlalchemy as sa

from service.core.alarm import Mismatch
from service.core.model import Outcome
from service.settings import Settings
from service.store import cohorts, instances
from service.store.session import DATABASE_AWAY, Database, first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a worker has at this moment."""

    boot_id: int
    cohort_ids: frozenset[int]
    running_jobs: int
    waiting_jobs: int
    mismatch: Mismatch | None = None  # the alarm: what its results prove of its engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What the database answered to one heartbeat."""

    is_boot_alive: bool
    held: frozenset[int]  # of the cohorts asked for
    to_abort: Mapping[int, Outcome]


class Owner(Protocol):
    """Who has a heartbeat."""

    def standing(self) -> Standing | None:
        """None between two boots."""

    def pulse(self, standing: Standing, pulse: Pulse) -> None:
        """Do what the answer asks for."""

    def pause(self, is_paused: bool) -> None:
        """Feed nothing new, or go on: our leases may be lost."""


def beat(conn: sa.Connection, standing: Standing, lease_seconds: float) -> Pulse:
    """One heartbeat, in one transaction."""
    is_alive = instances.heartbeat(
        conn, standing.boot_id, standing.running_jobs, standing.waiting_jobs, alarm=standing.mismatch
    )
    if not is_alive:
        return Pulse(is_boot_alive=False, held=frozenset(), to_abort={})
    held: set[int] = set()
    if standing.cohort_ids:
        held = cohorts.renew(conn, standing.boot_id, lease_seconds, standing.cohort_ids)
    to_abort = cohorts.jobs_to_abort(conn, standing.boot_id) if held else {}
    return Pulse(is_boot_alive=True, held=frozenset(held), to_abort=to_abort)


class Presence:
    """The heartbeat's thread. The database away is no reason to end: the engine goes on, the fence decides."""

    def __init__(
        self, database: Database, settings: Settings, owner: Owner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._lease_seconds = settings.lease_seconds
        self._owner = owner
        self._stop = threading.Event()
        self._clock = clock
        self._last_beat = clock()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            try:
                self.step()
            except Exception:  # without its heartbeat a worker loses all it runs
                log.exception("a heartbeat failed")

    def step(self) -> None:
        """One heartbeat and what follows from it."""
        standing = self._owner.standing()
        if standing is None:
            self._last_beat = self._clock()
            return
        try:
            pulse = self._database.run(lambda conn: beat(conn, standing, self._lease_seconds))
        except DATABASE_AWAY as error:
            self._missed(error)
            return
        self._last_beat = self._clock()
        if self._is_away:
            log.warning("the database is back")
            self._is_away = False
            self._owner.pause(False)
        self._owner.pulse(standing, pulse)

    def _missed(self, error: BaseException) -> None:
        silent_seconds = self._clock() - self._last_beat
        if not self._is_away and silent_seconds > self._lease_seconds:
            log.warning("nothing new is fed: no lease renewed for %.0f s %s", silent_seconds, first_line(error))
            self._is_away = True
            self._owner.pause(True)
