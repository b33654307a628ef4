"""Worker and dispatcher processes for end-to-end tests, started as `trunkline up` starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from seeds import MODEL

from service.children import spawn
from service.processes import worker_processes
from service.settings import Settings, child_environment
from service.store.session import Database
from service.store.tables import cohort, instance_boot, job_result

# Fast enough for a test, slow enough to be killed in the middle: see each test for its `speed`.
OPTIONS = "kv_capacity_tokens = 4096, block_size = 32, max_num_seqs = 16, prefill_tokens_per_second = 4000"


def write_fleet(settings: Settings, *, speed: float, names: tuple[str, ...] = ("one",)) -> None:
    """MODELS and INSTANCES with simulated engines."""
    settings.state_folder.mkdir(parents=True, exist_ok=True)
    settings.models_path.write_text(f"[models.{MODEL}]\n")
    tables = [
        f'[instances.{name}]\nengine = "simulated"\nmodel = "{MODEL}"\noptions = {{ {OPTIONS}, speed = {speed} }}\n'
        for name in names
    ]
    settings.instances_path.write_text("\n".join(tables))


class Worker:
    """One worker process and its log."""

    def __init__(self, settings: Settings, name: str = "one") -> None:
        process = next(item for item in worker_processes(settings) if item.name == f"worker-{name}")
        self.log_path = settings.state_folder / f"worker-{name}-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as output:
            environment = child_environment(settings, process.environment)
            self.popen = spawn(process.argv, environment=environment, output=output)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def terminate(self, seconds: float = 20) -> int:
        self.popen.terminate()
        return self.popen.wait(seconds)


@contextmanager
def running(*argv: str, settings: Settings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGV...` while the block runs."""
    with log.open("wb") as output:
        popen = spawn([sys.executable, *argv], environment=child_environment(settings), output=output)
    try:
        yield popen
    finally:
        popen.terminate()
        popen.wait(20)


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str] = lambda: "") -> None:
    """Look again and again until it holds; fail with `what()` when the time is up."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what()
        pause.wait(0.05)


def count_results(database: Database) -> int:
    with database.transaction() as conn:
        return int(conn.execute(sa.select(sa.func.count()).select_from(job_result)).scalar_one())


def states(database: Database, table: sa.Table) -> list[str]:
    with database.transaction() as conn:
        return list(conn.execute(sa.select(table.c.state).order_by(table.c.id)).scalars())


def boot_states(database: Database) -> list[str]:
    return states(database, instance_boot)


def cohort_states(database: Database) -> list[str]:
    return states(database, cohort)
