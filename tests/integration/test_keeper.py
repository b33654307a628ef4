"""The keeper ends everything that an engine started, whoever of the three dies first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import GENERATIONS

from workers.engines.tree import ProcessId, end_recorded, identify, is_alive, load_record, save_record

FAKE = Path(__file__).with_name("fake_engine.py")
LIMIT_SECONDS = 5.0  # nothing may be left this long after a death


class Kept:
    """A fake engine under a keeper, every process of it up and recorded."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "run" / "engine.json"
        argv = [sys.executable, "-m", "workers.engines.keeper", "--record", str(self.record), "--grace", "0.5", "--"]
        argv += [sys.executable, str(FAKE), str(folder), "server"]
        self.keeper = subprocess.Popen(argv, stdin=subprocess.PIPE)
        wait_until(lambda: all((folder / name).exists() for name in GENERATIONS))
        self.pids = {name: int((folder / name).read_text()) for name in GENERATIONS}
        found = [identify(pid) for pid in (self.keeper.pid, *self.pids.values())]
        self.family = [process for process in found if process is not None]
        assert len(self.family) == 4
        wait_until(lambda: set(load_record(self.record)) == set(self.family))

    def living(self) -> list[ProcessId]:
        self.keeper.poll()
        return [process for process in self.family if is_alive(process)]

    def assert_all_gone(self) -> None:
        wait_until(lambda: not self.living())
        assert self.keeper.wait(1) is not None
        assert not self.record.exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    folder = tmp_path / "with a space"
    folder.mkdir()
    kept = Kept(folder)
    yield kept
    for process in kept.living():
        os.kill(process.pid, signal.SIGKILL)
    kept.keeper.wait(5)


def test_the_pipe_ends_when_the_worker_dies(kept: Kept) -> None:
    assert kept.keeper.stdin is not None
    kept.keeper.stdin.close()
    kept.assert_all_gone()


def test_a_killed_server_takes_its_orphans_along(kept: Kept) -> None:
    os.kill(kept.pids["server"], signal.SIGKILL)
    kept.assert_all_gone()
    assert kept.keeper.returncode == 128 + signal.SIGKILL


def test_sigterm_ends_everything(kept: Kept) -> None:
    kept.keeper.terminate()
    kept.assert_all_gone()


def test_a_killed_core_ends_nothing_else(kept: Kept) -> None:
    """What its server does about it is its own affair; the orphaned worker stays in the keeper's care."""
    os.kill(kept.pids["core"], signal.SIGKILL)
    wait_until(lambda: len(load_record(kept.record)) == 3)
    assert {process.pid for process in kept.living()} == {kept.keeper.pid, kept.pids["server"], kept.pids["worker"]}
    kept.keeper.terminate()
    kept.assert_all_gone()


def test_survivors_of_a_killed_keeper_are_ended_by_the_next_boot(kept: Kept) -> None:
    kept.keeper.kill()
    kept.keeper.wait()
    wait_until(lambda: len(kept.living()) == 2)  # the server got the keeper's death signal
    assert end_recorded(kept.record, grace_seconds=0.2) == 2
    kept.assert_all_gone()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    record = tmp_path / "engine.json"
    myself = identify(os.getpid())
    assert myself is not None
    save_record(record, [ProcessId(pid=myself.pid, started_ticks=myself.started_ticks - 1)])
    assert end_recorded(record, grace_seconds=0) == 0


def test_a_record_of_another_machine_boot_is_void(tmp_path: Path) -> None:
    record = tmp_path / "engine.json"
    myself = identify(os.getpid())
    assert myself is not None
    save_record(record, [myself])
    record.write_text(json.dumps({**json.loads(record.read_text()), "machine_boot": "another"}))
    assert end_recorded(record, grace_seconds=0) == 0


def test_the_exit_status_is_the_engines(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "workers.engines.keeper", "--record", str(tmp_path / "r"), "--"]
    for engine, status in ((["/bin/sh", "-c", "exit 7"], 7), (["/no/such/program"], 127)):
        kept = subprocess.Popen([*argv, *engine], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert kept.wait(LIMIT_SECONDS) == status
        kept.communicate()
