"""What `trunkline doctor` looks at, and what to do about each finding. It changes nothing but a probe in the store."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from service.broker import CONTROL_QUEUE, check_broker, instance_queue, make_app
from service.connections import Connections, find_connections
from service.core.accounting import AccountingBroken, Counts, check_batch_accounting, count_written
from service.core.alarm import ADVICE, Mismatch
from service.core.batchfile import iter_lines
from service.core.model import BatchStatus, BootState
from service.errors import StoreFailed, TrunklineError
from service.fleet import Instance, Models, load_instances, load_models
from service.leader import LEADER_LOCK
from service.migrate import check_schema
from service.settings import Settings
from service.store import clock, health, instances
from service.store.blobs import Blobs
from service.store.health import EndedBatch
from service.store.instances import Boot
from service.store.session import DATABASE_AWAY, Database, first_line

_OLDEST_POSTGRES = 150000
_CHECKED_BATCHES = 200  # the newest, by their counts
_CHECKED_FILES = 20  # of these, by what their files hold,
_CHECKED_BYTES = 256 * 2**20  # and no more than this in sum
_LONGEST_LINE_BYTES = 256 * 2**20
_OVERDUE_SECONDS = 60.0


class State(StrEnum):
    """Of one finding."""

    FINE = "fine"
    NOTE = "note"  # good to know; nothing need be done
    PROBLEM = "problem"  # something does not work, or works against the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `advice` is empty where there is nothing to do."""

    part: str
    state: State
    said: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything found, in the order of looking. `is_blind`: the database, which holds the rest, could not be read."""

    findings: tuple[Finding, ...]
    is_blind: bool = False

    @property
    def exit_status(self) -> int:
        """0 fine, 1 problems, 2 could not look."""
        if self.is_blind:
            return 2
        return int(any(finding.state is State.PROBLEM for finding in self.findings))


T = TypeVar("T")


def diagnose(settings: Settings, *, is_all: bool = False) -> Diagnosis:
    """Look at everything that can be looked at from here; with `is_all`, at every ended batch and its files. Raises
    SettingError where the settings do not even say where the servers are."""
    connections = find_connections(settings)
    models_file, served = _file("models", settings.models_path, load_models, Models({}))
    none: dict[str, Instance] = {}
    instances_file, mine = _file("instances file", settings.instances_path, load_instances, none)
    findings = [_versions(), models_file, instances_file, _broker(settings, connections), _store(settings)]
    database = Database(connections.database_url, pool_size=1, application_name="trunkline-doctor")
    try:
        for part, check, advice in (
            ("database", database.check, "Start Postgres, or correct DATABASE_URL."),
            ("schema", lambda: check_schema(database), "Run `trunkline migrate`."),
        ):
            finding = _tried(part, check, "as it should be", advice)
            findings.append(finding)
            if finding.state is State.PROBLEM:
                return Diagnosis(findings=tuple(findings), is_blind=True)
        with database.transaction() as conn:
            findings += _rows(conn, settings, served, mine)
            ended = health.ended_batches(conn, None if is_all else _CHECKED_BATCHES)
    except DATABASE_AWAY as error:
        gone = Finding(part="database", state=State.PROBLEM, said=f"went away while it was read {first_line(error)}")
        return Diagnosis(findings=(*findings, gone), is_blind=True)
    finally:
        database.close()
    works = any(finding.part == "store" and finding.state is State.FINE for finding in findings)
    blobs = Blobs(settings.store_location) if works else None
    findings += _accounting(ended, blobs, is_all=is_all)  # no transaction is open: files may take long to read
    return Diagnosis(findings=tuple(findings))


def _versions() -> Finding:
    named = ", ".join(f"{name} {version(name)}" for name in ("trunkline", "celery", "sqlalchemy"))
    return Finding(part="versions", state=State.FINE, said=f"{named}, Python {platform.python_version()}")


def _tried(part: str, check: Callable[[], None], fine: str, advice: str) -> Finding:
    try:
        check()
    except TrunklineError as error:
        return Finding(part=part, state=State.PROBLEM, said=str(error), advice=advice)
    return Finding(part=part, state=State.FINE, said=fine)


def _file(part: str, path: Path, load: Callable[[Path], T], nothing: T) -> tuple[Finding, T]:
    """MODELS or INSTANCES of this host, and what it says. A host of the API alone has no instances."""
    if not path.exists():
        return Finding(part=part, state=State.NOTE, said=f"{path} is not there: this host has none"), nothing
    try:
        return Finding(part=part, state=State.FINE, said=f"{path} is read"), load(path)
    except TrunklineError as error:
        return Finding(part=part, state=State.PROBLEM, said=str(error), advice=f"Correct {path}."), nothing


def _broker(settings: Settings, connections: Connections) -> Finding:
    app = make_app(settings, connections.broker_url, queue=CONTROL_QUEUE)
    advice = "Start the broker, or correct BROKER_URL. Nothing is lost meanwhile; work waits."
    return _tried("broker", lambda: check_broker(app), "answers", advice)


def _store(settings: Settings) -> Finding:
    advice = "Make STORE_URL a place that this user can write to, with room."
    return _tried("store", lambda: Blobs(settings.store_location).check(), "takes and gives back a file", advice)


def _rows(conn: sa.Connection, settings: Settings, served: Models, mine: dict[str, Instance]) -> list[Finding]:
    boots = instances.list_boots(conn)
    now = clock.now_ms(conn) / 1000
    return [
        *_postgres(conn),
        _leader(conn),
        *_control(conn),
        *_instances(boots, mine, settings, now),
        *_keys(boots, served),
        *_queues(conn, boots),
    ]


def _postgres(conn: sa.Connection) -> Iterator[Finding]:
    number = health.server_version(conn)
    said = f"Postgres {number // 10000}.{number % 10000}"
    if number < _OLDEST_POSTGRES:
        yield Finding(
            part="versions", state=State.PROBLEM, said=f"{said} is too old", advice="Use Postgres 15 or newer."
        )
    else:
        yield Finding(part="versions", state=State.FINE, said=said)


def _leader(conn: sa.Connection) -> Finding:
    if health.is_locked(conn, LEADER_LOCK):
        return Finding(part="dispatcher", state=State.FINE, said="one leads")
    advice = "Start one: `trunkline up`, or `python -m service dispatch`."
    return Finding(part="dispatcher", state=State.PROBLEM, said="none runs: nothing is planned or sent", advice=advice)


def _control(conn: sa.Connection) -> Iterator[Finding]:
    tasks = health.overdue_tasks(conn, _OVERDUE_SECONDS)
    if tasks.waiting:
        yield Finding(
            part="control",
            state=State.PROBLEM,
            said=f"{tasks.waiting} pieces of work wait for more than {_OVERDUE_SECONDS:.0f} s",
            advice="Start a control worker: `trunkline up`, or the line `control` of the Procfile.",
        )
    if tasks.dead:
        said = f"{tasks.dead} pieces of work were given up, and their batches are failed"
        yield Finding(part="control", state=State.NOTE, said=said, advice="The control worker's log says why.")
    if not tasks.waiting:
        yield Finding(part="control", state=State.FINE, said="no work is overdue")


def _instances(
    boots: list[Boot], mine: dict[str, Instance], settings: Settings, now_seconds: float
) -> Iterator[Finding]:
    """States and heartbeats of all hosts; what this host's file names and does not run."""
    for boot in boots:
        silent_seconds = now_seconds - _unix(boot.heartbeat_at)
        said = f"{boot.name}: {boot.state}, heartbeat {max(0.0, silent_seconds):.0f} s ago, {boot.running_jobs} jobs"
        if silent_seconds > settings.stale_boot_seconds:
            advice = f"Look at the log of its worker (process {boot.pid} on {boot.host}); start it again if it is gone."
            yield Finding(part="instances", state=State.PROBLEM, said=said, advice=advice)
        else:
            state = State.FINE if boot.state is BootState.READY else State.NOTE
            yield Finding(part="instances", state=state, said=said)
    for name in sorted(set(mine) - {boot.name for boot in boots}):
        advice = "Start its worker: `trunkline up`; its log in the state folder says why it ended."
        yield Finding(part="instances", state=State.PROBLEM, said=f"{name}: does not run", advice=advice)
    if not boots and not mine:
        advice = "Name engines in INSTANCES and run `trunkline up` on their host."
        yield Finding(part="instances", state=State.PROBLEM, said="none runs: nothing is answered", advice=advice)


def _unix(moment: datetime) -> float:
    return moment.timestamp()


def _keys(boots: list[Boot], served: Models) -> Iterator[Finding]:
    """Whether what the plan counts on is what each engine does."""
    for boot in boots:
        if boot.state is BootState.STARTING:
            continue
        if boot.key_agrees is False:
            alarm = Mismatch(boot.alarm) if boot.alarm else Mismatch.TOKENS
            advice = f"{boot.name}: {ADVICE[alarm]}."
            yield Finding(
                part="keys", state=State.PROBLEM, said=f"KEY MISMATCH on {boot.name} ({alarm})", advice=advice
            )
        elif boot.key_agrees:
            yield Finding(part="keys", state=State.FINE, said=f"{boot.name}: our tokens are the engine's")
        else:
            model = served.resolve(boot.model)
            has_tokenizer = model is not None and model.tokenizer is not None
            why = "the engine has no /tokenize" if has_tokenizer else "no tokenizer, keys are made of bytes"
            yield Finding(part="keys", state=State.NOTE, said=f"{boot.name}: tokens not compared, {why}")


def _queues(conn: sa.Connection, boots: list[Boot]) -> Iterator[Finding]:
    """Planned work that no worker can take, and whether anybody else could."""
    stranded = health.stranded_queues(conn)
    served = {boot.model for boot in boots}
    for queue in stranded:
        yield Finding(
            part="queues",
            state=State.PROBLEM,
            said=f"{queue.queue}: {queue.cohorts} cohorts have no worker since {queue.oldest_at:%Y-%m-%d %H:%M} UTC",
            advice="Start that instance again, or another of its model: the dispatcher then moves them there.",
        )
    missing = sorted(set(health.waiting_jobs_models(conn)) - served)
    if missing:
        said = f"no instance serves {', '.join(missing)}, for which work is planned"
        yield Finding(part="queues", state=State.PROBLEM, said=said, advice="Start an instance of it.")
    if not stranded and not missing:
        names = {instance_queue(boot.name) for boot in boots}
        yield Finding(part="queues", state=State.FINE, said=f"{len(names)} queues, each with its worker")


def _accounting(ended: list[EndedBatch], blobs: Blobs | None, *, is_all: bool) -> Iterator[Finding]:
    """Every line of the ended batches ended exactly once, and is in exactly one of their files.

    Files are read of the newest few, unless all were asked for; `blobs` is None where the store does not work.
    """
    broken, read, left_bytes = 0, 0, _CHECKED_BYTES
    for number, batch in enumerate(ended):
        has_room = is_all or (number < _CHECKED_FILES and batch.files_bytes <= left_bytes)
        has_files = batch.status is not BatchStatus.FAILED and not batch.is_missing_files
        reader = blobs if has_room and has_files else None
        try:
            check_batch_accounting(
                total=batch.total, counts=batch.counts, written=None if reader is None else _written(reader, batch)
            )
        except (AccountingBroken, StoreFailed) as error:
            broken += 1
            advice = _REPORT if isinstance(error, AccountingBroken) else _LOST
            yield Finding(part="accounting", state=State.PROBLEM, said=f"{batch.batch_id}: {error}", advice=advice)
        if reader is not None:
            read, left_bytes = read + 1, left_bytes - batch.files_bytes
    if not broken:
        said = f"every line of {len(ended)} ended batches ended once; the files of {read} were read and say the same"
        yield Finding(part="accounting", state=State.FINE, said=said)


def _written(blobs: Blobs, batch: EndedBatch) -> Counts:
    """What a batch's files say. Raises StoreFailed, AccountingBroken."""

    def lines(path: str | None) -> Iterator[bytes]:
        chunks = iter(()) if path is None else blobs.read(path)
        return (line.raw or b"" for line in iter_lines(chunks, limit_bytes=_LONGEST_LINE_BYTES))

    try:
        return count_written(lines(batch.output_path), lines(batch.error_path))
    except ValueError as error:
        raise AccountingBroken("its error file holds a line that is no result line") from error


_LOST = "Bring the files of STORE_URL back: a tenant cannot read the results of this batch."
_REPORT = "This is a defect of Trunkline: keep the database and report it with the batch's id."
