"""The heartbeat while the database is away and back, and the patience of results meanwhile."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa

from service.errors import FenceLost
from service.ports import free_port
from service.settings import Settings
from service.store.session import Database
from workers.presence import Presence, Pulse, Standing
from workers.runner import patiently


class FakeOwner:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def standing(self) -> Standing | None:
        return Standing(boot_id=1, cohort_ids=frozenset({7}), running_jobs=1, waiting_jobs=0)

    def pulse(self, standing: Standing, pulse: Pulse) -> None:
        self.told.append(pulse)

    def pause(self, is_paused: bool) -> None:
        self.told.append(("pause", is_paused))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Switch(Database):
    """A database that can be taken away: connections then go to a port where nobody listens."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.there = self.engine
        self.away = Database(f"postgresql://nobody@127.0.0.1:{free_port()}/none").engine


def test_after_one_lease_without_renewal_nothing_new_is_fed_until_it_is_back(
    settings: Settings, database_url: str
) -> None:
    database, owner, clock = Switch(database_url), FakeOwner(), Clock()
    presence = Presence(database, settings, owner, clock)
    database.engine = database.away
    clock.now = settings.lease_seconds - 0.1
    presence.step()
    assert owner.told == []
    clock.now = settings.lease_seconds + 0.1
    presence.step()
    presence.step()
    assert owner.told == [("pause", True)]
    database.engine = database.there
    presence.step()
    gone = Pulse(is_boot_alive=False, held=frozenset(), to_abort={})  # boot 1 is not in this database
    assert owner.told == [("pause", True), ("pause", False), gone]
    database.close()


def test_work_waits_for_the_database_and_no_longer_than_its_lease(database: Database) -> None:
    failures = [sa.exc.OperationalError("", None, Exception("down"))]

    def work(conn: sa.Connection) -> int:
        if failures:
            raise failures.pop()
        return int(conn.execute(sa.text("select 1")).scalar_one())

    assert patiently(database, work, threading.Event()) == 1
    lost = threading.Event()
    lost.set()
    with pytest.raises(FenceLost):
        patiently(database, work, lost)
