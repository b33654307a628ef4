"""`trunkline up`: starts every process, restarts what exits, and leaves none behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from service.children import spawn, stop_all
from service.embedded import make_state_folder
from service.errors import PortTaken, SettingError, TrunklineError
from service.locks import take_lock
from service.ports import is_port_free
from service.processes import Process, common_processes, flower_address, servers_process, worker_processes
from service.ready import wait_ready
from service.settings import Settings, child_environment

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_SECONDS = 60.0  # who ran this long starts again at once
_BAD_SETTING_STATUS = SettingError.exit_status
_MAX_LOG_BYTES = 20_000_000


class ProcessFailed(TrunklineError):
    """A process stopped for good."""

    def __init__(self, detail: str, exit_status: int = 1) -> None:
        super().__init__(detail)
        self.exit_status = exit_status


class Child:
    """One supervised process: its present life, and when the next may start."""

    def __init__(self, process: Process, log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        self.popen: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self.exits = 0
        self._restart_at = 0.0

    def start(self, settings: Settings) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > _MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        environment = child_environment(settings, self.process.environment)
        with os.fdopen(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            self.popen = spawn(self.process.argv, environment=environment, output=output)
        self._started_at = time.monotonic()

    def turn(self, settings: Settings) -> None:
        """Notice an exit, start again when it is time. Raises ProcessFailed for a wrong setting."""
        if self.popen is not None and self.popen.poll() is not None:
            self._exited(self.popen.returncode)
        elif self.popen is None and time.monotonic() >= self._restart_at:
            self.start(settings)

    def _exited(self, status: int) -> None:
        self.popen = None
        if status == _BAD_SETTING_STATUS:
            raise ProcessFailed(f"{self.process.name}: {self.last_line()}", status)
        ran_seconds = time.monotonic() - self._started_at
        self.exits = 0 if ran_seconds > _STEADY_SECONDS else self.exits + 1
        pause = _BACKOFF_SECONDS[min(self.exits, len(_BACKOFF_SECONDS)) - 1] if self.exits else 0.0
        self._restart_at = time.monotonic() + pause
        log.warning("%s exited with status %d; again in %.0f s: %s", self.process.name, status, pause, self.log_path)

    def last_line(self) -> str:
        lines = tail(self.log_path, 1)
        return lines[-1] if lines else f"see {self.log_path}"


class Supervisor:
    """All processes of this host. Use from the main thread: children die with the thread that started them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._lock: int | None = None
        self.stopping = False

    def start_servers(self) -> None:
        """The servers' process (embedded servers and migration); returns before it is ready."""
        make_state_folder(self._settings.state_folder)
        if self._lock is None:
            self._lock = take_lock(self._settings.state_folder / "up.lock", "Trunkline")
        for name, host, port in (
            ("TRUNKLINE_PORT", self._settings.host, self._settings.port),
            ("TRUNKLINE_FLOWER_PORT", flower_address(self._settings), self._settings.flower_port),
        ):
            if not is_port_free(port, host):
                raise PortTaken(f"Nothing else may use {host}:{port}, or set {name}.")
        self._start([servers_process()])

    def wait_servers(self) -> None:
        """Raises ProcessFailed when they cannot start, rather than trying for ever."""
        servers = self._children[0]

        def check() -> None:
            if self.stopping:
                raise ProcessFailed("(told to stop while starting)")
            if servers.popen is not None and servers.popen.poll() is not None:
                raise ProcessFailed(f"{servers.process.name}: {servers.last_line()}", servers.popen.returncode)

        wait_ready(self._settings, while_waiting=check)

    def start_rest(self) -> None:
        """Everything else, once the servers answer."""
        self._start([*common_processes(self._settings), *worker_processes(self._settings)])

    def start_workers(self) -> int:
        """Only this host's workers; returns how many there are."""
        workers = worker_processes(self._settings)
        self._start(workers)
        return len(workers)

    def turn(self) -> None:
        """One look at every child; call it several times a second."""
        for child in self._children:
            child.turn(self._settings)

    def run_until_stopped(self) -> None:
        while not self.stopping:
            self.turn()
            time.sleep(_POLL_SECONDS)

    def pids(self) -> dict[str, int]:
        return {child.process.name: child.popen.pid for child in self._children if child.popen is not None}

    def exits(self) -> dict[str, int]:
        """How often each process exited since it last ran steadily."""
        return {child.process.name: child.exits for child in self._children}

    def log_of(self, name: str) -> Path:
        return self._settings.state_folder / "logs" / f"{name}.log"

    def stop(self) -> None:
        """Workers drain, then the rest, then the servers; each rank in parallel. Idempotent."""
        for rank in sorted({child.process.stop_rank for child in self._children}):
            living = [
                (child.popen, child.process.stop_seconds)
                for child in self._children
                if child.process.stop_rank == rank and child.popen is not None
            ]
            stop_all(living)
        self._children.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start(self, processes: Iterable[Process]) -> None:
        for process in processes:
            child = Child(process, self.log_of(process.name))
            self._children.append(child)
            child.start(self._settings)


def catch_signals(supervisor: Supervisor) -> None:
    """SIGTERM and SIGINT ask for an orderly stop."""

    def ask(number: int, frame: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def tail(path: Path, lines: int) -> list[str]:
    """The last non-blank lines of a log; few, so that a large file is not read whole."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
