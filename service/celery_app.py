"""The Celery entry of control work: `celery -A service.celery_app worker -Q control -P threads`; Flower's too.

The app is made when Celery first asks for `app`, not on import; database and models are opened when a worker starts.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

from celery import Celery, signals

from service.broker import CONTROL_QUEUE, CONTROL_TASK, MOST_ID, make_app
from service.connections import find_connections
from service.control import make_work, run_task
from service.errors import TrunklineError
from service.logs import set_up_logging
from service.migrate import check_schema
from service.settings import Settings, read_settings
from service.store.session import Database
from service.webhooks import Outgoing
from service.work import Work

log = logging.getLogger(__name__)

_LAST_WEBHOOKS_SECONDS = 3.0  # those in flight learn within 0.2 s that they stop


class ControlProcess:
    """What the threads of one control worker share; there once the worker has started."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._work: Work | None = None
        self._outgoing = Outgoing()

    def set_up_logging(self, *_: object, **__: object) -> None:
        """In place of Celery's own, which would log every task."""
        set_up_logging(self._settings)

    def start(self, *_: object, **__: object) -> None:
        """Open database, file store and models, or stop the worker with one sentence."""
        try:
            database = Database(find_connections(self._settings).database_url, application_name="trunkline control")
            database.check()
            check_schema(database)
            self._work = make_work(self._settings, database)
        except TrunklineError as error:
            _stop(error)

    def stop(self, *_: object, **__: object) -> None:
        """Handlers give their tasks back at the next chunk."""
        if self._work is not None:
            self._work.stopping.set()

    def finish(self, *_: object, **__: object) -> None:
        """After the last task: webhooks that were on their way are given back too."""
        if not self._outgoing.wait(_LAST_WEBHOOKS_SECONDS):
            log.warning("some webhooks did not stop in time: they are sent again when their leases end")

    def run(self, task_id: int) -> None:
        if self._work is None:
            raise RuntimeError("control work came before the worker was ready")
        run_task(self._work, task_id, self._outgoing)


@cache
def control_app() -> Celery:
    """The app, its one task and its signals."""
    try:
        settings = read_settings()
        app = make_app(settings, find_connections(settings).broker_url, queue=CONTROL_QUEUE)
    except TrunklineError as error:
        _stop(error)
    process = ControlProcess(settings)

    @app.task(name=CONTROL_TASK)  # type: ignore[untyped-decorator]
    def control(*args: object, **kwargs: object) -> None:
        if kwargs or len(args) != 1 or type(args[0]) is not int or not 1 <= args[0] < MOST_ID:
            log.warning("malformed message dropped: %d arguments", len(args) + len(kwargs))
            return
        process.run(args[0])

    signals.setup_logging.connect(process.set_up_logging, weak=False)
    signals.worker_init.connect(process.start, weak=False)
    signals.worker_shutting_down.connect(process.stop, weak=False)
    signals.worker_shutdown.connect(process.finish, weak=False)
    return app


def _stop(error: TrunklineError) -> Any:
    """One sentence instead of Celery's traceback."""
    print(f"trunkline control: {error}", file=sys.stderr)  # noqa: T201 (logging is not set up yet)
    raise SystemExit(error.exit_status)


def __getattr__(name: str) -> Celery:
    if name in ("app", "celery"):
        return control_app()
    raise AttributeError(name)
