"""The chores that keep promises when somebody died: leases, silent boots, lost messages, deadlines, ended batches.

Each is guarded in its own statement, so two reapers at once are harmless. They run in the dispatcher's process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from service.broker import Publisher
from service.errors import BrokerUnreachable
from service.settings import Settings
from service.store import control, dispatching, instances, results, webhooks
from service.store.dispatching import Message
from service.store.session import Database

log = logging.getLogger(__name__)

_ENDED_SECONDS = 0.5  # how late a batch notices that its last line ended
_COMPACT_SECONDS = 10.0


@dataclass(slots=True)
class _Chore:
    run: Callable[[], None]
    every_seconds: float
    due_at: float = 0.0


class Reaper:
    """Runs each chore when it is due; `clock` is monotonic seconds."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        publisher: Publisher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._database = database
        self._publisher = publisher
        self._clock = clock
        # Workers that could not renew while the database was away get one whole lease to do so before any is reaped.
        self._reap_from = clock() + settings.lease_seconds
        self._last_step = clock()
        self._messages: list[Message] = []
        self._webhooks_from = 0.0
        lease_check = min(1.0, settings.lease_seconds / 5)
        self._chores = [
            _Chore(self._leases, lease_check),
            _Chore(self._boots, lease_check),
            _Chore(self._lost_messages, settings.republish_seconds / 4),
            _Chore(self._batches, _ENDED_SECONDS),
            _Chore(self._control_hints, settings.sweep_seconds / 5),
            _Chore(self._webhooks, settings.sweep_seconds / 5),
            _Chore(self._single_ends, _ENDED_SECONDS),
            _Chore(self._compact, _COMPACT_SECONDS),
        ]

    def step(self) -> list[Message]:
        """Run what is due; the cohort hints that must be sent again."""
        now = self._clock()
        if now - self._last_step > self._settings.lease_seconds / 2:
            # This process or the database stood still, and so perhaps did the workers' renewals.
            self._reap_from = now + self._settings.lease_seconds
        self._last_step = now
        self._messages = []
        for chore in self._chores:
            if now >= chore.due_at:
                chore.due_at = now + chore.every_seconds
                chore.run()
        return self._messages

    def _leases(self) -> None:
        if self._clock() < self._reap_from:
            return
        expired = self._database.run(dispatching.expire_leases)
        if expired:
            log.warning("%d cohorts released, their lease expired: %s", len(expired), _some(expired))

    def _boots(self) -> None:
        if self._clock() < self._reap_from:
            return
        gone = self._database.run(lambda conn: instances.reap_boots(conn, self._settings.stale_boot_seconds))
        if gone:
            log.warning("%d boots marked gone, no heartbeat: %s", len(gone), _some(gone))
        stranded = self._database.run(instances.release_stranded)
        if stranded:
            log.warning("%d cohorts released, their boot is gone: %s", len(stranded), _some(stranded))

    def _lost_messages(self) -> None:
        lost = self._database.run(lambda conn: dispatching.lost_messages(conn, self._settings.republish_seconds))
        if lost:
            log.warning("%d cohorts sent again, their message was lost", len(lost))
        self._messages.extend(lost)
        unheard = self._database.run(lambda conn: dispatching.take_back_unheard(conn, self._settings.republish_seconds))
        if unheard:
            log.warning("%d cohorts taken back, their worker hears no message: %s", len(unheard), _some(unheard))

    def _batches(self) -> None:
        def work(conn: sa.Connection) -> list[int]:
            return [*control.due_finalizing(conn), *control.due_expiries(conn)]

        self._send(self._database.run(work))

    def _control_hints(self) -> None:
        seconds = self._settings.sweep_seconds
        self._send(self._database.run(lambda conn: control.unpublished_tasks(conn, seconds)))

    def _webhooks(self) -> None:
        """In a tenth of this process's time at the most: there is no limit to how many wait for one bad receiver."""
        started = self._clock()
        if started < self._webhooks_from:
            return
        seconds = self._settings.sweep_seconds
        self._send(self._database.run(lambda conn: webhooks.due_webhooks(conn, seconds)))
        ended = self._clock()
        self._webhooks_from = ended + 9 * (ended - started)

    def _send(self, task_ids: list[int]) -> None:
        sent = []
        for task_id in task_ids:
            try:
                self._publisher.control(task_id)
            except BrokerUnreachable as error:
                log.warning("control work not published: %s", error)
                break
            sent.append(task_id)
        if sent:
            self._database.run(lambda conn: control.mark_published(conn, sent))

    def _single_ends(self) -> None:
        ended = self._database.run(results.end_due_singles)
        if ended:
            log.info("%d single jobs ended, cancelled or past their deadline", ended)

    def _compact(self) -> None:
        self._database.run(control.compact_progress)


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
