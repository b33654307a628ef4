"""`trunkline up` and the Procfile: everything starts, what dies comes back, nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from worker_processes import wait_until

from service.ports import free_port
from service.processes import procfile
from service.settings import Settings

ROOT = Path(__file__).parents[2]
UP = [sys.executable, "-m", "trunkline", "up"]
HONCHO = [sys.executable, "-m", "honcho", "start", "-f", str(ROOT / "Procfile")]


class Running:
    """A started command, what it prints, and its whole family of processes."""

    def __init__(self, argv: list[str], environment: dict[str, str], output: Path) -> None:
        self.port = int(environment["TRUNKLINE_PORT"])
        self.output = output
        self.logs = Path(environment["TRUNKLINE_STATE"]) / "logs"
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                argv, env=environment, stdout=file, stderr=file, start_new_session=True, cwd=ROOT
            )
        self.seen: set[psutil.Process] = set()

    def family(self) -> list[psutil.Process]:
        try:
            self.seen |= set(psutil.Process(self.popen.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []
        return [process for process in self.seen if process.is_running()]

    def child(self, *words: str) -> psutil.Process | None:
        for process in self.family():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if all(word in line for word in words):
                return process
        return None

    def names(self, part: str) -> bool:
        """A process of this family shows `part` in its title (Celery writes its own over the command line)."""
        for process in self.family():
            try:
                if part in " ".join(process.cmdline()):
                    return True
            except psutil.Error:
                continue
        return False

    def instances(self) -> int:
        """How many ready instances the API says that the model has."""
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=5)
        except httpx.TransportError:
            return 0
        models = answer.json()["data"] if answer.status_code == 200 else []
        return sum(model["instances"] for model in models)

    def wait_serving(self) -> None:
        def serving() -> bool:
            assert self.popen.poll() is None, self.text()
            self.family()
            return self.instances() == 1

        wait_until(serving, 120, self.text)

    def wait_gone(self, seconds: float) -> None:
        _, alive = psutil.wait_procs(list(self.seen), timeout=seconds)
        assert [process.pid for process in alive] == [], self.text()

    def text(self) -> str:
        parts = [self.output.read_text(errors="replace")]
        parts += [f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.logs.glob("*.log")]
        return "\n".join(parts)


@pytest.fixture
def environment(state_base: Path) -> dict[str, str]:
    """A host with one simulated instance, on ports of its own."""
    folder = Path(tempfile.mkdtemp(prefix="up [it] ", dir=state_base))
    folder.chmod(0o711)
    (folder / "models.toml").write_text("[models.toy]\n")
    (folder / "instances.toml").write_text('[instances.s0]\nengine = "simulated"\nmodel = "toy"\n')
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRUNKLINE_STATE": str(folder),
        "TRUNKLINE_PORT": str(free_port()),
        "TRUNKLINE_FLOWER_PORT": str(free_port()),
        "TRUNKLINE_DRAIN_SECONDS": "3",
    }


Start = Callable[[list[str]], Running]


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts commands in that environment, and leaves none of them behind."""
    started: list[Running] = []

    def run(argv: list[str]) -> Running:
        started.append(Running(argv, environment, tmp_path / f"output{len(started)}"))
        return started[-1]

    yield run
    for running in started:
        family = running.family()
        running.popen.kill()
        running.popen.wait()
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, timeout=10)


def test_up_restarts_what_dies_and_leaves_nothing(start: Start) -> None:
    up = start(UP)
    up.wait_serving()
    api = up.child("service", "api")
    assert api is not None
    api.kill()
    psutil.wait_procs([api], timeout=10)
    up.wait_serving()
    assert up.child("service", "api") != api

    up.popen.send_signal(signal.SIGTERM)
    assert up.popen.wait(timeout=90) == 0
    up.wait_gone(seconds=1)


def test_kill_9_of_up_takes_everything_along_and_it_starts_again(start: Start) -> None:
    first = start(UP)
    first.wait_serving()
    first.popen.kill()
    first.wait_gone(seconds=20)

    second = start(UP)
    second.wait_serving()


def test_the_procfile_runs_the_same_on_a_fresh_machine(start: Start) -> None:
    honcho = start(HONCHO)
    honcho.wait_serving()
    assert honcho.names("control@")
    assert honcho.child("flower") is not None
    honcho.popen.send_signal(signal.SIGTERM)
    honcho.popen.wait(timeout=60)
    honcho.wait_gone(seconds=20)


def test_the_procfile_is_what_processes_says() -> None:
    assert (ROOT / "Procfile").read_text() == procfile(Settings())


def test_a_wrong_entry_stops_everything_with_its_sentence(start: Start, environment: dict[str, str]) -> None:
    fleet = Path(environment["TRUNKLINE_STATE"]) / "instances.toml"
    fleet.write_text('[instances.s0]\nengine = "simulated"\nmodel = "absent"\n')
    up = start(UP)
    up.popen.wait(timeout=120)
    assert up.popen.returncode != 0
    last = up.output.read_text().strip().splitlines()[-1]
    assert "[instances.s0] model: 'absent' is not in MODELS" in last
    assert "Traceback" not in up.output.read_text()


@pytest.mark.parametrize(
    ("name", "value", "status", "sentence"),
    [
        ("DATABASE_URL", "postgresql://nobody:x@127.0.0.1:1/none", 1, "DATABASE_URL"),
        ("DATABASE_URL", "not a url", 2, "DATABASE_URL is not a database URL"),
        ("MODELS", "/nowhere/models.toml", 2, "MODELS: /nowhere/models.toml cannot be read"),
        ("BROKER_URL", "rubbish", 2, "BROKER_URL must start with redis://"),
        ("BROKER_URL", "redis://127.0.0.1:1/0", 1, "The broker does not answer; check BROKER_URL."),
        ("TRUNKLINE_STATE", "/etc/hostname", 2, "TRUNKLINE_STATE: /etc/hostname cannot be used"),
        ("TRUNKLINE_PROT", "1", 2, "TRUNKLINE_PROT is no setting of Trunkline"),
        ("TRUNKLINE_PORT", "eight", 2, "TRUNKLINE_PORT is 'eight'"),
    ],
)
def test_bad_settings_are_one_sentence(
    environment: dict[str, str], name: str, value: str, status: int, sentence: str
) -> None:
    done = subprocess.run(
        UP, env={**environment, name: value}, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert sentence in done.stderr.strip().splitlines()[-1]


def test_a_taken_port_names_the_setting(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(environment["TRUNKLINE_PORT"])))
        taken.listen()
        done = subprocess.run(UP, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "set TRUNKLINE_PORT" in done.stderr
