"""Trunkline's own processes for a measurement: embedded servers, loopback ports, a folder that is gone afterwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from service.ports import free_port
from service.settings import Settings
from service.supervisor import Supervisor

_START_SECONDS = 180.0
_TURN_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What runs, and where. `wait` must be used for anything that takes long: it keeps the processes alive."""

    url: str
    settings: Settings
    supervisor: Supervisor
    http: httpx.Client

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"{what}: not within {seconds:.0f} s; logs are in {self.settings.state_folder / 'logs'}")
            self.supervisor.turn()
            time.sleep(_TURN_SECONDS)

    def ready_instances(self) -> int:
        try:
            listed = self.http.get("/v1/models").json()["data"]
        except httpx.TransportError:
            return 0
        return sum(int(model["instances"]) for model in listed)


@contextmanager
def running_stack(models: str, instances: str, count: int, **settings: object) -> Iterator[Stack]:
    """Up, with `count` instances ready; `models` and `instances` are the TOML files. Everything ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="trunkline-bench-"))
    folder.chmod(0o711)  # as root, Postgres runs as a user of its own
    state = folder / "state"
    state.mkdir(mode=0o711)
    made = Settings(state_folder=state, port=free_port(), flower_port=free_port(), **settings)  # type: ignore[arg-type]
    made.models_path.write_text(models)
    made.instances_path.write_text(instances)
    supervisor = Supervisor(made)
    url = f"http://127.0.0.1:{made.port}"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(supervisor.stop)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=120))
        supervisor.start_servers()
        supervisor.wait_servers()
        supervisor.start_rest()
        running = Stack(url=url, settings=made, supervisor=supervisor, http=http)
        running.wait(lambda: running.ready_instances() == count, _START_SECONDS, "the instances")
        yield running


@contextmanager
def fake_engines(count: int) -> Iterator[list[str]]:
    """The URLs of servers that compute nothing, each a process."""
    ports = [free_port() for _ in range(count)]
    processes = [subprocess.Popen([sys.executable, "-m", "bench.fake_engine", str(port)]) for port in ports]
    try:
        for port in ports:
            _await(f"http://127.0.0.1:{port}/v1/models")
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def _await(url: str) -> None:
    deadline = time.monotonic() + 30
    pause = threading.Event()
    while True:
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            pause.wait(0.05)
