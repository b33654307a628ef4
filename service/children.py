"""Child processes: started so that they die with this process, stopped by pid and never by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The operating system user that a child drops to."""

    name: str
    uid: int
    gid: int


def spawn(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    death_signal: signal.Signals = signal.SIGKILL,
    account: Account | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that gets `death_signal` when this process dies, even by SIGKILL.

    Linux ties the signal to the *thread* that forks, so call this from a thread that lives as long as the process.
    """
    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        start_new_session=True,
        preexec_fn=_before_exec(death_signal, account, os.getpid()),
    )


def _before_exec(death_signal: signal.Signals, account: Account | None, parent: int) -> Callable[[], None]:
    def prepare() -> None:
        # First the user: a change of credentials clears the death signal.
        if account is not None:
            os.setgroups([])
            os.setgid(account.gid)
            os.setuid(account.uid)
        _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and here
            os._exit(1)

    return prepare


def stop(child: subprocess.Popen[bytes], *, first: signal.Signals, grace_seconds: float) -> None:
    """Send `first`, wait, then SIGKILL the child and whatever it started. A child that is gone already is fine."""
    stop_all([(child, grace_seconds)], first=first)


def stop_all(
    children: Sequence[tuple[subprocess.Popen[bytes], float]], *, first: signal.Signals = signal.SIGTERM
) -> None:
    """The same for several at once, each with its own grace in seconds."""
    families: list[psutil.Process] = []
    for child, _ in children:
        if child.poll() is None:
            families += _descendants(child.pid)
            child.send_signal(first)
    started = time.monotonic()
    for child, grace_seconds in children:
        try:
            child.wait(timeout=max(0.0, started + grace_seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            families += _descendants(child.pid)
            child.kill()
            child.wait()
    end_survivors(families)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def family() -> list[psutil.Process]:
    """Everything that this process started and that still runs, at any depth."""
    return _descendants(os.getpid())


def end_survivors(processes: Sequence[psutil.Process], *, grace_seconds: float = 5.0) -> list[psutil.Process]:
    """Wait for processes that should be going, SIGKILL what stays; returns what was killed.

    psutil compares start times, so a reused pid is never hit.
    """
    _, alive = psutil.wait_procs(list(processes), timeout=grace_seconds)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=grace_seconds)
    return list(alive)
