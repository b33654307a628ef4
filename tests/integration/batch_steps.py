"""Steps of tests that act on batches: taken in, cancelled, several calls at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import sqlalchemy as sa
from api_fixtures import Api
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.core.model import BatchStatus
from service.store.tables import batch

LINES = 6


def in_progress(api: Api, desk: Desk, n: int = LINES, **fields: Any) -> str:
    made = api.create(api.upload(jsonl(request(f"c{i}") for i in range(n))), **fields)
    run_open_tasks(desk)
    return str(made["id"])


def cancelled(api: Api, desk: Desk, batch_id: str) -> None:
    desk.cancel(batch_id)
    run_open_tasks(desk)
    assert desk.batch(batch_id).status is BatchStatus.CANCELLED


def at_once(*calls: Callable[[], httpx.Response]) -> list[httpx.Response]:
    """All of them at the same moment, as far as threads can."""
    barrier = threading.Barrier(len(calls))

    def call(one: Callable[[], httpx.Response]) -> httpx.Response:
        barrier.wait()
        return one()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def set_status(api: Api, batch_id: str, status: BatchStatus) -> None:
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(status=status))
