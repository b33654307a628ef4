"""The embedded servers: started twice, killed, held by another, and gone with their starter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from service.connections import load_embedded
from service.embedded import EmbeddedServers
from service.errors import ServerFailed, SettingError
from service.postgres import server_account
from service.ready import wait_ready
from service.settings import Settings
from service.store.session import Database
from service.wheels import postgres_install

_HOLD = """
import sys
from pathlib import Path
from service.embedded import EmbeddedServers
from service.settings import Settings
servers = EmbeddedServers(Settings(state_folder=Path(sys.argv[1])), durable=False)
servers.start()
print(*servers.pids(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own(state_base: Path, request: pytest.FixtureRequest) -> Settings:
    return Settings(state_folder=state_base / f"own {request.node.name}")


@pytest.fixture
def holder(own: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that runs the servers of `own`."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(own.state_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield child
    if child.poll() is None:
        child.kill()
    child.communicate()


def _pids(holder: subprocess.Popen[bytes]) -> list[psutil.Process]:
    assert holder.stdout is not None
    return [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]


def test_both_answer_on_loopback_only_and_keep_ports_and_data(own: Settings) -> None:
    servers = EmbeddedServers(own, durable=False)
    first = servers.start()
    assert servers.dead() is None
    for pid in servers.pids():
        listening = [c for c in psutil.Process(pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    client = redis.Redis.from_url(first.broker_url)
    client.set("x", 1)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=first.valkey_port).get("x")
    servers.stop()

    with EmbeddedServers(own, durable=False):
        assert load_embedded(own) == first
        assert client.get("x") is None  # memory only
        database = Database(first.database_url, pool_size=1)
        database.check()
        database.close()
    client.close()


def test_nothing_is_readable_by_others(own: Settings) -> None:
    with EmbeddedServers(own, durable=False):
        pass
    opened = {
        path.relative_to(own.state_folder).as_posix()
        for path in (own.state_folder / "embedded.json", own.state_folder / "postgres", own.state_folder / "valkey")
        if path.stat().st_mode & 0o077
    }
    assert opened == set()


def test_a_second_starter_names_the_first(own: Settings, holder: subprocess.Popen[bytes]) -> None:
    _pids(holder)
    with pytest.raises(SettingError, match=f"TRUNKLINE_STATE: process {holder.pid} already runs the servers"):
        EmbeddedServers(own, durable=False).start()


def test_kill_9_of_the_starter_takes_the_servers_along_and_the_next_start_works(
    own: Settings, holder: subprocess.Popen[bytes]
) -> None:
    processes = _pids(holder)
    holder.kill()
    gone, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert len(gone) == 2
    with EmbeddedServers(own, durable=False) as servers:
        assert servers.dead() is None


def test_kill_9_of_postgres_is_recovered_from(own: Settings) -> None:
    servers = EmbeddedServers(own, durable=False)
    servers.start()
    postgres = psutil.Process(servers.pids()[0])
    postgres.kill()
    psutil.wait_procs([postgres], timeout=10)
    assert servers.dead() == "Postgres"
    servers.stop()
    assert (own.state_folder / "postgres" / "data" / "postmaster.pid").exists()
    with EmbeddedServers(own, durable=False) as again:
        assert again.dead() is None


def test_a_pid_file_that_names_a_stranger_is_no_obstacle(own: Settings) -> None:
    """After a reboot the pid in postmaster.pid may belong to anybody, even to a process of Postgres's own user."""
    with EmbeddedServers(own, durable=False):
        pid_file = own.state_folder / "postgres" / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
    account = server_account()
    stranger = subprocess.Popen(
        ["sleep", "600"], user=account.uid if account else None, start_new_session=True, cwd="/"
    )
    try:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        if account:
            os.chown(pid_file, account.uid, account.gid)
        with EmbeddedServers(own, durable=False) as servers:
            assert servers.dead() is None
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_lost_passwords_are_said_so(own: Settings) -> None:
    with EmbeddedServers(own, durable=False):
        pass
    (own.state_folder / "embedded.json").unlink()
    with pytest.raises(ServerFailed, match=r"embedded\.json is gone"):
        EmbeddedServers(own, durable=False).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_a_state_folder_that_postgres_cannot_reach_names_the_setting(state_base: Path) -> None:
    private = state_base / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(SettingError, match=r"TRUNKLINE_STATE: .* cannot be reached by the user trunkline"):
        EmbeddedServers(Settings(state_folder=private / "state"), durable=False).start()
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_binaries_that_postgres_s_user_cannot_read_are_copied_once(state_base: Path) -> None:
    """A .venv below /root: nobody else may enter it, and we do not open it."""
    private = state_base / "private venv"
    private.mkdir(mode=0o700)
    package = postgres_install().parent
    shutil.copytree(package, private / package.name)
    shutil.copytree(package.with_name(f"{package.name}.libs"), private / f"{package.name}.libs")
    state = state_base / "copied"
    for _ in range(2):
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(private)},
        )
        postgres = _pids(holder)[0]
        assert Path(postgres.exe()).is_relative_to(state)
        holder.communicate(b"")
        psutil.wait_procs([postgres], timeout=20)
    assert len(list(state.glob("postgres-software*"))) == 1
    assert private.stat().st_mode & 0o777 == 0o700


def test_only_what_has_no_url_is_started(state_base: Path) -> None:
    settings = Settings(state_folder=state_base / "half", database_url="postgresql://elsewhere/x")
    with EmbeddedServers(settings, durable=False) as servers:
        assert len(servers.pids()) == 1


def test_the_servers_process_migrates_and_stops_on_sigterm(own: Settings) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "service", "servers"],
        env={"PATH": os.environ["PATH"], "TRUNKLINE_STATE": str(own.state_folder)},
        stderr=subprocess.PIPE,
    )
    try:
        wait_ready(own, seconds=60)
        children = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
        assert [process for process in children if process.is_running()] == []
    finally:
        child.kill()
        child.communicate()
