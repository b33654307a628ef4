"""The engine's keeper: a small parent process that ends everything the engine started when it is time.

    python -m workers.engines.keeper --record FILE [--grace SECONDS] -- ARGV...

It ends the whole tree (SIGTERM, then SIGKILL after the grace) when
- its standard input reaches its end: whoever held the other end of the pipe died. A pipe outlives the thread that
  forked, which PR_SET_PDEATHSIG does not: that one fires when the forking *thread* ends;
- the engine's first process exits or is killed: vLLM's EngineCore and its workers would live on under init;
- it gets SIGTERM, SIGINT or SIGHUP.

As a child subreaper it inherits the orphans of its tree, so "everything" is everything below it. FILE names each of
them, itself first, so that the next boot can end what is left should the keeper itself be killed. Standard library
only, so that it starts at once. Exit status: the engine's own, or 128 + its signal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.engines.tree import ProcessId, descendants, end_all, identify, save_record

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 1.0  # how often the record learns of new processes; only a killed keeper needs it
_DEFAULT_GRACE_SECONDS = 2.0  # a killed engine must leave nothing after 5 s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.engines.keeper")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--grace", type=float, default=_DEFAULT_GRACE_SECONDS)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args(arguments)
    if not sys.platform.startswith("linux"):
        parser.error("an engine is kept by /proc and prctl, which only Linux has.")
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _watch_signals()
    try:
        child = subprocess.Popen(
            options.argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_keeper
        )
    except OSError as error:
        sys.stderr.write(f"keeper: {options.argv[0]}: {error.strerror}\n")
        return 127
    status = _watch(child.pid, wakeup, options.record)
    return _end_tree(child.pid, status, options.record, options.grace)


def _die_with_keeper() -> None:
    """The keeper has one thread, so here PR_SET_PDEATHSIG means its death. Only the engine's first process gets it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _watch_signals() -> int:
    """A pipe that gets one byte, the signal's number, for each signal: nothing is missed between two looks."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return reader


def _watch(child: int, wakeup: int, record: Path) -> int | None:
    """Until it is time to end: the engine's exit status, or None where it still runs."""
    known: list[ProcessId] = []
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP | select.POLLERR)
    poller.register(wakeup, select.POLLIN)
    while True:
        known = _record(record, known)
        events = dict(poller.poll(_LOOK_SECONDS * 1000))
        if 0 in events and os.read(0, 1024) == b"":
            return None
        if wakeup in events:
            numbers = set(os.read(wakeup, 1024))
            status = _reap(child)
            if status is not None:
                return status
            if numbers - {signal.SIGCHLD}:
                return None


def _record(path: Path, known: list[ProcessId]) -> list[ProcessId]:
    myself = identify(os.getpid())
    assert myself is not None, "a running process has an entry in /proc"
    living = [myself, *descendants([myself.pid])]
    if living != known:
        save_record(path, living)
    return living


def _reap(child: int) -> int | None:
    """Collect every process that ended; the exit status of `child` where it is among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            raw = os.waitstatus_to_exitcode(code)
            status = raw if raw >= 0 else 128 - raw


def _end_tree(child: int, status: int | None, record: Path, grace: float) -> int:
    def living() -> list[ProcessId]:
        nonlocal status
        status = _first(_reap(child), status)
        return descendants([os.getpid()])

    end_all(living, grace_seconds=grace)
    record.unlink(missing_ok=True)
    return 0 if status is None else status


def _first(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
