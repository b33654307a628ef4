"""Celery's entry to a worker: `celery -A workers.celery_app worker -P threads -Q instance.NAME -n NAME@%h`, with
TRUNKLINE_INSTANCE=NAME. Settings, the engine and its drain are tied to Celery's start and stop here, thinly."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

from celery import Celery, bootsteps, signals
from celery.worker import state

from service.broker import WORKER_THREADS, check_broker, instance_queue, make_app
from service.connections import find_connections
from service.errors import DatabaseUnreachable, SettingError, TrunklineError
from service.fleet import Instance, Models, load_instances, load_models
from service.logs import set_up_logging
from service.migrate import check_schema
from service.settings import Settings, read_settings
from service.store.session import DATABASE_AWAY, Database, first_line
from service.tokenizing import Tokenizing
from workers.owner import InstanceOwner
from workers.streams import Streams
from workers.tasks import register


def _fail(error: TrunklineError) -> NoReturn:
    """One sentence, no traceback."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    raise SystemExit(error.exit_status)


def find_instance(settings: Settings) -> tuple[Instance, Models]:
    """The instance that TRUNKLINE_INSTANCE names, and the registry with its model. Raises SettingError."""
    if settings.instance is None:
        raise SettingError("TRUNKLINE_INSTANCE is not set; a worker owns one instance.")
    known = load_instances(settings.instances_path)
    if settings.instance not in known:
        raise SettingError(f"TRUNKLINE_INSTANCE is {settings.instance!r}; INSTANCES has {', '.join(known)}.")
    instance = known[settings.instance]
    models = load_models(settings.models_path)
    if instance.model not in models.by_name:
        raise SettingError(f"INSTANCES: [instances.{instance.name}] model: {instance.model!r} is not in MODELS.")
    return instance, models


def _build() -> Celery:
    settings = read_settings()
    set_up_logging(settings)
    instance, models = find_instance(settings)
    connections = find_connections(settings)
    app = make_app(settings, connections.broker_url, queue=instance_queue(instance.name))
    app.conf.worker_pool = "threads"
    app.conf.worker_concurrency = WORKER_THREADS
    database = Database(connections.database_url, application_name=f"trunkline worker {instance.name}")
    owner = InstanceOwner(
        settings=settings,
        instance=instance,
        model=models.by_name[instance.model],
        database=database,
        tokenizing=Tokenizing(models, default_output_tokens=settings.default_output_tokens),
        streams=Streams(connections.broker_url, instance.name, silence_seconds=settings.relay_silence_seconds),
    )
    register(app, owner.run_cohort)
    app.steps["worker"].add(_engine_step(app, owner, database))

    def drain(**_: Any) -> None:
        """In a thread: this runs inside a signal handler, which must not block. A second signal ends the grace."""
        threading.Thread(target=owner.drain, name="drain", daemon=True).start()

    signals.worker_shutting_down.connect(drain, weak=False)
    # A receiver of this signal keeps Celery from setting up logging of its own.
    signals.setup_logging.connect(lambda **_: set_up_logging(settings), weak=False)
    return app


def _engine_step(app: Celery, owner: InstanceOwner, database: Database) -> type:
    """Celery starts its steps in order, the consumer last: no message is taken before the engine is ready."""

    class EngineStep(bootsteps.StartStopStep):  # type: ignore[misc]
        requires = ("celery.worker.components:Pool",)

        def start(self, parent: Any) -> None:
            try:
                database.check()
                check_schema(database)
                check_broker(app)
                owner.start(lambda: state.should_stop is not None or state.should_terminate is not None)
            except TrunklineError as error:
                _fail(error)
            except DATABASE_AWAY as error:  # after check(): it went away meanwhile
                _fail(DatabaseUnreachable(first_line(error)))

        def stop(self, parent: Any) -> None:
            owner.stop()
            database.close()

        terminate = stop

    return EngineStep


try:
    app = _build()
except TrunklineError as error:
    _fail(error)
