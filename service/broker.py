"""The only Celery and Kombu in service/: the app factory, the queue names, and publishing. Messages carry ids only."""

from __future__ import annotations

import logging
import time

from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from service.errors import BrokerUnreachable
from service.settings import Settings
from service.store.session import first_line

log = logging.getLogger(__name__)

CONTROL_QUEUE = "control"
MOST_ID = 2**63  # ids in a message are below this, or it is malformed
MOST_DISPATCHES = 2**31
CONTROL_TASK = "control"  # (control_task id)
COHORT_TASK = "cohort"  # (cohort id, dispatch number)

# A worker's threads, one per cohort that is out for its instance; a waiting thread costs little. Bulk: what is out is
# limited by jobs, and this only has to be more cohorts than can each be down to one long answer. Interactive: beyond
# those, so that a single job is claimed at once.
BULK_SLOTS = 64
INTERACTIVE_SLOTS = 32
WORKER_THREADS = BULK_SLOTS + INTERACTIVE_SLOTS

# 6 h, the same in every process: a 17 s task under a 5 s timeout was started 4 times at once. Recovery never waits
# for it: leases in Postgres decide.
_VISIBILITY_TIMEOUT_SECONDS = 21_600
# With the broker down a send fails at once, not after 6 s of retries; with one that hangs, after 5 s.
_FAIL_FAST = {
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.1,
    "interval_max": 0.2,
    "socket_timeout": 5,
}
_AWAY_SECONDS = 5.0  # after a failure nobody waits for the broker again this soon


def instance_queue(name: str) -> str:
    """The queue that belongs to one instance."""
    return f"instance.{name}"


def make_app(settings: Settings, broker_url: str, *, queue: str) -> Celery:
    """A Celery app for one process. `queue` is what a worker started from it consumes.

    Every value here is measured or argued in DESIGN.md section 4.
    """
    app = Celery("trunkline", broker=broker_url)
    app.conf.update(
        task_default_queue=queue,
        task_queues=[Queue(queue, durable=True)],
        task_create_missing_queues=True,
        # Acknowledged when it starts: the row says what runs. A late acknowledgement is restored when the connection
        # breaks, and there kombu 5.7 ends the whole worker, engine and all.
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        task_ignore_result=True,
        result_backend=None,
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": _VISIBILITY_TIMEOUT_SECONDS, "socket_connect_timeout": 5},
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_send_task_events=True,
        task_send_sent_event=True,
        task_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
    )
    return app


class Publisher:
    """Sends hints. A failure to send loses nothing: the sweepers publish again."""

    def __init__(self, app: Celery) -> None:
        """`app` publishes only: its connections give up early."""
        self._app = app
        self._away_until = 0.0
        app.conf.broker_transport_options = {**app.conf.broker_transport_options, **_FAIL_FAST}

    def cohort(self, queue: str, cohort_id: int, dispatch_no: int) -> None:
        """Tell the worker of `queue` that a cohort was dispatched to it. Raises BrokerUnreachable."""
        self._send(COHORT_TASK, queue, [cohort_id, dispatch_no])

    def control(self, task_id: int) -> None:
        """Tell control that a row of control_task waits. Raises BrokerUnreachable."""
        self._send(CONTROL_TASK, CONTROL_QUEUE, [task_id])

    def _send(self, name: str, queue: str, args: list[int]) -> None:
        if time.monotonic() < self._away_until:
            raise BrokerUnreachable("(it did not a moment ago)")
        try:
            self._app.send_task(name, args=args, queue=queue, retry=False)
        except (OperationalError, OSError, RedisError) as error:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            raise BrokerUnreachable(first_line(error)) from error

    def check(self) -> None:
        """Raise BrokerUnreachable unless a connection can be made."""
        check_broker(self._app)


def check_broker(app: Celery) -> None:
    """Raise BrokerUnreachable unless a connection can be made."""
    try:
        with app.connection_for_write(connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=0)
    except (OperationalError, OSError, RedisError) as error:
        raise BrokerUnreachable(first_line(error)) from error
