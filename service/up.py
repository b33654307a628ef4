"""`trunkline up`: everything on this machine, until it is told to stop."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from service.broker import CONTROL_QUEUE, check_broker, make_app
from service.connections import find_connections
from service.embedded import make_state_folder
from service.errors import SettingError
from service.fleet import load_instances, load_models
from service.processes import flower_address, worker_processes
from service.settings import Settings
from service.store import tenants
from service.store.session import Database
from service.supervisor import Supervisor, catch_signals

log = logging.getLogger(__name__)


def run_up(settings: Settings) -> None:
    """Returns after SIGTERM or SIGINT, with every process gone."""
    make_state_folder(settings.state_folder)
    check_files(settings)
    supervisor = Supervisor(settings)
    catch_signals(supervisor)
    try:
        supervisor.start_servers()
        supervisor.wait_servers()
        has_keys = check_services(settings)
        supervisor.start_rest()
        sys.stderr.write("\n".join([*addresses(settings), keys_line(has_keys)]) + "\n")
        supervisor.run_until_stopped()
    finally:
        supervisor.stop()


def check_files(settings: Settings) -> None:
    """Refuse before anything starts. Raises SettingError."""
    if settings.models_file is None and not settings.models_path.exists():
        raise SettingError(
            f"MODELS is not set and {settings.models_path} is not there: write it (docs/models.md), "
            "or run `trunkline demo` once, which makes one."
        )
    models = load_models(settings.models_path)
    if not worker_processes(settings):
        return
    for instance in load_instances(settings.instances_path).values():
        where = f"INSTANCES: [instances.{instance.name}]"
        if instance.model not in models.by_name:
            raise SettingError(f"{where} model: {instance.model!r} is not in MODELS.")
        is_path = instance.weights is not None and instance.weights.startswith(("/", ".", "~"))
        if is_path and not Path(str(instance.weights)).expanduser().exists():
            raise SettingError(f"{where} weights: {instance.weights} is not there.")


def check_services(settings: Settings) -> bool:
    """Refuse a broker that is down before anything waits for it; whether API keys are asked for."""
    connections = find_connections(settings)
    check_broker(make_app(settings, connections.broker_url, queue=CONTROL_QUEUE))
    database = Database(connections.database_url, pool_size=1)
    try:
        with database.transaction() as conn:
            return tenants.has_keys(conn)
    finally:
        database.close()


def keys_line(has_keys: bool) -> str:
    """Whether a client needs a key."""
    if has_keys:
        return "Keys     needed (trunkline keys list)"
    return "Keys     none is configured: loopback only, and no key is needed (trunkline keys create makes one)"


def addresses(settings: Settings) -> list[str]:
    """What to tell the person at the terminal."""
    lines = [
        f"API      http://{settings.host}:{settings.port}/v1",
        f"Flower   http://{flower_address(settings)}:{settings.flower_port}",
        f"Logs     {settings.state_folder / 'logs'}",
    ]
    workers = [process.name.removeprefix("worker-") for process in worker_processes(settings)]
    lines.append(
        f"Engines  {', '.join(workers)}" if workers else f"Engines  none: {settings.instances_path} is not there"
    )
    named = (("Postgres", settings.database_url), ("Valkey", settings.broker_url))
    embedded = [name for name, url in named if url is None]
    if embedded:
        lines.append(f"Data     {settings.state_folder} (embedded {' and '.join(embedded)}, loopback only)")
    return lines
