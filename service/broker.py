"""The only Celery and Kombu in service/: the app factory, the queue names, and publishing. Messages carry ids only."""

from __future__ import annotations

import logging

from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError

from service.errors import BrokerUnreachable
from service.settings import Settings
from service.store.session import first_line

log = logging.getLogger(__name__)

CONTROL_QUEUE = "control"
CONTROL_TASK = "control"  # (control_task id)
COHORT_TASK = "cohort"  # (cohort id, dispatch number)

# A worker's threads, one per cohort that is out for its instance. Bulk: enough small cohorts to keep the engine full
# while some of them have a last job running. Interactive: beyond those, so that a single job is claimed at once.
BULK_SLOTS = 8
INTERACTIVE_SLOTS = 32
WORKER_THREADS = BULK_SLOTS + INTERACTIVE_SLOTS

# 6 h, the same in every process: a 17 s task under a 5 s timeout was started 4 times at once. Recovery never waits
# for it: leases in Postgres decide.
_VISIBILITY_TIMEOUT_SECONDS = 21_600
_FAIL_FAST = {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}


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
        task_acks_late=True,
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
        """`app` publishes only: with the broker down its sends fail at once instead of after 6 s of retries."""
        self._app = app
        app.conf.broker_transport_options = {**app.conf.broker_transport_options, **_FAIL_FAST}

    def cohort(self, queue: str, cohort_id: int, dispatch_no: int) -> None:
        """Tell the worker of `queue` that a cohort was dispatched to it. Raises BrokerUnreachable."""
        self._send(COHORT_TASK, queue, [cohort_id, dispatch_no])

    def control(self, task_id: int) -> None:
        """Tell control that a row of control_task waits. Raises BrokerUnreachable."""
        self._send(CONTROL_TASK, CONTROL_QUEUE, [task_id])

    def _send(self, name: str, queue: str, args: list[int]) -> None:
        try:
            self._app.send_task(name, args=args, queue=queue, retry=False)
        except (OperationalError, OSError) as error:
            raise BrokerUnreachable(first_line(error)) from error

    def check(self) -> None:
        """Raise BrokerUnreachable unless a connection can be made."""
        check_broker(self._app)


def check_broker(app: Celery) -> None:
    """Raise BrokerUnreachable unless a connection can be made."""
    try:
        with app.connection_for_write(connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=0)
    except (OperationalError, OSError) as error:
        raise BrokerUnreachable(first_line(error)) from error
