"""`trunkline demo`: the whole path on real engines, from an input file to the table that proves the gain.

Nothing is cut short for it: the processes are those of `trunkline up`, and the batch goes through the HTTP API.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from service.children import end_survivors, family
from service.connections import find_connections
from service.core.model import BootState
from service.demo_files import input_file, prepare_model, write_fleet
from service.demo_report import Numbers, as_json_object, number_table, read_numbers, read_samples
from service.demo_screen import Screen
from service.errors import TrunklineError
from service.fleet import load_instances
from service.ports import free_port, is_port_free
from service.settings import Settings, default_state_folder
from service.store import tenants
from service.store.instances import list_boots
from service.store.session import Database
from service.supervisor import Supervisor, catch_signals, tail
from service.up import addresses
from trunkline import Batch, Client

_POLL_SECONDS = 0.2
_BATCH_POLL_SECONDS = 0.5
_MODEL_SECONDS = 900.0
_API_SECONDS = 90.0
_RESTARTS = 1  # a process of the demo that exits more often than this has failed


class DemoFailed(TrunklineError):
    """The demo did not get to its end."""


class DemoStopped(TrunklineError):
    """The demo was told to stop; everything it started was stopped."""

    exit_status = 130


def run_demo(settings: Settings, *, keep: bool, as_json: bool, file: Path | None) -> None:
    """Raises TrunklineError; whatever happens, no process is left."""
    source = input_file(file)
    settings = _with_free_ports(replace(settings, host="127.0.0.1"))
    console = Console(stderr=as_json)
    supervisor = Supervisor(settings)
    catch_signals(supervisor)
    with _everything_stopped(supervisor), Screen(console) as screen:
        demo = Demo(settings, supervisor, screen)
        numbers = demo.play(source)
        _show(console, numbers, source)
        if as_json:
            sys.stdout.write(json.dumps(as_json_object(numbers), indent=2) + "\n")
            sys.stdout.flush()
        _say_how_to_go_on(console, settings)
        if keep:
            console.print("Running until Ctrl-C.", *addresses(settings), sep="\n", highlight=False)
            supervisor.run_until_stopped()
    console.print("Everything is stopped; no process is left.", highlight=False)


class Demo:
    """One run. `seconds` collects how long each part took."""

    def __init__(self, settings: Settings, supervisor: Supervisor, screen: Screen) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._screen = screen
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    def play(self, source: Path) -> Numbers:
        """From nothing to numbers."""
        self._start_servers_and_model()
        self._start_engines()
        with self._open_client() as client:
            batch = self._answer(client, source)
            output_path = self._download(client, batch)
        memory_bytes = {name: _memory_bytes(pid) for name, pid in self._supervisor.pids().items()}
        self.seconds["total"] = time.monotonic() - self._started
        with self._database() as database, database.transaction() as conn:
            return read_numbers(
                conn, batch.id, seconds=self.seconds, memory_bytes=memory_bytes, output_path=output_path
            )

    def _start_servers_and_model(self) -> None:
        """Both at once: making the model takes half a minute the first time."""
        with self._timed("servers_and_model"):
            self._supervisor.start_servers()
            log_path = self._supervisor.log_of("model")
            model = prepare_model(self._settings, log_path)
            try:
                self._screen.step("starting Postgres and Valkey, preparing the model SmolLM2-135M-Instruct")
                self._supervisor.wait_servers()
                self._wait(lambda: model.poll() is not None, _MODEL_SECONDS, "the model", log_path)
            finally:
                if model.poll() is None:
                    model.kill()
                    model.wait()
            if model.returncode != 0:
                raise DemoFailed(f"The model could not be prepared: {_last(log_path)}")
            write_fleet(self._settings)
        self._screen.done(f"Postgres, Valkey and the model are there ({self.seconds['servers_and_model']:.0f} s).")

    def _start_engines(self) -> None:
        with self._timed("engines"):
            self._supervisor.start_rest()
            self._wait(self._api_answers, _API_SECONDS, "the API", self._supervisor.log_of("api"))
            names = list(load_instances(self._settings.instances_path))
            logs = self._supervisor.log_of(f"worker-{names[0]}")
            with self._database() as database:
                self._wait(
                    lambda: self._engines_ready(database, names),
                    self._settings.engine_start_seconds,
                    f"the engines {', '.join(names)}",
                    logs,
                )
        ready = (
            f"{len(names)} vLLM instances are ready on the CPU: {', '.join(names)} ({self.seconds['engines']:.0f} s)."
        )
        self._screen.done(ready)

    def _engines_ready(self, database: Database, names: list[str]) -> bool:
        with database.transaction() as conn:
            states = {boot.name: boot.state for boot in list_boots(conn)}
        waited = time.monotonic() - self._started
        shown = ", ".join(f"{name} {'ready' if states.get(name) is BootState.READY else 'loading'}" for name in names)
        self._screen.step(f"engines: {shown}  ({waited:.0f} s since the start)")
        return all(states.get(name) is BootState.READY for name in names)

    def _api_answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._settings.port}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    @contextmanager
    def _open_client(self) -> Iterator[Client]:
        """A client of this server; with a key made for this run where keys are asked for."""
        base_url = f"http://127.0.0.1:{self._settings.port}/v1"
        with self._database() as database:
            with database.transaction() as conn:
                key = tenants.create_key(conn, tenants.DEFAULT_TENANT, "demo") if tenants.has_keys(conn) else None
            try:
                with Client(base_url, key or "none-needed") as client:
                    yield client
            finally:
                if key is not None:
                    with database.transaction() as conn:
                        newest = max(found.id for found in tenants.list_keys(conn) if found.label == "demo")
                        tenants.revoke_key(conn, newest)

    def _answer(self, client: Client, source: Path) -> Batch:
        with self._timed("batch"):
            batch = client.batch(source, metadata={"source": source.name})
            self._screen.done(f"{source.name} is submitted as {batch.id}.")

            looked_at = 0.0

            def ended() -> bool:
                nonlocal batch, looked_at
                if time.monotonic() - looked_at < _BATCH_POLL_SECONDS:  # the engines have the same two cores
                    return False
                looked_at = time.monotonic()
                batch = client.get_batch(batch)
                self._screen.lines(batch)
                return batch.is_terminal

            self._wait(ended, 24 * 3600.0, "the batch", self._supervisor.log_of("dispatcher"))
        if batch.status != "completed":
            causes = "; ".join(str(error) for error in batch.line_errors[:3])
            raise DemoFailed(f"The batch {batch.id} is {batch.status}. {causes}")
        counts = batch.request_counts
        self._screen.done(
            f"{counts.completed} of {counts.total} lines answered, {counts.failed} failed "
            f"({self.seconds['batch']:.0f} s)."
        )
        if batch.output_file_id is None:
            raise DemoFailed(f"No line was answered; the logs are in {self._settings.state_folder / 'logs'}.")
        return batch

    def _download(self, client: Client, batch: Batch) -> Path:
        assert batch.output_file_id is not None
        path = self._settings.state_folder / "demo" / f"{batch.id}.output.jsonl"
        with path.open("wb") as file:
            for chunk in client.download(batch.output_file_id):
                file.write(chunk)
        return path

    def _wait(self, is_done: Callable[[], bool], seconds: float, what: str, log_path: Path) -> None:
        """Poll, keep the processes going meanwhile, and give up with the log's last line."""
        deadline = time.monotonic() + seconds
        while not is_done():
            if self._supervisor.stopping:
                raise DemoStopped
            self._supervisor.turn()
            for name, exits in self._supervisor.exits().items():
                if exits > _RESTARTS:
                    raise DemoFailed(f"{name} exits again and again: {_last(self._supervisor.log_of(name))}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"Waited {seconds:.0f} s for {what}: {_last(log_path)}")
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def _database(self) -> Iterator[Database]:
        url = find_connections(self._settings).database_url
        database = Database(url, pool_size=1, application_name="trunkline demo")
        try:
            yield database
        finally:
            database.close()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


@contextmanager
def _everything_stopped(supervisor: Supervisor) -> Iterator[None]:
    """Stop, then look by pid whether anything that was started is still there."""
    try:
        yield
    finally:
        started = family()
        supervisor.stop()
        left = end_survivors(started)
    if left:
        raise DemoFailed(f"These processes did not stop and were killed: {', '.join(str(p.pid) for p in left)}.")


def _with_free_ports(settings: Settings) -> Settings:
    """A demo does not fail because something else uses 8000 or 5555."""
    port = settings.port if is_port_free(settings.port) else free_port()
    flower_port = settings.flower_port if is_port_free(settings.flower_port) else free_port()
    return replace(settings, port=port, flower_port=flower_port)


def _memory_bytes(pid: int) -> int:
    """Of a process and what it started; shared pages are shared out (PSS)."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return total
    return total


def _last(log_path: Path) -> str:
    lines = tail(log_path, 1)
    return f"{lines[-1] if lines else 'its log is empty'} (log: {log_path})"


def _show(console: Console, numbers: Numbers, source: Path) -> None:
    console.print()
    console.print(number_table(numbers))
    for sample in read_samples(source, numbers.output_path):
        console.print(f"[bold]{sample.custom_id}[/bold]", highlight=False)
        console.print(f"  asked     {sample.question}", highlight=False, markup=False)
        console.print(f"  answered  {sample.answer}", highlight=False, markup=False)
    console.print(f"\nAll answers: {numbers.output_path}", highlight=False, markup=False, soft_wrap=True)


def _say_how_to_go_on(console: Console, settings: Settings) -> None:
    beside = Path(sys.executable).with_name("trunkline")
    words = [str(beside) if beside.exists() else "trunkline", "up"]
    if settings.state_folder != default_state_folder():
        words += ["--state", str(settings.state_folder)]
    console.print(f"To keep it running: {shlex.join(words)}", highlight=False, markup=False, soft_wrap=True)
