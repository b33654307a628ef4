"""`python -m service COMMAND`: what the processes are started with. People use `trunkline`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from service.connections import find_connections
from service.errors import TrunklineError, UsageError
from service.logs import set_up_logging
from service.migrate import upgrade
from service.processes import WORKERS, find_process, procfile
from service.ready import wait_ready
from service.servers import run_servers
from service.settings import Settings, child_environment, describe_settings, read_settings
from service.supervisor import Supervisor, catch_signals

log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """The exit status. A TrunklineError is one sentence on stderr."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if command not in COMMANDS or len(rest) > (command == "run"):
            raise UsageError(f"Known are: python -m service {'|'.join(COMMANDS)}; `run` takes a process's name.")
        settings = read_settings()
        set_up_logging(settings)
        COMMANDS[command](settings, *rest)
    except TrunklineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


def _api(settings: Settings) -> None:
    from service.api.server import serve

    serve(settings)


def _dispatch(settings: Settings) -> None:
    from service.dispatcher import main as dispatch

    dispatch(settings)


def _migrate(settings: Settings) -> None:
    upgrade(find_connections(settings).database_url)


def _run(settings: Settings, name: str = "") -> None:
    """Wait for the servers, then become process `name` (for the Procfile); `workers` runs all workers of this host."""
    if name == WORKERS:
        _run_workers(settings)
        return
    process = find_process(settings, name)
    wait_ready(settings)
    os.execve(process.argv[0], process.argv, child_environment(settings, process.environment))


def _run_workers(settings: Settings) -> None:
    supervisor = Supervisor(settings)
    catch_signals(supervisor)
    try:
        wait_ready(settings)
        if not supervisor.start_workers():
            log.warning("no worker is started: %s is not there", settings.instances_path)
        supervisor.run_until_stopped()
    finally:
        supervisor.stop()


def _procfile(settings: Settings) -> None:
    sys.stdout.write(procfile(settings))


def _settings(settings: Settings) -> None:
    """Every setting as a Markdown table; docs/settings.md is this."""
    sys.stdout.write("| variable | default | what it does |\n| --- | --- | --- |\n")
    for name, default, help_text, _ in describe_settings():
        sys.stdout.write(f"| `{name}` | {f'`{default}`' if default else ''} | {help_text} |\n")


COMMANDS: dict[str, Callable[..., None]] = {
    "api": _api,
    "dispatch": _dispatch,
    "migrate": _migrate,
    "servers": run_servers,
    "run": _run,
    "procfile": _procfile,
    "settings": _settings,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
