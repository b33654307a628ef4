"""Plans the backlog over the ready instances, keeps each a little ahead of its engine, and publishes the hints.

One dispatcher leads (a session advisory lock, for efficiency only); correctness never depends on there being one:
every move is guarded in its own statement.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import psycopg
import sqlalchemy as sa

from service import reaper
from service.broker import BULK_SLOTS, CONTROL_QUEUE, Publisher, make_app
from service.connections import find_connections
from service.core import plan as planning
from service.core.ledger import Ledger
from service.core.prefix import neighbour_shared_tokens
from service.core.steal import InstanceLoad, halve, steal_from
from service.errors import BrokerUnreachable
from service.leader import Leader
from service.migrate import check_schema
from service.planner_input import (
    FleetLoad,
    backlog_arrays,
    bulk_room,
    instance_view,
    job_seconds,
    kv_tokens,
    ledger_view,
    predict_first,
    single_cohort,
    singles_room,
)
from service.settings import Settings
from service.store import backlog, dispatching, instances, stealing
from service.store.dispatching import Edge, Message
from service.store.instances import Boot
from service.store.session import DATABASE_AWAY, Database, first_line

log = logging.getLogger(__name__)

_SINGLES_PER_PASS = 256
_REPLAN_SHARE = 0.2  # late arrivals beyond this share of what is planned: plan anew (DESIGN.md section 6, 8)


class Dispatcher:
    """One pass at a time over the tables; keeps nothing that a restart would miss, but the ledger of single jobs."""

    def __init__(self, settings: Settings, database: Database, publisher: Publisher) -> None:
        self._settings = settings
        self._database = database
        self._publisher = publisher
        self._known_boots: dict[str, frozenset[int]] = {}
        self._ledger = Ledger()

    def step(self) -> int:
        """Plan, move and publish once. Returns how many cohorts were published.

        Single jobs first, in transactions of their own: nobody waits for the planning of a window.
        """
        with self._database.transaction() as conn:
            boots = instances.ready_boots(conn, self._settings.stale_boot_seconds)
        models = sorted({boot.model for boot in boots})
        self._database.run(self._isolate_suspects)
        for model in models:
            self._database.run(partial(self._place_singles, model=model, boots=boots))
        published = self._dispatch_all(boots, interactive=True)
        for model in models:
            self._notice_boots(model, [boot for boot in boots if boot.model == model])
        for model in self._database.run(backlog.models_waiting):
            if model in models:
                self._database.run(partial(self._plan_model, model=model, boots=boots))
        self._database.run(lambda conn: self._rescue_orphans(conn, boots))
        self._database.run(lambda conn: self._steal(conn, boots))
        return published + self._dispatch_all(boots, interactive=False)

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

    def _notice_boots(self, model: str, boots: Sequence[Boot]) -> None:
        """Another set of boots than last time: what is planned and not dispatched is planned anew over all of them."""
        now = frozenset(boot.id for boot in boots)
        before = self._known_boots.get(model)
        self._known_boots[model] = now
        for boot_id in (before or frozenset()) - now:
            self._ledger.forget(boot_id)
        if before is not None and now != before and now:
            freed = self._database.run(lambda conn: backlog.unplan_ready(conn, model))
            log.info("model=%s boots=%d: %d jobs planned anew", model, len(now), freed)

    def _isolate_suspects(self, conn: sa.Connection) -> None:
        for suspect in backlog.suspects(conn, limit=50):
            count = backlog.isolate(conn, suspect)
            log.warning("cohort=%d failed twice: its %d open jobs run alone", suspect.cohort_id, count)

    def _plan_model(self, conn: sa.Connection, model: str, boots: Sequence[Boot]) -> None:
        fleet = FleetLoad(boots=list(boots), loads=dispatching.queue_loads(conn))
        window = self._settings.plan_window_jobs
        priority, jobs = backlog.waiting_bulk(conn, model, window)
        if not jobs:
            return
        planned = fleet.ready_jobs(model, at_least=priority)
        if planned * 2 >= window:
            return
        of_class = fleet.ready_jobs_of_class(model, priority)
        is_many = len(jobs) >= of_class * _REPLAN_SHARE
        if of_class and is_many and backlog.unplan_ready(conn, model, priority):
            fleet = FleetLoad(boots=fleet.boots, loads=dispatching.queue_loads(conn))
            priority, jobs = backlog.waiting_bulk(conn, model, window)
        self._plan_bulk(conn, model, priority, jobs, fleet)

    def _plan_bulk(
        self, conn: sa.Connection, model: str, priority: int, jobs: Sequence[backlog.WaitingJob], fleet: FleetLoad
    ) -> None:
        boots = fleet.of_model(model)
        held = backlog.last_keys(conn, [(boot.id, boot.queue) for boot in boots])
        views = [instance_view(boot, held.get(boot.queue), fleet.seconds(boot.queue)) for boot in boots]
        started = time.monotonic()
        cohorts = planning.plan(backlog_arrays(jobs), views, planning.Limits(cohort_jobs=self._settings.cohort_jobs))
        sequence = backlog.next_sequence(conn)
        rows = [
            backlog.NewCohort(
                model=model,
                queue=views[item.instance].queue,
                sequence=sequence + position,
                priority=priority,
                alone=False,
                body_bytes=int(item.body_bytes),
                estimated_seconds=float(item.estimated_seconds),
                job_ids=item.job_ids.tolist(),
                predicted_cached_tokens=item.predicted_cached_tokens.tolist(),
                first_of_group=item.first_of_group.tolist(),
            )
            for position, item in enumerate(cohorts)
        ]
        backlog.insert_cohorts(conn, rows)
        log.info(
            "planned model=%s jobs=%d cohorts=%d instances=%d in %.3f s",
            model,
            len(jobs),
            len(rows),
            len(boots),
            time.monotonic() - started,
        )

    def _place_singles(self, conn: sa.Connection, model: str, boots: Sequence[Boot]) -> None:
        """Jobs without a backlog go, one by one, where the least work is left to do for them."""
        waiting = backlog.waiting_singles(conn, model, _SINGLES_PER_PASS)
        if not waiting:
            return
        fleet = FleetLoad(boots=list(boots), loads=dispatching.queue_loads(conn))
        by_id = {boot.id: boot for boot in fleet.of_model(model)}
        for boot in by_id.values():
            self._ledger.open(boot.id, kv_tokens(boot))
        load_seconds = {boot.id: fleet.seconds(boot.queue) for boot in by_id.values()}
        sequence = backlog.next_sequence(conn)
        placed = []
        for position, (priority, single) in enumerate(waiting):
            views = [ledger_view(boot, load_seconds[boot.id]) for boot in by_id.values()]
            choice = self._ledger.choose(single.prefix_key, single.prompt_tokens, views)
            if choice is None:
                return
            boot = by_id[choice.boot_id]
            cohort = single_cohort(boot, model, single, priority, sequence + position, choice.predicted_cached_tokens)
            load_seconds[boot.id] += cohort.estimated_seconds
            placed.append(cohort)
            self._ledger.record(boot.id, single.prefix_key, single.prompt_tokens)
        backlog.insert_cohorts(conn, placed)

    def _rescue_orphans(self, conn: sa.Connection, boots: Sequence[Boot]) -> None:
        """Ready cohorts of queues that no ready boot serves go, in order, to the instance with the least work."""
        fleet = FleetLoad(boots=list(boots), loads=dispatching.queue_loads(conn))
        served = {(boot.queue, boot.model) for boot in boots}
        moved: defaultdict[str, float] = defaultdict(float)  # seconds
        for load in fleet.loads:
            targets = fleet.of_model(load.model)
            if (load.queue, load.model) in served or not load.ready_cohorts or not targets:
                continue
            for cohort_id, seconds in stealing.ready_cohorts_of(conn, load.queue, load.model):
                target = min(targets, key=lambda boot: fleet.seconds(boot.queue) + moved[boot.queue])
                moved[target.queue] += seconds
                stealing.rebind(conn, cohort_id, target.queue, first_predicted=0)

    def _steal(self, conn: sa.Connection, boots: Sequence[Boot]) -> None:
        """An instance that has nothing left takes the tail of the one with most estimated work left."""
        fleet = FleetLoad(boots=list(boots), loads=dispatching.queue_loads(conn))
        for thief in boots:
            out = fleet.count(thief.queue, "active_cohorts", interactive=False)
            if out >= BULK_SLOTS or fleet.count(thief.queue, "ready_cohorts", interactive=False):
                continue
            peers = fleet.of_model(thief.model)
            tails = [None if boot is thief else stealing.tail_of(conn, boot.queue, boot.model) for boot in peers]
            loads = [
                InstanceLoad(
                    seconds_left=fleet.seconds(boot.queue),
                    stealable_cohorts=fleet.count(boot.queue, "ready_cohorts", interactive=False) if tail else 0,
                    tail_seconds=tail.estimated_seconds if tail else 0.0,
                    tail_jobs=len(tail.jobs) if tail else 0,
                )
                for boot, tail in zip(peers, tails, strict=True)
            ]
            steal = steal_from(loads, peers.index(thief))
            tail = tails[steal.victim] if steal is not None else None
            if steal is None or tail is None:
                continue
            self._take(conn, thief, tail, steal.halve)
            fleet = FleetLoad(boots=fleet.boots, loads=dispatching.queue_loads(conn))

    def _take(self, conn: sa.Connection, thief: Boot, tail: stealing.Tail, is_halved: bool) -> None:
        """Bind a tail cohort, or its second half, to the thief; correct what its first job should find there."""
        at = (
            halve(job_seconds(tail), neighbour_shared_tokens([item.prefix_key for item in tail.jobs]))
            if is_halved
            else 0
        )
        cohort_id = stealing.split_tail(conn, tail, at) if at else tail.cohort_id
        held = backlog.last_keys(conn, [(thief.id, thief.queue)]).get(thief.queue, b"")
        stealing.rebind(conn, cohort_id, thief.queue, predict_first(thief, tail.jobs[at], held))
        log.info("cohort=%d moved to %s, which had nothing left", cohort_id, thief.queue)

    def _dispatch(self, boot: Boot, loads: list[dispatching.QueueLoad], interactive: bool) -> list[Message]:
        """Fill the free slots of one boot; committed when this returns."""
        fleet = FleetLoad(boots=[boot], loads=loads)
        ready, out = (
            fleet.count(boot.queue, what, interactive=interactive) for what in ("ready_cohorts", "active_cohorts")
        )
        if not ready:
            return []

        def move(conn: sa.Connection) -> tuple[list[Message], list[Edge]]:
            open_jobs = 0 if interactive else dispatching.open_jobs(conn, boot.id)
            room = singles_room(out) if interactive else bulk_room(boot, out, open_jobs)
            messages = dispatching.dispatch(
                conn, boot_id=boot.id, queue=boot.queue, model=boot.model, room=room, interactive=interactive
            )
            if not messages:
                messages = dispatching.dispatch_suspects(conn, boot_id=boot.id, queue=boot.queue, model=boot.model)
            ids = [message.cohort_id for message in messages]
            return messages, dispatching.edges_of(conn, ids) if ids else []

        messages, edges = self._database.run(move)
        self._ledger.open(boot.id, kv_tokens(boot))
        for edge in edges:
            self._ledger.record(boot.id, edge.prefix_key, edge.prompt_tokens)
        return messages


def run_until_lost(settings: Settings, database: Database, publisher: Publisher, stop: threading.Event) -> None:
    """Lead, or stand by, until told to stop. Raises what the database raises when the connection is lost."""
    leader = Leader(database)
    try:
        while not leader.leads():
            if stop.wait(1.0):
                return
        log.info("this dispatcher leads")
        dispatcher = Dispatcher(settings, database, publisher)
        chores = reaper.Reaper(settings, database, publisher)
        while not stop.is_set():
            dispatcher.publish(chores.step())
            dispatcher.step()
            leader.wait(settings.dispatch_poll_seconds)
    finally:
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
