"""A tree of processes, read from /proc: who descends from whom, and how to end them all. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A pid with its start time in clock ticks since boot: a reused pid is another process."""

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    parent: int
    state: str
    started_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None where there is none, or only its zombie."""
    stat = _read_stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessId(pid=pid, started_ticks=stat.started_ticks)


def is_alive(process: ProcessId) -> bool:
    """Whether that very process still runs; a zombie holds neither memory nor port and does not count."""
    return identify(process.pid) == process


def descendants(roots: Iterable[int]) -> list[ProcessId]:
    """Every living process below `roots` (which are not in it), parents before children."""
    stats = {int(entry.name): _read_stat(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit()}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    found: list[ProcessId] = []
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(0), []):
            stat = stats[child]
            todo.append(child)
            if stat is not None and stat.state not in "ZX":
                found.append(ProcessId(pid=child, started_ticks=stat.started_ticks))
    return found


def end_all(find: Callable[[], Sequence[ProcessId]], *, grace_seconds: float) -> None:
    """SIGTERM to what `find` returns, SIGKILL to what is left after the grace; returns when it finds nothing.

    `find` is asked again and again, since a process may start another while it is being ended.
    """
    termed: set[ProcessId] = set()
    deadline = time.monotonic() + grace_seconds
    while living := find():
        late = time.monotonic() >= deadline
        for process in living:
            if late:
                send(process, signal.SIGKILL)
            elif process not in termed:
                termed.add(process)
                send(process, signal.SIGTERM)
        time.sleep(_POLL_SECONDS)


def send(process: ProcessId, number: signal.Signals) -> None:
    """A signal to that very process; nothing where it has ended."""
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def save_record(path: Path, processes: Sequence[ProcessId]) -> None:
    """Write down who belongs to an engine, whole or not at all, so that a later process can end survivors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    pairs = [[process.pid, process.started_ticks] for process in processes]
    draft.write_text(json.dumps({"machine_boot": _machine_boot(), "processes": pairs}), encoding="utf-8")
    draft.replace(path)


def load_record(path: Path) -> list[ProcessId]:
    """Who was written down. Empty where there is no record, it is unreadable, or the machine has booted since."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["machine_boot"] != _machine_boot():
            return []
        return [ProcessId(pid=int(pid), started_ticks=int(ticks)) for pid, ticks in record["processes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def end_recorded(path: Path, *, grace_seconds: float) -> int:
    """End every recorded process that still lives, with what it started; return how many there were."""
    recorded = load_record(path)
    survivors = [process for process in recorded if is_alive(process)]

    def living() -> list[ProcessId]:
        roots = [process for process in recorded if is_alive(process)]
        return list(dict.fromkeys([*roots, *descendants(process.pid for process in roots)]))

    end_all(living, grace_seconds=grace_seconds)
    path.unlink(missing_ok=True)
    return len(survivors)


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses: count from the last one.
    rest = text[text.rindex(")") + 2 :].split()
    return _Stat(state=rest[0], parent=int(rest[1]), started_ticks=int(rest[19]))


def _machine_boot() -> str:
    """Changes when the machine boots: pids and ticks of another boot mean nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
