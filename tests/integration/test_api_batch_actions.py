"""PATCH and DELETE of batches over HTTP, and what they race against."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, steady  # noqa: F401 - two are fixtures
from batch_steps import LINES, at_once, cancelled, in_progress, set_status
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.core.ids import make_id
from service.core.model import BatchStatus, Priority, TaskKind
from service.store import batches
from service.store.control_tables import control_task
from service.store.tables import batch, batch_progress, cohort, job, job_result, line_error


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def patch(api: Api, batch_id: str, **body: Any) -> httpx.Response:
    return api.http.patch(f"/v1/batches/{batch_id}", json=body)


# Change


def test_priority_pause_and_deadline_are_changed_and_the_rest_stays(api: Api, desk: Desk) -> None:
    made = api.create(metadata={"run": "1"})
    changed = patch(api, made["id"], queue={"priority": "high", "paused": True, "other": 1}, completion_window="48h")
    assert changed.status_code == 200
    seen = changed.json()
    assert (seen["queue"]["priority"], seen["queue"]["paused"], seen["completion_window"]) == ("high", True, "48h")
    assert seen["expires_at"] == made["created_at"] + 172_800
    assert (seen["status"], seen["metadata"]) == ("validating", {"run": "1"})
    assert seen == api.http.get(f"/v1/batches/{made['id']}").json()
    for body in ({}, {"queue": None}, {"queue": {}}, {"queue": {"priority": None, "paused": None}}, {"unknown": 1}):
        assert patch(api, made["id"], **body).json() == seen
    assert patch(api, made["id"], queue={"paused": False}).json()["queue"] == {**seen["queue"], "paused": False}


def test_the_sdk_sends_a_patch(api: Api) -> None:
    made = api.create()
    path = f"/batches/{made['id']}"
    changed = api.sdk().patch(path, body={"queue": {"priority": "low"}}, cast_to=openai.types.Batch)
    assert (changed.id, changed.to_dict()["queue"]["priority"]) == (made["id"], "low")  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"queue": "high"}, "invalid_type", "queue"),
        ({"queue": ["high"]}, "invalid_type", "queue"),
        ({"queue": {"priority": "interactive"}}, "invalid_value", "queue.priority"),
        ({"queue": {"priority": 2}}, "invalid_value", "queue.priority"),
        ({"queue": {"priority": ["low"]}}, "invalid_value", "queue.priority"),
        ({"queue": {"paused": "yes"}}, "invalid_value", "queue.paused"),
        ({"queue": {"paused": 1}}, "invalid_value", "queue.paused"),
        ({"completion_window": 24}, "invalid_type", "completion_window"),
        ({"completion_window": "soon"}, "invalid_value", "completion_window"),
        ({"completion_window": "31d"}, "invalid_value", "completion_window"),
        ({"completion_window": "0h"}, "invalid_value", "completion_window"),
    ],
)
def test_patch_refuses_and_changes_nothing(steady: Api, body: dict[str, Any], code: str, param: str) -> None:
    made = steady.create()
    check_refused(patch(steady, made["id"], **{"queue": {"paused": True}, **body}), 400, code, param)
    assert steady.http.get(f"/v1/batches/{made['id']}").json() == made


@pytest.mark.parametrize(("raw", "code"), [(b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_type")])
def test_patch_needs_a_json_object(steady: Api, raw: bytes, code: str) -> None:
    made = steady.create()
    check_refused(steady.http.patch(f"/v1/batches/{made['id']}", content=raw), 400, code)


def test_a_deadline_that_would_be_past_is_refused(api: Api) -> None:
    made = api.create()
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(created_at=sa.text("now() - interval '2 hours'")))
    check_refused(patch(api, made["id"], completion_window="1h"), 400, "invalid_value", "completion_window")
    assert patch(api, made["id"], completion_window="3h").status_code == 200


def test_a_deadline_that_has_passed_is_not_moved(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(expires_at=sa.func.now()))
    check_refused(patch(api, batch_id, completion_window="48h"), 409, "batch_terminal", "batch_id")
    assert patch(api, batch_id, queue={"priority": "low"}).status_code == 200


def test_an_expiry_that_was_overtaken_by_a_later_deadline_ends_nothing(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    assert patch(api, batch_id, completion_window="48h").status_code == 200
    desk.start(TaskKind.EXPIRE, batch_id)
    run_open_tasks(desk)
    assert desk.batch(batch_id).status is BatchStatus.IN_PROGRESS
    assert desk.progress(batch_id).expired == 0


@pytest.mark.parametrize("status", list(BatchStatus))
def test_patch_by_status(steady: Api, status: BatchStatus) -> None:
    made = steady.create()
    set_status(steady, made["id"], status)
    answer = patch(steady, made["id"], queue={"paused": True})
    if status.is_terminal:
        check_refused(answer, 409, "batch_terminal", "batch_id")
    else:
        assert answer.json()["queue"]["paused"] is True
    assert steady.http.get(f"/v1/batches/{made['id']}").json()["queue"]["paused"] is not status.is_terminal


def test_a_pause_while_validating_does_not_hold_validation(api: Api, desk: Desk) -> None:
    made = api.create()
    assert patch(api, made["id"], queue={"paused": True}).json()["status"] == "validating"
    run_open_tasks(desk)
    seen = api.http.get(f"/v1/batches/{made['id']}").json()
    assert (seen["status"], seen["queue"]["paused"], seen["queue"]["queued"]) == ("in_progress", True, 3)


def test_a_paused_batch_still_expires(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    patch(api, batch_id, queue={"paused": True})
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(expires_at=sa.func.now()))
    desk.start(TaskKind.EXPIRE, batch_id)
    run_open_tasks(desk)
    assert desk.batch(batch_id).status is BatchStatus.EXPIRED


def test_patch_against_completion_either_changes_or_says_that_it_ended(api: Api, desk: Desk) -> None:
    for n in range(8):
        batch_id = in_progress(api, desk, 1)
        with api.database.transaction() as conn:
            assert batches.move_batch(conn, batch_id, BatchStatus.FINALIZING)

        def complete(batch_id: str = batch_id) -> httpx.Response:
            with api.database.transaction() as conn:
                assert batches.move_batch(conn, batch_id, BatchStatus.COMPLETED)
            return httpx.Response(200)

        answer, _ = at_once(lambda b=batch_id: patch(api, b, queue={"priority": "high"}), complete)  # type: ignore[misc]
        is_changed = desk.batch(batch_id).priority is Priority.HIGH
        assert desk.batch(batch_id).status is BatchStatus.COMPLETED, n
        if is_changed:
            assert answer.status_code == 200
        else:
            check_refused(answer, 409, "batch_terminal", "batch_id")


# Delete


@pytest.mark.parametrize("status", list(BatchStatus))
def test_delete_by_status(steady: Api, status: BatchStatus) -> None:
    made = steady.create()
    set_status(steady, made["id"], status)
    answer = steady.http.delete(f"/v1/batches/{made['id']}")
    if not status.is_terminal:
        check_refused(answer, 409, "batch_not_terminal", "batch_id")
        assert steady.http.get(f"/v1/batches/{made['id']}").status_code == 200
        return
    assert (answer.status_code, answer.json()) == (200, {"id": made["id"], "object": "batch", "deleted": True})
    for method, path in ALL_CALLS:
        check_refused(
            steady.http.request(method, f"/v1/batches/{made['id']}{path}", json={}), 404, "not_found", "batch_id"
        )
    assert made["id"] not in [item["id"] for item in steady.http.get("/v1/batches?limit=100").json()["data"]]


ALL_CALLS = [
    ("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/requests"),
    ("GET", "/results"),
]  # fmt: skip


def test_a_deleted_batch_leaves_no_row_and_its_files_stay(api: Api, desk: Desk) -> None:
    bad = b"no json\n"
    file_id = api.upload(bad + jsonl(request(f"c{i}") for i in range(2500)))
    batch_id = api.create(file_id, queue={"on_invalid_line": "skip"})["id"]
    other = in_progress(api, desk, 2)
    desk.answer(batch_id, [f"c{i}" for i in range(2000)])
    cancelled(api, desk, batch_id)
    ended = desk.batch(batch_id)
    assert api.http.delete(f"/v1/batches/{batch_id}").status_code == 200
    run_open_tasks(desk)
    with api.database.transaction() as conn:
        for table in (job, job_result, line_error, batch_progress):
            found = conn.execute(sa.select(table.c.batch_id).distinct()).scalars().all()
            assert batch_id not in found, table.name
        assert conn.execute(sa.select(batch.c.id)).scalars().all() == [other]
        assert conn.scalar(sa.select(sa.func.count()).select_from(job)) == 2
        assert conn.scalar(sa.select(sa.func.count()).select_from(job_result)) == 0
    assert len(desk.contents(ended.output_file_id)) == 2000
    assert len(desk.contents(ended.error_file_id)) == 501
    for found_id in (ended.output_file_id, ended.error_file_id, file_id):
        assert api.http.delete(f"/v1/files/{found_id}").status_code == 200


def test_a_delete_that_was_interrupted_goes_on(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk, 1500)
    cancelled(api, desk, batch_id)
    api.http.delete(f"/v1/batches/{batch_id}")

    class StopsOnce(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked == 1

    run_open_tasks(replace(desk, work=replace(desk.work, stopping=StopsOnce())))
    assert 0 < len(desk.jobs(batch_id)) < 1500
    check_refused(api.http.get(f"/v1/batches/{batch_id}"), 404, "not_found", "batch_id")
    run_open_tasks(desk)
    with api.database.transaction() as conn:
        assert conn.execute(sa.select(batch.c.id)).all() == []


def test_a_delete_waits_for_cohorts_that_are_out(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    cancelled(api, desk, batch_id)
    cohort_id = add_cohort(api, [row.id for row in desk.jobs(batch_id)], "running")
    api.http.delete(f"/v1/batches/{batch_id}")
    run_open_tasks(desk)
    assert len(desk.jobs(batch_id)) == LINES
    with api.database.transaction() as conn:
        conn.execute(sa.update(cohort).where(cohort.c.id == cohort_id).values(state="done"))
        conn.execute(sa.update(control_task).values(not_before=sa.func.now()))
    run_open_tasks(desk)
    assert desk.jobs(batch_id) == []


def add_cohort(api: Api, job_ids: list[int], state: str) -> int:
    with api.database.transaction() as conn:
        made = sa.insert(cohort).values(
            model="tiny", queue="instance.one", sequence=1, n_jobs=len(job_ids), priority=1, state=state
        )
        cohort_id = int(conn.execute(made.returning(cohort.c.id)).scalar_one())
        conn.execute(sa.update(job).where(job.c.id.in_(job_ids)).values(cohort_id=cohort_id))
    return cohort_id


# Other tenants, unknown ids


def test_actions_on_unknown_batches_and_on_another_tenants(api: Api, desk: Desk) -> None:
    made = api.create()
    set_status(api, made["id"], BatchStatus.CANCELLED)
    other = api.as_tenant(api.make_key("other"))
    for batch_id in (made["id"], make_id("batch_", 1, b"0" * 10), "batch_1", "%00"):
        for method, path in ALL_CALLS:
            answer = other.request(method, f"/v1/batches/{batch_id}{path}", json={})
            check_refused(answer, 404, "not_found", "batch_id")
    assert desk.batch(made["id"]).status is BatchStatus.CANCELLED
    other.close()
