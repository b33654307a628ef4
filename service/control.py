"""The control worker's loop body: claim a task, run its handler under a lease, record how it ended.

The message is a hint: where its task is held by another worker, not due, or done, the oldest that waits is taken.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import sqlalchemy as sa

from service.core.model import BatchStatus, TaskKind, TaskState
from service.errors import FenceLost, TrunklineError
from service.export import discard_outputs, run_export
from service.fleet import load_models
from service.intake import run_intake
from service.removal import run_delete
from service.settings import Settings
from service.settle import run_cancel, run_expire
from service.store import batches, control, webhooks
from service.store.blobs import Blobs
from service.store.control import ControlTask
from service.store.session import DATABASE_AWAY, Database
from service.tokenizing import Tokenizing
from service.webhooks import Outgoing, run_webhook, wait_for_room
from service.work import Interrupted, Work

log = logging.getLogger(__name__)

HANDLERS: dict[TaskKind, Callable[[Work, ControlTask], None]] = {
    TaskKind.INTAKE: run_intake,
    TaskKind.EXPORT: run_export,
    TaskKind.CANCEL: run_cancel,
    TaskKind.EXPIRE: run_expire,
    TaskKind.DELETE: run_delete,
    TaskKind.WEBHOOK: run_webhook,
}


def make_work(settings: Settings, database: Database) -> Work:
    """What the handlers need. Raises SettingError for MODELS or STORE_URL."""
    models = load_models(settings.models_path)
    return Work(
        settings=settings,
        database=database,
        blobs=Blobs(settings.store_location),
        models=models,
        tokenizing=Tokenizing(models, default_output_tokens=settings.default_output_tokens),
    )


def run_task(work: Work, task_id: int, outgoing: Outgoing | None = None) -> None:
    """Do what the hint asks for, or else the oldest work that waits. Handlers finish their task or give it back.

    With `outgoing` a webhook is only started here, and delivered in one of its threads.
    Raises only where the failure cannot be recorded (the database is away): the lease then runs out.
    """
    lease_seconds = work.settings.task_lease_seconds

    def claim(conn: sa.Connection) -> ControlTask | None:
        return control.claim_task(conn, task_id, lease_seconds) or control.claim_next_task(conn, lease_seconds)

    task = work.database.run(claim)
    if task is None:
        return
    if task.is_exhausted:
        _record_failure(work, task, "its worker died too often")
    elif task.kind != TaskKind.WEBHOOK or outgoing is None:
        _run_claimed(work, task)
    elif not outgoing.start(partial(_run_claimed, work, task)):
        wait_for_room(work, task)


def _run_claimed(work: Work, task: ControlTask) -> None:
    try:
        with _kept_lease(work, task):
            HANDLERS[task.kind](work, task)
    except FenceLost as error:
        log.warning("control task %d: %s", task.id, error)
    except Interrupted:
        work.database.run(lambda conn: control.reschedule_task(conn, task, 0.0))
    except Exception as error:  # noqa: BLE001 - the process loop: whatever a handler raises is recorded and retried
        _record_failure(work, task, describe_error(error))


def describe_error(error: BaseException) -> str:
    """Class and place of an error, and the message only of our own: a driver's may quote a prompt."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/service/" in frame.filename]
    place = f"{frames[-1].name}:{frames[-1].lineno}" if frames else "unknown"
    if isinstance(error, TrunklineError):
        return f"{error} [{place}]"
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    return f"{type(error).__name__}{f' {state}' if state else ''} [{place}]"


def _record_failure(work: Work, task: ControlTask, error: str) -> None:
    def record(conn: sa.Connection) -> TaskState:
        state = control.fail_task(conn, task, error)
        if state == TaskState.DEAD and task.kind == TaskKind.WEBHOOK:
            webhooks.give_up(conn, task.subject, "internal_error")
        elif state == TaskState.DEAD and task.kind != TaskKind.DELETE:
            batches.move_batch(conn, task.subject, BatchStatus.FAILED, errors=[_batch_error(task.kind)])
        return state

    try:
        state = work.database.run(record)
    except FenceLost:
        return  # a newer attempt has it, and its own word on it
    level = logging.ERROR if state == TaskState.DEAD else logging.WARNING
    log.log(level, "control task %d (%s %s) failed, now %s: %s", task.id, task.kind, task.subject, state, error)
    if state == TaskState.DEAD and task.kind not in (TaskKind.WEBHOOK, TaskKind.DELETE):
        discard_outputs(work, task.subject)


def _batch_error(kind: TaskKind) -> dict[str, object]:
    if kind == TaskKind.INTAKE:
        code, message = "internal_error", "The input file could not be taken in."
    else:
        code, message = "output_failed", "The output files could not be written; the results are kept."
    return {"code": code, "line": None, "message": message, "param": None}


@contextmanager
def _kept_lease(work: Work, task: ControlTask) -> Iterator[None]:
    """Renew the lease beside the handler, so that a long step between two transactions does not lose it."""
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(work, task, ended), name=f"lease-{task.id}", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()


def _keep(work: Work, task: ControlTask, ended: threading.Event) -> None:
    while not ended.wait(work.settings.task_lease_seconds / 3):
        try:
            work.database.run(lambda conn: work.hold(conn, task))
        except FenceLost:
            return  # finished a moment ago, or lost: the handler's own fence says so
        except (sa.exc.DBAPIError, *DATABASE_AWAY) as error:
            log.warning("control task %d: lease not renewed (%s)", task.id, type(error).__name__)
