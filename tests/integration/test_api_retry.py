"""Retry of what a batch did not answer well, over HTTP, and what it races against."""

from __future__ import annotations

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, steady  # noqa: F401 - two are fixtures
from batch_steps import LINES, at_once, cancelled, in_progress, set_status
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request

from service.core.model import BatchStatus, LineErrorCode, Outcome, TaskKind
from service.store import batches
from service.store.tables import batch, file, job


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def test_what_was_not_answered_well_is_retried_in_a_linked_batch(api: Api, desk: Desk) -> None:
    rows = [request(f"c{n}", text=f"text \u2028 \0 {n} é") for n in range(6)]
    file_id = api.upload(b"no json\n" + jsonl(rows))
    queue = {"priority": "low", "on_invalid_line": "skip", "order": "input", "model_policy": "strict"}
    made = api.create(
        file_id,
        queue=queue,
        metadata={"run": "9"},
        completion_window="36h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    run_open_tasks(desk)
    desk.answer(made["id"], ["c0", "c1"])
    desk.answer(made["id"], ["c2"], status_code=400)
    cancelled(api, desk, made["id"])
    answer = api.http.post(f"/v1/batches/{made['id']}/retry")
    assert answer.status_code == 200, answer.text
    again = answer.json()
    assert (again["status"], again["queue"]["retry_of"], again["completion_window"]) == (
        "validating",
        made["id"],
        "36h",
    )
    assert (again["metadata"], again["endpoint"]) == ({"run": "9"}, made["endpoint"])
    assert again["expires_at"] == again["created_at"] + 36 * 3600
    old, new = desk.batch(made["id"]), desk.batch(again["id"])
    for name in ("priority", "on_invalid_line", "line_order", "model_policy", "output_expires_after_seconds"):
        assert getattr(old, name) == getattr(new, name), name
    assert (old.status, old.paused, new.paused) == (BatchStatus.CANCELLED, False, False)
    uploaded = api.http.get(f"/v1/files/{again['input_file_id']}").json()
    assert (uploaded["purpose"], uploaded["filename"]) == ("batch", f"{made['id']}_retry.jsonl")
    run_open_tasks(desk)
    was = {row.custom_id: row.body for row in desk.jobs(made["id"])}
    now = {row.custom_id: row.body for row in desk.jobs(again["id"])}
    assert now == {name: was[name] for name in ("c2", "c3", "c4", "c5")}
    assert [row.line_no for row in desk.jobs(again["id"])] == [1, 2, 3, 4]


def test_expired_lines_and_lines_never_taken_in_are_retried(api: Api, desk: Desk) -> None:
    """Intake stopped after two lines: what follows is in the input file alone."""
    data = (
        b"\xef\xbb\xbf" + jsonl([request("a"), request("b")]) + b"\r\nno json\r\n" + jsonl([request("c"), request("d")])
    )
    made = api.create(api.upload(data), queue={"on_invalid_line": "skip"})
    run_open_tasks(desk)
    stop_intake_after(api, made["id"], data, 2)
    desk.answer(made["id"], ["a"])
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(expires_at=sa.func.now()))
    desk.start(TaskKind.EXPIRE, made["id"])
    run_open_tasks(desk)
    assert desk.batch(made["id"]).status is BatchStatus.EXPIRED
    assert desk.progress(made["id"]).expired == 3
    again = api.http.post(f"/v1/batches/{made['id']}/retry").json()
    run_open_tasks(desk)
    assert [row.custom_id for row in desk.jobs(again["id"])] == ["b", "c", "d"]
    assert api.http.delete(f"/v1/files/{made['input_file_id']}").status_code == 200
    refused = api.http.post(f"/v1/batches/{made['id']}/retry")
    check_refused(refused, 404, "file_expired", "input_file_id")


def stop_intake_after(api: Api, batch_id: str, data: bytes, lines: int) -> None:
    """As if intake had committed only the first lines."""
    place = sum(len(line) + 1 for line in data.split(b"\n")[:lines])
    with api.database.transaction() as conn:
        conn.execute(sa.delete(job).where(job.c.batch_id == batch_id, job.c.line_no > lines))
        conn.execute(sa.update(batch).values(intake_done=False, intake_offset=place, intake_line=lines))


def test_a_retry_of_what_intake_finished_needs_no_input_file(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    cancelled(api, desk, batch_id)
    assert api.http.delete(f"/v1/files/{desk.batch(batch_id).input_file_id}").status_code == 200
    again = api.http.post(f"/v1/batches/{batch_id}/retry", json={})
    run_open_tasks(desk)
    assert len(desk.jobs(again.json()["id"])) == LINES


@pytest.mark.parametrize("status", [status for status in BatchStatus if not status.is_terminal])
def test_only_an_ended_batch_is_retried(steady: Api, status: BatchStatus) -> None:
    made = steady.create()
    set_status(steady, made["id"], status)
    refused = steady.http.post(f"/v1/batches/{made['id']}/retry")
    check_refused(refused, 409, "batch_not_terminal", "batch_id")


def test_nothing_to_retry(api: Api, desk: Desk) -> None:
    answered = api.create(api.upload(b"{}\n" + jsonl([request("a")])), queue={"on_invalid_line": "skip"})["id"]
    invalid = api.create(api.upload(b"{}\n"))["id"]
    unstarted = api.create()["id"]
    api.http.post(f"/v1/batches/{unstarted}/cancel")
    run_open_tasks(desk)
    desk.answer(answered, ["a"])
    desk.finalize()
    run_open_tasks(desk)
    for batch_id, status in ((answered, "completed"), (invalid, "failed"), (unstarted, "cancelled")):
        assert api.http.get(f"/v1/batches/{batch_id}").json()["status"] == status
        check_refused(api.http.post(f"/v1/batches/{batch_id}/retry"), 400, "nothing_to_retry", "batch_id")
    with api.database.transaction() as conn:
        assert conn.scalar(sa.select(sa.func.count()).select_from(batch)) == 3
    assert [path for path in blob_paths(api) if path.endswith(".part")] == []


def blob_paths(api: Api) -> list[str]:
    folder = api.settings.state_folder / "files" / "input"
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


def test_a_retry_is_repeated_under_its_key_and_by_the_sdk(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    cancelled(api, desk, batch_id)
    path = f"/v1/batches/{batch_id}/retry"
    first = api.http.post(path, headers={"Idempotency-Key": "k"}).json()
    assert api.http.post(path, headers={"Idempotency-Key": "k"}).json() == first
    refused = api.http.post(path, headers={"Idempotency-Key": "k"}, json={"other": 1})
    check_refused(refused, 409, "idempotency_conflict", "Idempotency-Key")
    second = api.http.post(path, headers={"x-stainless-retry-count": "0"}).json()
    assert api.http.post(path, headers={"x-stainless-retry-count": "1"}).json() == second
    third = api.http.post(path).json()
    assert len({first["id"], second["id"], third["id"]}) == 3
    retried = api.sdk().post(f"/batches/{batch_id}/retry", cast_to=openai.types.Batch)
    assert retried.status == "validating"


def test_a_retry_asked_twice_at_once_under_one_key_makes_one_batch_and_one_file(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    cancelled(api, desk, batch_id)

    def ask() -> httpx.Response:
        return httpx.post(f"{api.url}/v1/batches/{batch_id}/retry", headers={"Idempotency-Key": "k"}, timeout=30)

    answers = at_once(*[ask] * 4)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["id"] for answer in answers}) == 1
    with api.database.transaction() as conn:
        assert conn.scalar(sa.select(sa.func.count()).select_from(batch)) == 2
        uploads = conn.scalar(sa.select(sa.func.count()).where(file.c.purpose == "batch"))
    assert uploads == len(blob_paths(api)) == 2


def test_delete_against_retry_leaves_a_whole_new_batch_or_none(api: Api, desk: Desk) -> None:
    for _ in range(8):
        batch_id = in_progress(api, desk)
        cancelled(api, desk, batch_id)
        url = f"{api.url}/v1/batches/{batch_id}"
        deleted, retried = at_once(lambda u=url: httpx.delete(u), lambda u=url: httpx.post(f"{u}/retry", timeout=30))  # type: ignore[misc]
        assert deleted.status_code == 200
        run_open_tasks(desk)
        check_refused(httpx.get(url), 404, "not_found", "batch_id")
        if retried.status_code == 200:
            assert len(desk.jobs(retried.json()["id"])) == LINES
        else:
            check_refused(retried, 404, "not_found", "batch_id")


def test_what_a_failed_export_left_unanswered_is_retried(api: Api, desk: Desk) -> None:
    batch_id = in_progress(api, desk)
    desk.answer(batch_id, ["c0"])
    desk.end(batch_id, Outcome.FAILED, LineErrorCode.ENGINE_CRASH)
    with api.database.transaction() as conn:
        assert batches.move_batch(conn, batch_id, BatchStatus.FAILED)
    again = api.http.post(f"/v1/batches/{batch_id}/retry").json()
    run_open_tasks(desk)
    assert [row.custom_id for row in desk.jobs(again["id"])] == [f"c{n}" for n in range(1, LINES)]
