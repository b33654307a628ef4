"""`queue.position` and `queue.eta_seconds` of the batch object."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import sqlalchemy as sa
from api_fixtures import Api, api  # noqa: F401 - a fixture
from control_fixtures import Desk, jsonl, request
from seeds import MODEL, add_boot
from test_api_report import fill

from service.core.model import Outcome, Priority
from service.store import batches, instances, results
from service.store.outlook import outlook_of
from service.store.tables import batch, job, job_result


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def running_batch(desk: Desk, lines: int = 3, **fields: Any) -> str:
    return desk.take_in(jsonl(request(f"c{n}") for n in range(lines)), **fields)


def queue_of(api: Api, batch_id: str) -> tuple[int | None, float | None]:
    found = api.sdk().batches.retrieve(batch_id).model_dump()["queue"]  # the SDK keeps what it does not know
    return found["position"], found["eta_seconds"]


def places(api: Api) -> dict[str, int | None]:
    return {item.id: item.model_dump()["queue"]["position"] for item in api.sdk().batches.list(limit=100)}


def finish(desk: Desk, batch_id: str, lines: int, *, over_seconds: float, ended_seconds_ago: float = 0.0) -> None:
    """So many lines, one after the other, each as long; the last ended `ended_seconds_ago`."""

    def ago(seconds: float) -> Any:
        return sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds + ended_seconds_ago)

    each = over_seconds / lines
    with desk.database.transaction() as conn:
        ids = conn.execute(
            sa.select(job.c.id)
            .where(job.c.batch_id == batch_id, ~sa.exists().where(job_result.c.job_id == job.c.id))
            .order_by(job.c.id)
            .limit(lines)
        ).scalars()
        for number, job_id in enumerate(ids, 1):
            began = over_seconds - (number - 1) * each
            row = {"job_id": job_id, "batch_id": batch_id, "outcome": Outcome.SUCCEEDED, "status_code": 200}
            times = {"started_at": ago(began), "finished_at": ago(began - each)}
            conn.execute(sa.insert(job_result).values(**row, **times))
            results.add_progress(conn, [row])


def test_the_position_is_by_class_and_arrival_among_the_tenants_own(api: Api, desk: Desk) -> None:
    first, second = running_batch(desk), running_batch(desk)
    high, low = running_batch(desk, priority=Priority.HIGH), running_batch(desk, priority=Priority.LOW)
    running_batch(api.desk("other"), priority=Priority.HIGH)  # no tenant learns of another's
    assert places(api) == {high: 1, first: 2, second: 3, low: 4}
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == first).values(paused=True))
        conn.execute(sa.update(batch).where(batch.c.id == low).values(status="finalizing"))
    created = api.create()["id"]  # validating
    assert places(api) == {created: None, high: 1, second: 2, first: None, low: None}
    assert queue_of(api, second)[0] == 2


def test_the_time_left_is_the_rest_at_the_pace_of_late(api: Api, desk: Desk) -> None:
    batch_id = running_batch(desk, 100)
    assert queue_of(api, batch_id) == (1, None)  # nothing ended, and no instance is rated
    finish(desk, batch_id, 20, over_seconds=40.0)
    _, eta_seconds = queue_of(api, batch_id)
    assert eta_seconds is not None
    assert 160 <= eta_seconds < 200  # 80 lines, 2 s each, and what this test took
    finish(desk, batch_id, 80, over_seconds=40.0)
    assert queue_of(api, batch_id)[1] == 0
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(paused=True))
    assert queue_of(api, batch_id) == (None, None)


def test_only_the_newest_lines_say_how_fast_it_is(api: Api, desk: Desk) -> None:
    batch_id = running_batch(desk, 600)
    finish(desk, batch_id, 100, over_seconds=100.0, ended_seconds_ago=150.0)
    finish(desk, batch_id, 300, over_seconds=30.0)  # ten a second, more of them than are looked at
    _, eta_seconds = queue_of(api, batch_id)
    assert eta_seconds is not None
    assert 20 <= eta_seconds < 60  # 200 lines; over all of them it would be 80 s or more


def test_before_there_is_a_pace_the_first_in_line_is_judged_by_the_rates(api: Api, desk: Desk) -> None:
    first, second = running_batch(desk, 50), running_batch(desk, 50)
    finish(desk, first, 10, over_seconds=10.0, ended_seconds_ago=3_600.0)  # too long ago to say anything
    with api.database.transaction() as conn:
        boot_id = add_boot(conn)
    assert queue_of(api, first) == (1, None)  # the instance has no rates yet
    with api.database.transaction() as conn:
        instances.set_rates(conn, boot_id, 1_000.0, 10.0)
        prompt, output = conn.execute(
            sa.select(sa.func.avg(job.c.prompt_tokens), sa.func.avg(job.c.predicted_output_tokens)).where(
                job.c.batch_id == first
            )
        ).one()
        shared = (desk.batch(first).bound_tokens or 0) / 50
    expected = 40 * ((float(prompt) - shared) / 1_000 + float(output) / 10)
    position, eta_seconds = queue_of(api, first)
    assert position == 1
    assert eta_seconds == pytest.approx(expected, abs=0.1)
    assert queue_of(api, second) == (2, None)  # it waits for the first, as long as nobody can say
    with api.database.transaction() as conn:
        conn.execute(sa.update(job).where(job.c.batch_id == first, job.c.line_no == 1).values(model="other"))
    assert MODEL != "other"
    assert queue_of(api, first) == (1, None)  # nobody serves that one


def test_a_poll_of_a_large_batch_looks_at_few_rows(api: Api, desk: Desk) -> None:
    batch_id = fill(desk, 50_000)
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(total=100_000))
        found, sums = [desk.batch(batch_id)], batches.progress_of(conn, [batch_id])
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            outlook = outlook_of(conn, found, sums)[batch_id]
            seconds.append(time.monotonic() - started)
    assert outlook.position == 1
    assert outlook.eta_seconds is not None
    assert statistics.median(seconds) < 0.02, seconds
