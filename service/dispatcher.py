"""Plans the backlog over the ready instances, keeps each a little ahead of its engine, and publishes the hints.

One dispatcher leads (a session advisory lock, for efficiency only); correctness never depends on there being one:
every move is guarded in its own statement.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial

import psycopg
import sqlalchemy as sa

from service import reaper, rebalance
from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.connections import find_connections
from service.core.ledger import Ledger
from service.core.plan import Limits, PlanError
from service.core.policies import make_policy
from service.corrections import CorrectionFeed
from service.errors import BrokerUnreachable
from service.feeding import Feeding
from service.leader import Leader
from service.live_backlog import LiveBacklog
from service.migrate import check_schema
from service.planner_input import FleetLoad, bulk_room, kv_tokens, singles_room
from service.rate_keeper import RateKeeper
from service.settings import Settings
from service.singles_lane import SinglesLane
from service.store import backlog, dispatching, instances, pauses
from service.store.dispatching import Edge, Message
from service.store.instances import Boot
from service.store.session import DATABASE_AWAY, Database, first_line

log = logging.getLogger(__name__)


class Dispatcher:
    """One pass at a time over the tables. Keeps in memory what a successor reads again: the bulk backlog with its plan,
    and the ledger of what the instances' caches hold."""

    def __init__(self, settings: Settings, database: Database, publisher: Publisher) -> None:
        self._settings = settings
        self._database = database
        self._publisher = publisher
        self._ledger = Ledger()  # used under the lane's lock
        self.lane = SinglesLane(database, self.publish, self._ledger)
        self._known_boots: frozenset[int] = frozenset()
        self._rates = RateKeeper()
        self._corrections = CorrectionFeed()
        limits = Limits(cohort_jobs=settings.cohort_jobs)
        self._live = LiveBacklog(partial(make_policy, settings.plan_policy, limits), settings.plan_window_jobs)
        self._feeding = Feeding(database, self._live)
        self.has_more = False  # there is backlog to read: the next pass need not wait

    def step(self) -> int:
        """Read, plan, move and publish once. Returns how many cohorts were published.

        Single jobs first, in transactions of their own: nobody waits for the planning of a backlog.
        """
        with self._database.transaction() as conn:
            boots = instances.ready_boots(conn, self._settings.stale_boot_seconds)
        models = sorted({boot.model for boot in boots})
        self._learn(boots)
        self._database.run(self._isolate_suspects)
        self.lane.set_boots(boots)
        published = self.lane.step() + self._dispatch_all(boots, interactive=True)
        self._database.run(lambda conn: rebalance.rescue_orphans(conn, boots))
        self._feed(models, boots)
        return published + self._dispatch_all(boots, interactive=False)

    def _feed(self, models: Sequence[str], boots: Sequence[Boot]) -> None:
        """Bulk work for all who have room, out of the backlog or from each other."""
        now = time.monotonic()
        self.has_more = self._live.sync(self._database, models, now)
        fleet = FleetLoad(boots=list(boots), loads=self._database.run(dispatching.queue_loads))
        thieves: set[int] = set()
        for model in models:
            try:
                thieves |= self._feeding.feed(model, fleet, now)
            except (PlanError, LookupError, ValueError, ArithmeticError):  # a fault of ours stops no other model
                log.exception("model=%s cannot be planned; its backlog is read anew", model)
                self._live.reset(model)
        if thieves:
            self._database.run(lambda conn: rebalance.steal(conn, boots, thieves))

    def _dispatch_all(self, boots: Sequence[Boot], *, interactive: bool) -> int:
        loads = self._database.run(dispatching.queue_loads)
        messages = [message for boot in boots for message in self._dispatch(boot, loads, interactive)]
        self.publish(messages)
        return len(messages)

    def publish(self, messages: Iterable[Message]) -> None:
        """Send hints. A broker that is down is said once per pass; the sweep sends again what nobody claimed."""
        for message in messages:
            try:
                self._publisher.cohort(message.queue, message.cohort_id, message.dispatch_no)
            except BrokerUnreachable as error:
                log.warning("cohort=%d not published: %s", message.cohort_id, error)
                return

    def _learn(self, boots: Sequence[Boot]) -> None:
        """What the boots finished says how fast they are, and where the ledger is wrong about their caches. A boot that
        is gone took its cache with it."""
        self._rates.refit_due(self._database, boots, time.monotonic())
        now = frozenset(boot.id for boot in boots)
        corrections = self._database.run(lambda conn: self._corrections.next(conn, now))
        with self.lane.lock:
            for boot_id in self._known_boots - now:
                self._ledger.forget(boot_id)
            self._known_boots = now
            for boot in boots:
                self._ledger.open(boot.id, kv_tokens(boot))
            for item in corrections:
                self._ledger.correct(item.boot_id, item.key, item.measured_cached_tokens, item.prompt_tokens)

    def _isolate_suspects(self, conn: sa.Connection) -> None:
        for suspect in backlog.suspects(conn, limit=50):
            count = backlog.isolate(conn, suspect)
            log.warning("cohort=%d failed twice: its %d open jobs run alone", suspect.cohort_id, count)

    def _dispatch(self, boot: Boot, loads: list[dispatching.QueueLoad], interactive: bool) -> list[Message]:
        """Fill the free slots of one boot; committed when this returns."""
        fleet = FleetLoad(boots=[boot], loads=loads)
        ready, out = (
            fleet.count(boot.queue, what, interactive=interactive) for what in ("ready_cohorts", "active_cohorts")
        )
        if not ready:
            return []

        held_back: frozenset[str] = frozenset()

        def move(conn: sa.Connection) -> tuple[list[Message], list[Edge]]:
            nonlocal held_back
            if not interactive:
                held_back = pauses.hold_back(conn, boot.queue, boot.model)
            room = singles_room(out) if interactive else bulk_room(boot, out, dispatching.open_work(conn, boot.id))
            messages = dispatching.dispatch(
                conn, boot_id=boot.id, queue=boot.queue, model=boot.model, room=room, interactive=interactive
            )
            if not messages:
                held_back |= pauses.hold_back(conn, boot.queue, boot.model)  # suspects are of batches
                messages = dispatching.dispatch_suspects(conn, boot_id=boot.id, queue=boot.queue, model=boot.model)
            ids = [message.cohort_id for message in messages]
            return messages, dispatching.edges_of(conn, ids) if ids else []

        messages, edges = self._database.run(move)
        self._live.forget_batches(held_back)
        with self.lane.lock:
            for edge in edges:
                self._ledger.record(boot.id, edge.prefix_key, edge.prompt_tokens)
        return messages


def run_until_lost(settings: Settings, database: Database, publisher: Publisher, stop: threading.Event) -> None:
    """Lead, or stand by, until told to stop. Raises what the database raises when the connection is lost."""
    leader = Leader(database)
    lane: SinglesLane | None = None
    try:
        while not leader.leads():
            if stop.wait(1.0):
                return
        log.info("this dispatcher leads")
        dispatcher = Dispatcher(settings, database, publisher)
        lane = dispatcher.lane
        lane.start()
        chores = reaper.Reaper(settings, database, publisher)
        while not stop.is_set():
            dispatcher.publish(chores.step())
            dispatcher.step()
            leader.wait(0.0 if dispatcher.has_more else settings.dispatch_poll_seconds)
    finally:
        if lane is not None:
            lane.stop()
        leader.close()


def main(settings: Settings) -> None:
    """`python -m service dispatch`."""
    connections = find_connections(settings)
    database = Database(connections.database_url, pool_size=4, application_name="trunkline-dispatcher")
    database.check()
    check_schema(database)
    publisher = Publisher(make_app(settings, connections.broker_url, queue=CONTROL_QUEUE))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.is_set():
        try:
            run_until_lost(settings, database, publisher, stop)
        except (*DATABASE_AWAY, psycopg.OperationalError) as error:
            log.warning("database lost, trying again: %s", first_line(error))
            stop.wait(1.0)
    database.close()
