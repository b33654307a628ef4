"""Child processes: started so that they die with this process, stopped by pid and never by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
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
        stdin=subprocess.DEVNULL,
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


def stop(child: subprocess.Popen[bytes], *, first: signal.Signals, grace_seconds: float) -> bool:
    """Send `first`, wait, then SIGKILL the child and its descendants. True when the first signal was enough."""
    if child.poll() is not None:
        return True
    descendants = _descendants(child.pid)
    child.send_signal(first)
    try:
        child.wait(timeout=grace_seconds)
        gentle = True
    except subprocess.TimeoutExpired:
        descendants += [process for process in _descendants(child.pid) if process not in descendants]
        child.kill()
        child.wait()
        gentle = False
    end_survivors(descendants)
    return gentle


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
    return alive
