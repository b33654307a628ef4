"""Webhooks: tell a tenant's server that a batch or a single job has ended. The handler of WEBHOOK, and its threads.

At least once: an event that was sent and whose answer could not be recorded is sent again, under the same id. A try
that was cut short by our own end does not count.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from service.core.webhook import event_body, is_final, parse_url, retry_delay_seconds, signed_headers
from service.courier import Answer, Courier, CourierStopped
from service.settings import Settings
from service.store import control, webhooks
from service.store.control import ControlTask
from service.store.session import DATABASE_AWAY
from service.store.webhooks import Sending
from service.work import Interrupted, Work

log = logging.getLogger(__name__)

# At most so many deliveries at once in a process. A thread that waits for a receiver costs next to nothing.
THREADS = 32
# When all threads, or all places of the tenant, are taken.
_BUSY_SECONDS = (1.0, 5.0)


def run_webhook(work: Work, task: ControlTask) -> None:
    """The handler of WEBHOOK: one try. Raises Interrupted, FenceLost and what the database raises."""

    def load(conn: sa.Connection) -> Sending | None:
        work.hold(conn, task)
        sending = webhooks.open_event(conn, task.subject)
        if sending is None:
            control.finish_task(conn, task)
        return sending

    sending = work.database.run(load)
    if sending is None:
        return
    with work.courier.places.one_for(sending.tenant_id) as is_free:
        if not is_free:
            wait_for_room(work, task)
            return
        answer = send(work.settings, work.courier, sending, work.stopping)
    work.database.run(lambda conn: _record(work, conn, task, sending, answer))
    _log(sending, answer)


def send(settings: Settings, courier: Courier, sending: Sending, stopping: threading.Event | None = None) -> Answer:
    """One try, of which nothing is recorded. Raises Interrupted when the process is told to stop."""
    target = parse_url(sending.url)
    if target is None:
        return Answer(error="url_refused", is_refused=True)
    body = event_body(
        event_id=sending.id, event_type=sending.type, created_at=sending.created_at, subject=sending.subject
    )
    headers = signed_headers(event_id=sending.id, sent_at=sending.sent_at, body=body, secret=sending.secret)
    try:
        return courier.send(
            target,
            {"content-type": "application/json", "user-agent": "trunkline", **headers},
            body,
            allow_private=settings.webhooks_allow_private,
            timeout_seconds=settings.webhooks_timeout_seconds,
            stopping=stopping or threading.Event(),
        )
    except CourierStopped as error:
        raise Interrupted from error


def wait_for_room(work: Work, task: ControlTask) -> None:
    """Give a claimed task back, to come again a little later. Raises FenceLost."""
    seconds = random.uniform(*_BUSY_SECONDS)
    work.database.run(lambda conn: control.reschedule_task(conn, task, seconds))


def _record(work: Work, conn: sa.Connection, task: ControlTask, sending: Sending, answer: Answer) -> None:
    work.hold(conn, task)
    delay_seconds = _delay_seconds(work, sending, answer)
    webhooks.record_try(conn, sending.id, answer.error, is_last=delay_seconds is None)
    if delay_seconds is None:
        control.finish_task(conn, task)
    else:
        control.reschedule_task(conn, task, delay_seconds)


def _delay_seconds(work: Work, sending: Sending, answer: Answer) -> float | None:
    """Until the next try; None where there is none."""
    if answer.error is None or answer.is_refused or is_final(answer.status_code or 0):
        return None
    return retry_delay_seconds(sending.tries + 1, work.settings.webhooks_retry_seconds)


def _log(sending: Sending, answer: Answer) -> None:
    """The host alone: a path or a query may hold somebody's key."""
    target = parse_url(sending.url)
    host = target.host if target else "(no URL)"
    what = (sending.id, sending.type, host, sending.tries + 1, answer.error or answer.status_code)
    level = logging.INFO if answer.error is None else logging.WARNING
    log.log(level, "webhook %s (%s) to %s, try %d: %s", *what)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The threads of deliveries, apart from those of intake and export, which no receiver can hold up."""

    _free: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(THREADS))

    def start(self, deliver: Callable[[], None]) -> bool:
        """Run it in a thread of its own; False where there are too many already."""
        if not self._free.acquire(blocking=False):
            return False
        # Daemons: a process that must go does not wait for a name server. What they held, their lease gives back.
        threading.Thread(target=self._run, args=(deliver,), name="webhook", daemon=True).start()
        return True

    def _run(self, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except (sa.exc.DBAPIError, *DATABASE_AWAY) as error:
            log.warning("webhook: what came of it is not recorded (%s)", type(error).__name__)
        finally:
            self._free.release()

    def wait(self, seconds: float) -> bool:
        """Whether all of them ended within that time; call it when nothing is started any more."""
        deadline = time.monotonic() + seconds
        return all(self._free.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(THREADS))
