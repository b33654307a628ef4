"""The one definition of Trunkline's processes; the Procfile, `trunkline up` and `python -m service run` all read it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from service.broker import CONTROL_QUEUE, WORKER_THREADS, instance_queue
from service.errors import SettingError
from service.fleet import load_instances
from service.settings import Settings

SERVERS = "servers"
WORKERS = "workers"  # the Procfile's one line for all workers of this host
_WORKER_PREFIX = "worker-"
_STOP_SECONDS = 15.0
_SERVERS_STOP_SECONDS = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process: its command, what it adds to the environment, and how long it may take to stop."""

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    stop_rank: int  # lower ranks are stopped first
    stop_seconds: float = _STOP_SECONDS


def servers_process() -> Process:
    """Embedded servers (those whose URL is not set) and the migration."""
    return Process(name=SERVERS, argv=_service("servers"), stop_rank=2, stop_seconds=_SERVERS_STOP_SECONDS)


def common_processes(settings: Settings) -> list[Process]:
    """What every host runs beside its workers."""
    return [
        Process(name="api", argv=_service("api"), stop_rank=1),
        Process(name="control", argv=_control_argv(settings), stop_rank=1),
        Process(name="dispatcher", argv=_service("dispatch"), stop_rank=1),
        _flower(settings),
    ]


def worker_processes(settings: Settings) -> list[Process]:
    """One for each engine instance of this host; none where this host has no INSTANCES file."""
    if settings.instances_file is None and not settings.instances_path.exists():
        return []
    return [
        Process(
            name=f"{_WORKER_PREFIX}{name}",
            argv=_worker_argv(settings, name),
            environment={"TRUNKLINE_INSTANCE": name},
            stop_rank=0,
            stop_seconds=settings.drain_seconds + _STOP_SECONDS,
        )
        for name in load_instances(settings.instances_path)
    ]


def find_process(settings: Settings, name: str) -> Process:
    """Raises SettingError, naming what there is."""
    known = {process.name: process for process in (*common_processes(settings), *worker_processes(settings))}
    if name not in known:
        raise SettingError(f"There is no process {name}; known are {', '.join(known)}.")
    return known[name]


def procfile(settings: Settings) -> str:
    """The text of ./Procfile: the same on every host, because `workers` reads INSTANCES when it starts."""
    lines = [f"{SERVERS}: python -m service {SERVERS}"]
    lines += [f"{process.name}: python -m service run {process.name}" for process in common_processes(settings)]
    lines += [f"{WORKERS}: python -m service run {WORKERS}"]
    return "\n".join(lines) + "\n"


def flower_address(settings: Settings) -> str:
    """Flower shows what runs where, so without a password it stays on loopback."""
    return settings.host if settings.flower_auth else "127.0.0.1"


def _service(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "service", command)


def _celery(app: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", app, *arguments)


def _control_argv(settings: Settings) -> tuple[str, ...]:
    options = ("-Q", CONTROL_QUEUE, "-n", "control@%h", "-P", "threads", "-c", "4", "-l", settings.log_level)
    return _celery("service.celery_app", "worker", *options)


def _worker_argv(settings: Settings, name: str) -> tuple[str, ...]:
    options = ("-P", "threads", "-c", str(WORKER_THREADS), "-Q", instance_queue(name), "-n", f"{name}@%h")
    return _celery("workers.celery_app", "worker", *options, "-l", settings.log_level)


def _flower(settings: Settings) -> Process:
    address = (f"--address={flower_address(settings)}", f"--port={settings.flower_port}")
    secret = {"FLOWER_BASIC_AUTH": settings.flower_auth} if settings.flower_auth else {}
    argv = _celery("service.celery_app", "--quiet", "flower", *address)
    return Process(name="flower", argv=argv, environment=secret, stop_rank=1)
