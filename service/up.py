"""`trunkline up`: everything on this machine, until it is told to stop."""

from __future__ import annotations

import logging
import sys

from service.errors import SettingError
from service.fleet import load_models
from service.processes import flower_address, worker_processes
from service.settings import Settings
from service.supervisor import Supervisor, catch_signals

log = logging.getLogger(__name__)


def run_up(settings: Settings) -> None:
    """Returns after SIGTERM or SIGINT, with every process gone."""
    check_files(settings)
    supervisor = Supervisor(settings)
    catch_signals(supervisor)
    try:
        supervisor.start_servers()
        supervisor.wait_servers()
        supervisor.start_rest()
        sys.stderr.write("\n".join(addresses(settings)) + "\n")
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
    load_models(settings.models_path)
    worker_processes(settings)


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
    if settings.database_url is None:
        lines.append(f"Data     {settings.state_folder} (embedded Postgres and Valkey, loopback only)")
    return lines
