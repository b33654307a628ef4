"""The lane of single jobs: each is placed and sent the moment it arrives, beside the passes over the bulk backlog."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from service.broker import INTERACTIVE_SLOTS
from service.core.ledger import Ledger
from service.core.model import Priority
from service.planner_input import ledger_view, single_cohort
from service.store import backlog, lane
from service.store.backlog import NewCohort, WaitingJob, WaitingSingle
from service.store.dispatching import Message
from service.store.instances import Boot
from service.store.listen import listening, payloads
from service.store.session import Database, first_line

log = logging.getLogger(__name__)

_AT_ONCE = 256
_POLL_SECONDS = 1.0  # NOTIFY may be lost
_AWAY_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A boot, the work ahead of a new job, and how many interactive cohorts may still go out for it."""

    boot: Boot
    load_seconds: float
    free: int


class SinglesLane:
    """Jobs without a backlog go, one by one, where the least work is left to do for them.

    A thread of its own hears of each, and the dispatcher's passes look here too; `step` is guarded, and so is the
    ledger, by `lock`. An interactive job is bound, sent out and announced in one transaction. While every instance has
    as many as it has threads, it waits in the backlog and is placed when one ends: by then more is known.
    """

    def __init__(self, database: Database, publish: Callable[[Iterable[Message]], None], ledger: Ledger) -> None:
        self._database = database
        self._publish = publish
        self._ledger = ledger
        self.lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._boots: tuple[Boot, ...] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="singles-lane", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns within about a second."""
        self._stopping.set()
        self._thread.join()

    def set_boots(self, boots: Sequence[Boot]) -> None:
        """Those that are ready, as the last pass found them; whether they still are is asked again."""
        self._boots = tuple(boots)

    def step(self) -> int:
        """Place what waits; returns how many cohorts were sent. Raises what the database raises."""
        boots = self._boots
        if not boots:
            return 0
        with self._step_lock:
            messages = self._database.run(lambda conn: self._place(conn, boots))
        self._publish(messages)
        return len(messages)

    def _place(self, conn: sa.Connection, boots: Sequence[Boot]) -> list[Message]:
        """Relaxed: a placing that a crash of Postgres takes back is done again, and its message is stale."""
        waiting = backlog.waiting_singles(conn, sorted({boot.model for boot in boots}), _AT_ONCE)
        if not waiting:
            return []
        slots = _slots(conn, boots)
        urgent: list[tuple[int, NewCohort]] = []
        patient: list[NewCohort] = []
        for single in waiting:
            is_urgent = single.priority >= Priority.INTERACTIVE
            slot, cached_tokens = self._choose(single.job, _candidates(slots, single, is_urgent))
            if slot is None:
                continue
            cohort = single_cohort(slot.boot, single.model, single.job, single.priority, 0, cached_tokens)
            slot.load_seconds += cohort.estimated_seconds
            if is_urgent:
                slot.free -= 1
                urgent.append((slot.boot.id, cohort))
            else:
                patient.append(cohort)
        if patient:
            first = backlog.next_sequence(conn)
            backlog.insert_cohorts(conn, [replace(item, sequence=first + n) for n, item in enumerate(patient)])
            lane.wake_dispatcher(conn)
        return lane.insert_dispatched(conn, urgent)

    def _choose(self, single: WaitingJob, slots: Sequence[_Slot]) -> tuple[_Slot | None, int]:
        """Where it goes, and the tokens that it should find in the cache there."""
        with self.lock:
            views = [ledger_view(slot.boot, slot.load_seconds) for slot in slots]
            choice = self._ledger.choose(single.prefix_key, single.prompt_tokens, views, single.output_tokens)
            if choice is None:
                return None, 0
            self._ledger.record(choice.boot_id, single.prefix_key, single.prompt_tokens, single.output_tokens)
        chosen = next(slot for slot in slots if slot.boot.id == choice.boot_id)
        return chosen, choice.predicted_cached_tokens

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with listening(self._database, backlog.SINGLES_CHANNEL) as conn:
                    while not self._stopping.is_set():
                        payloads(conn, _POLL_SECONDS)
                        self.step()
            except (psycopg.Error, SQLAlchemyError) as error:
                log.warning("single jobs wait, the database does not answer %s", first_line(error))
                self._stopping.wait(_AWAY_SECONDS)
            except Exception:  # the thread's loop: the passes go on placing, and it must not end unseen
                log.exception("placing single jobs failed")
                self._stopping.wait(_AWAY_SECONDS)


def _slots(conn: sa.Connection, boots: Sequence[Boot]) -> list[_Slot]:
    ahead = lane.work_ahead(conn)
    slots = []
    for boot in boots:
        what = ahead.get(boot.queue, lane.Ahead())
        free = 0 if what.has_suspect else INTERACTIVE_SLOTS - what.interactive_cohorts
        slots.append(_Slot(boot=boot, load_seconds=what.seconds, free=free))
    return slots


def _candidates(slots: Sequence[_Slot], single: WaitingSingle, is_urgent: bool) -> list[_Slot]:
    of_model = (slot for slot in slots if slot.boot.model == single.model)
    return [slot for slot in of_model if slot.free > 0 or not is_urgent]
