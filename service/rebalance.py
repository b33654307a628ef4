"""Cohorts that are written and not out, moved in the table: from an instance that is gone, or to one that ran dry."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import sqlalchemy as sa

from service.broker import BULK_SLOTS
from service.core.prefix import neighbour_shared_tokens
from service.core.steal import InstanceLoad, halve, steal_from
from service.planner_input import FleetLoad, job_seconds, kv_tokens, predict_moved
from service.store import dispatching, stealing
from service.store.instances import Boot

log = logging.getLogger(__name__)


def rescue_orphans(conn: sa.Connection, boots: Sequence[Boot]) -> None:
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


def steal(conn: sa.Connection, boots: Sequence[Boot], thieves: set[int]) -> None:
    """A boot (of the ids `thieves`) for which there is nothing else takes the tail of the one with most work left."""
    fleet = FleetLoad(boots=list(boots), loads=dispatching.queue_loads(conn))
    for thief in boots:
        out = fleet.count(thief.queue, "active_cohorts", interactive=False)
        if thief.id not in thieves or out >= BULK_SLOTS:
            continue
        if fleet.count(thief.queue, "ready_cohorts", interactive=False):
            continue
        peers = fleet.of_model(thief.model)
        tails = [None if boot is thief else _tail_for(conn, thief, boot) for boot in peers]
        wish = steal_from([_load(fleet, *pair) for pair in zip(peers, tails, strict=True)], peers.index(thief))
        tail = tails[wish.victim] if wish is not None else None
        if wish is None or tail is None:
            continue
        _move(conn, thief, tail, wish.halve)
        fleet = FleetLoad(boots=fleet.boots, loads=dispatching.queue_loads(conn))


def _tail_for(conn: sa.Connection, thief: Boot, boot: Boot) -> stealing.Tail | None:
    """What the thief could take of another boot: its cache must hold it, if the other's does."""
    tail = stealing.tail_of(conn, boot.queue, boot.model)
    if tail is None or kv_tokens(thief) >= kv_tokens(boot):
        return tail
    return tail if all(item.prompt_tokens + item.output_tokens <= kv_tokens(thief) for item in tail.jobs) else None


def _load(fleet: FleetLoad, boot: Boot, tail: stealing.Tail | None) -> InstanceLoad:
    return InstanceLoad(
        seconds_left=fleet.seconds(boot.queue),
        stealable_cohorts=fleet.count(boot.queue, "ready_cohorts", interactive=False) if tail else 0,
        tail_seconds=tail.estimated_seconds if tail else 0.0,
        tail_jobs=len(tail.jobs) if tail else 0,
    )


def _move(conn: sa.Connection, thief: Boot, tail: stealing.Tail, is_halved: bool) -> None:
    """Bind a tail cohort, or its second half, to the thief; correct what its jobs should find there."""
    shared = neighbour_shared_tokens([item.prefix_key for item in tail.jobs])
    at = halve(job_seconds(tail, thief), shared) if is_halved else 0
    cohort_id = stealing.split_tail(conn, tail, at) if at else tail.cohort_id
    held = stealing.keys_run(conn, thief.id, kv_tokens(thief))
    stealing.predict(conn, predict_moved(thief, tail.jobs[at:], held))
    stealing.rebind(conn, cohort_id, thief.queue, first_predicted=None)
    log.info("cohort=%d moved to %s, which had nothing left", cohort_id, thief.queue)
