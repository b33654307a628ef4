"""Steps of client tests: what control and a worker would do, done when the test says so."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from control_fixtures import Desk

from service.control import run_task
from service.core.model import Outcome
from service.store.control_tables import control_task
from service.store.session import Database
from service.store.tables import job, job_result


def run_open_tasks(desk: Desk) -> None:
    """What a control worker would do now."""
    with desk.database.transaction() as conn:
        is_open = control_task.c.state.in_(("ready", "running"))
        ids = conn.execute(sa.select(control_task.c.id).where(is_open).order_by(control_task.c.id)).scalars().all()
    for task_id in ids:
        run_task(desk.work, task_id)


def complete(desk: Desk, batch_id: str, *, failed: tuple[str, ...] = ()) -> None:
    """Every line answered, files written."""
    names = [row.custom_id for row in desk.jobs(batch_id)]
    desk.answer(batch_id, [name for name in names if name not in failed])
    if failed:
        desk.answer(batch_id, failed, status_code=400)
    desk.finalize()
    run_open_tasks(desk)


def answer_job(database: Database, public_id: str, body: dict[str, Any], status_code: int = 200) -> None:
    """A single job's result, announced as a worker's would be."""
    outcome = Outcome.SUCCEEDED if status_code == 200 else Outcome.FAILED
    with database.transaction() as conn:
        job_id = conn.execute(sa.select(job.c.id).where(job.c.public_id == public_id)).scalar_one()
        row = {"job_id": job_id, "outcome": outcome.value, "status_code": status_code}
        tokens = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 2}
        conn.execute(sa.insert(job_result).values(**row, **tokens, response=json.dumps(body).encode()))
        conn.execute(sa.select(sa.func.pg_notify("job", public_id)))
