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
from dataclasses import dataclass
from functools import partial

import numpy as np
import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError

from service import reaper
from service.broker import CONTROL_QUEUE, Publisher, make_app
from service.connections import find_connections
from service.core import plan as planning
from service.core.cut import FloatArray
from service.core.ledger import BootView, Ledger
from service.core.model import Priority
from service.core.prefix import cacheable_tokens, neighbour_shared_tokens, shared_tokens
from service.core.steal import InstanceLoad, halve, steal_from
from service.errors import BrokerUnreachable
from service.migrate import check_schema
from service.settings import Settings
from service.store import backlog, dispatching, instances
from service.store.dispatching import Message, QueueLoad
from service.store.instances import Boot
from service.store.session import Database, first_line

log = logging.getLogger(__name__)

INTERACTIVE_SLOTS = 32  # threads of the worker beyond those, so that a single job is claimed at once
_SINGLES_PER_PASS = 256
_REPLAN_SHARE = 0.2  # late arrivals beyond this share of what is planned: plan anew (DESIGN.md section 6, 8)
_DEFAULT_BLOCK_TOKENS = 16  # vLLM's on a GPU; for engines that do not say
_DEFAULT_KV_TOKENS = 1_000_000
_DEFAULT_SEQUENCES = 64
# Until rates are fitted: only their ratio matters to a plan, and ten to one is common on GPUs.
_DEFAULT_RATES = planning.Rates(prefill_tokens_per_second=10_000.0, decode_tokens_per_second=1_000.0)
_LEADER_LOCK = 0x7472756E6B  # "trunk"


@dataclass(slots=True)
class Fleet:
    """The ready boots and what is planned for them, as one pass sees it."""

    boots: list[Boot]
    loads: list[QueueLoad]

    def of_model(self, model: str) -> list[Boot]:
        return [boot for boot in self.boots if boot.model == model]

    def seconds(self, queue: str) -> float:
        return sum(load.seconds for load in self.loads if load.queue == queue)

    def ready_jobs(self, model: str, at_least: int) -> int:
        wanted = (load for load in self.loads if load.model == model and at_least <= load.priority)
        return sum(load.ready_jobs for load in wanted if load.priority < Priority.INTERACTIVE)

    def count(self, queue: str, what: str, *, interactive: bool) -> int:
        of_queue = (load for load in self.loads if load.queue == queue)
        chosen = (load for load in of_queue if (load.priority >= Priority.INTERACTIVE) == interactive)
        return sum(int(getattr(load, what)) for load in chosen)


class Dispatcher:
    """One pass at a time over the tables; keeps nothing that a restart would miss, but the ledger of single jobs."""

    def __init__(self, settings: Settings, database: Database, publisher: Publisher) -> None:
        self._settings = settings
        self._database = database
        self._publisher = publisher
        self._known_boots: dict[str, frozenset[int]] = {}
        self._ledger = Ledger()

    def step(self) -> int:
        """Plan, move and publish once. Returns how many cohorts were published."""
        with self._database.transaction() as conn:
            boots = instances.ready_boots(conn, self._settings.stale_boot_seconds)
        self._database.run(self._isolate_suspects)
        for model in sorted({boot.model for boot in boots}):
            self._notice_boots(model, [boot for boot in boots if boot.model == model])
        for model in self._database.run(backlog.models_waiting):
            if any(boot.model == model for boot in boots):
                self._database.run(partial(self._plan_model, model=model, boots=boots))
        self._database.run(lambda conn: self._rescue_orphans(conn, boots))
        self._database.run(lambda conn: self._steal(conn, boots))
        messages = [message for boot in boots for message in self._dispatch(boot)]
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
        fleet = Fleet(boots=list(boots), loads=dispatching.queue_loads(conn))
        self._place_singles(conn, model, fleet)
        window = self._settings.plan_window_jobs
        priority, jobs = backlog.waiting_bulk(conn, model, window)
        if not jobs:
            return
        planned = fleet.ready_jobs(model, at_least=priority)
        if planned * 2 >= window:
            return
        if len(jobs) >= planned * _REPLAN_SHARE and planned and backlog.unplan_ready(conn, model):
            fleet = Fleet(boots=fleet.boots, loads=dispatching.queue_loads(conn))
            priority, jobs = backlog.waiting_bulk(conn, model, window)
        self._plan_bulk(conn, model, priority, jobs, fleet)

    def _plan_bulk(
        self, conn: sa.Connection, model: str, priority: int, jobs: Sequence[backlog.WaitingJob], fleet: Fleet
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

    def _place_singles(self, conn: sa.Connection, model: str, fleet: Fleet) -> None:
        """Jobs without a backlog go, one by one, where the least work is left to do for them."""
        boots = fleet.of_model(model)
        for boot in boots:
            self._ledger.open(boot.id, boot.kv_capacity_tokens or _DEFAULT_KV_TOKENS)
        views = [ledger_view(boot, fleet.seconds(boot.queue)) for boot in boots]
        queues = {boot.id: boot.queue for boot in boots}
        for priority, waiting in backlog.waiting_singles(conn, model, _SINGLES_PER_PASS):
            choice = self._ledger.choose(waiting.prefix_key, waiting.prompt_tokens, views)
            if choice is None:
                return
            single = backlog.NewCohort(
                model=model,
                queue=queues[choice.boot_id],
                sequence=backlog.next_sequence(conn),
                priority=max(priority, Priority.INTERACTIVE),
                alone=False,
                body_bytes=waiting.body_bytes,
                estimated_seconds=0.0,
                job_ids=[waiting.job_id],
                predicted_cached_tokens=[choice.predicted_cached_tokens],
                first_of_group=[choice.predicted_cached_tokens == 0],
            )
            backlog.insert_cohorts(conn, [single])
            self._ledger.record(choice.boot_id, waiting.prefix_key, waiting.prompt_tokens)

    def _rescue_orphans(self, conn: sa.Connection, boots: Sequence[Boot]) -> None:
        """Ready cohorts of queues that no ready boot serves go, in order, to the instance with the least work."""
        fleet = Fleet(boots=list(boots), loads=dispatching.queue_loads(conn))
        served = {(boot.queue, boot.model) for boot in boots}
        for load in fleet.loads:
            targets = fleet.of_model(load.model)
            if (load.queue, load.model) in served or not load.ready_cohorts or not targets:
                continue
            for cohort_id in dispatching.ready_cohorts_of(conn, load.queue, load.model):
                target = min(targets, key=lambda boot: fleet.seconds(boot.queue))
                dispatching.rebind(conn, cohort_id, target.queue, first_predicted=0)

    def _steal(self, conn: sa.Connection, boots: Sequence[Boot]) -> None:
        """An instance that has nothing left takes the tail of the one with most estimated work left."""
        for thief in boots:
            fleet = Fleet(boots=list(boots), loads=dispatching.queue_loads(conn))
            out = fleet.count(thief.queue, "active_cohorts", interactive=False)
            if out >= reaper.BULK_SLOTS or fleet.count(thief.queue, "ready_cohorts", interactive=False):
                continue
            peers = fleet.of_model(thief.model)
            tails = [None if boot is thief else dispatching.tail_of(conn, boot.queue, boot.model) for boot in peers]
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

    def _take(self, conn: sa.Connection, thief: Boot, tail: dispatching.Tail, is_halved: bool) -> None:
        """Bind a tail cohort, or its second half, to the thief; correct what its first job should find there."""
        at = (
            halve(_job_seconds(tail), neighbour_shared_tokens([item.prefix_key for item in tail.jobs]))
            if is_halved
            else 0
        )
        cohort_id = dispatching.split_tail(conn, tail, at) if at else tail.cohort_id
        held = backlog.last_keys(conn, [(thief.id, thief.queue)]).get(thief.queue, b"")
        dispatching.rebind(conn, cohort_id, thief.queue, _predict(thief, tail.jobs[at], held))
        log.info("cohort=%d moved to %s, which had nothing left", cohort_id, thief.queue)

    def _dispatch(self, boot: Boot) -> list[Message]:
        """Fill the free slots of one boot; committed when this returns."""

        def move(conn: sa.Connection) -> list[Message]:
            loads = [load for load in dispatching.queue_loads(conn) if load.queue == boot.queue]
            fleet = Fleet(boots=[boot], loads=loads)
            messages: list[Message] = []
            for interactive, slots in ((True, INTERACTIVE_SLOTS), (False, reaper.BULK_SLOTS)):
                if fleet.count(boot.queue, "ready_cohorts", interactive=interactive):
                    free = slots - fleet.count(boot.queue, "active_cohorts", interactive=interactive)
                    messages += dispatching.dispatch(
                        conn,
                        boot_id=boot.id,
                        queue=boot.queue,
                        model=boot.model,
                        limit=free,
                        interactive=interactive,
                    )
            if not messages and fleet.count(boot.queue, "ready_cohorts", interactive=False):
                messages = dispatching.dispatch_suspects(conn, boot_id=boot.id, queue=boot.queue, model=boot.model)
            return messages

        return self._database.run(move)


def instance_view(boot: Boot, held_key: bytes | None, load_seconds: float) -> planning.InstanceView:
    """A boot as the planner sees it; what its engine does not say gets a cautious default."""
    return planning.InstanceView(
        queue=boot.queue,
        block_size=boot.block_size or _DEFAULT_BLOCK_TOKENS,
        kv_capacity_tokens=boot.kv_capacity_tokens or _DEFAULT_KV_TOKENS,
        max_num_seqs=boot.max_num_seqs or _DEFAULT_SEQUENCES,
        rates=_rates(boot),
        held_key=held_key,
        load_seconds=load_seconds,
    )


def ledger_view(boot: Boot, load_seconds: float) -> BootView:
    """A boot as the ledger sees it."""
    block_size = boot.block_size or _DEFAULT_BLOCK_TOKENS
    return BootView(boot_id=boot.id, block_size=block_size, rates=_rates(boot), load_seconds=load_seconds)


def backlog_arrays(jobs: Sequence[backlog.WaitingJob]) -> planning.Backlog:
    """Rows of the backlog as the planner's arrays."""
    return planning.Backlog(
        job_ids=np.array([item.job_id for item in jobs], dtype=np.int64),
        keys=[item.prefix_key for item in jobs],
        prompt_tokens=np.array([item.prompt_tokens for item in jobs], dtype=np.int64),
        output_tokens=np.array([item.output_tokens for item in jobs], dtype=np.int64),
        body_bytes=np.array([item.body_bytes for item in jobs], dtype=np.int64),
    )


def _rates(boot: Boot) -> planning.Rates:
    if not boot.prefill_tokens_per_second or not boot.decode_tokens_per_second:
        return _DEFAULT_RATES
    return planning.Rates(
        prefill_tokens_per_second=boot.prefill_tokens_per_second,
        decode_tokens_per_second=boot.decode_tokens_per_second,
    )


def _job_seconds(tail: dispatching.Tail) -> FloatArray:
    prefill = np.array([item.prompt_tokens - item.predicted_cached_tokens for item in tail.jobs], dtype=np.float64)
    decode = np.array([item.output_tokens for item in tail.jobs], dtype=np.float64)
    rates = _DEFAULT_RATES
    return prefill / rates.prefill_tokens_per_second + decode / rates.decode_tokens_per_second


def _predict(boot: Boot, first: dispatching.TailJob, held: bytes) -> int:
    shared = shared_tokens(first.prefix_key, held)
    return cacheable_tokens(shared, first.prompt_tokens, boot.block_size or _DEFAULT_BLOCK_TOKENS)


class Leader:
    """Holds the advisory lock of the leading dispatcher, and hears NOTIFY, on one connection of its own."""

    def __init__(self, database: Database) -> None:
        url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg.connect(url, autocommit=True, connect_timeout=5, application_name="trunkline-leader")
        self._connection.execute("listen dispatch")

    def leads(self) -> bool:
        """True once this process holds the lock (asking again is free: the lock is the session's)."""
        row = self._connection.execute("select pg_try_advisory_lock(%s)", [_LEADER_LOCK]).fetchone()
        return bool(row and row[0])

    def wait(self, seconds: float) -> None:
        """Until somebody says there is work, or `seconds` passed."""
        for _ in self._connection.notifies(timeout=seconds, stop_after=1):
            return

    def close(self) -> None:
        self._connection.close()


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
        except (DBAPIError, OperationalError, psycopg.Error) as error:
            log.warning("database lost, trying again: %s", first_line(error))
            stop.wait(1.0)
    database.close()
