"""Results while a batch runs: every line exactly once, in whatever order transactions commit."""

from __future__ import annotations

import json

import httpx
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused  # noqa: F401 - `api` is a fixture
from control_fixtures import Desk, jsonl, request

from service.control import run_task
from service.core.model import TaskKind
from service.store.control import create_task
from service.store.tables import job_result


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


def start(api: Api, desk: Desk, data: bytes, **fields: object) -> str:
    batch_id: str = api.create(api.upload(data), **fields)["id"]
    with api.database.transaction() as conn:
        task_id = create_task(conn, TaskKind.INTAKE, batch_id)
    run_task(desk.work, task_id)
    return batch_id


def page(api: Api, batch_id: str, after: str | None = None, limit: int = 1000) -> tuple[list[str], str, bool]:
    """custom_ids, the next cursor, whether more may come."""
    params: dict[str, str | int] = {"limit": limit} | ({"after": after} if after else {})
    answer = api.http.get(f"/v1/batches/{batch_id}/results", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/jsonl"
    ids = [json.loads(line)["custom_id"] for line in answer.content.splitlines()]
    return ids, answer.headers["x-next-after"], answer.headers.get("x-incomplete") == "true"


def finish(desk: Desk) -> None:
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)


def test_lines_come_as_they_are_recorded_until_the_batch_is_terminal(api: Api, desk: Desk) -> None:
    batch_id = start(api, desk, jsonl(request(f"c{n}") for n in range(4)))
    ids, cursor, incomplete = page(api, batch_id)
    assert (ids, incomplete) == ([], True)
    desk.answer(batch_id, ["c2"])
    desk.answer(batch_id, ["c3", "c0"])
    ids, cursor, incomplete = page(api, batch_id, cursor)
    assert (ids, incomplete) == (["c2", "c0", "c3"], True)
    desk.answer(batch_id, ["c1"], status_code=400)
    finish(desk)
    ids, cursor, incomplete = page(api, batch_id, cursor)
    assert (ids, incomplete) == (["c1"], False)
    assert page(api, batch_id, cursor) == ([], cursor, False)
    whole = api.http.get(f"/v1/batches/{batch_id}/results").content
    batch = api.http.get(f"/v1/batches/{batch_id}").json()
    files = [api.http.get(f"/v1/files/{batch[name]}/content").content for name in ("output_file_id", "error_file_id")]
    assert sorted(whole.splitlines()) == sorted(b"".join(files).splitlines())


def test_a_transaction_that_commits_late_is_not_lost(api: Api, desk: Desk) -> None:
    batch_id = start(api, desk, jsonl(request(f"c{n}") for n in range(3)))
    jobs = {row.custom_id: row.id for row in desk.jobs(batch_id)}
    values = {"batch_id": batch_id, "outcome": "succeeded", "status_code": 200, "response": b"{}"}
    with api.database.engine.connect() as slow, slow.begin():
        slow.execute(sa.insert(job_result).values(job_id=jobs["c0"], **values))  # first to write, last to commit
        desk.answer(batch_id, ["c1"])
        held, cursor, _ = page(api, batch_id)
        assert held == []  # c1 is there, but c0 would come before it
    ids, cursor, _ = page(api, batch_id, cursor)
    assert ids == ["c0", "c1"]
    desk.answer(batch_id, ["c2"])
    assert page(api, batch_id, cursor)[0] == ["c2"]


def test_pages_of_any_size_give_every_line_once(api: Api, desk: Desk) -> None:
    good = [request(f"c{n}") for n in range(5)]
    bad = [request("x", url="/v1/other"), {"custom_id": "y"}]
    batch_id = start(api, desk, jsonl([good[0], bad[0], *good[1:], bad[1]]), queue={"on_invalid_line": "skip"})
    desk.answer(batch_id, ["c4", "c1"])
    desk.answer(batch_id, ["c0", "c2", "c3"])
    whole = page(api, batch_id)[0]
    assert sorted(whole) == ["c0", "c1", "c2", "c3", "c4", "x", "y"]
    assert set(whole[:2]) == {"x", "y"}  # refused before the others were answered
    for limit in (1, 2, 3):
        seen: list[str] = []
        cursor: str | None = None
        while True:
            ids, cursor, _ = page(api, batch_id, cursor, limit)
            if not ids:
                break
            seen += ids
        assert seen == whole
    ids, cursor, _ = page(api, batch_id, limit=0)
    assert ids == []
    assert page(api, batch_id, cursor)[0] == whole


def test_a_page_ends_with_the_line_that_makes_it_large(api: Api, desk: Desk) -> None:
    batch_id = start(api, desk, jsonl(request(f"c{n}") for n in range(3)))
    with api.database.transaction() as conn:
        for row in desk.jobs(batch_id):
            large = json.dumps({"text": "x" * 9_000_000}).encode()
            conn.execute(
                sa.insert(job_result).values(
                    job_id=row.id, batch_id=batch_id, outcome="succeeded", status_code=200, response=large
                )
            )
    ids, cursor, _ = page(api, batch_id)
    assert ids == ["c0"]
    assert page(api, batch_id, cursor)[0] == ["c1"]


def test_before_a_batch_is_in_progress_nothing_has_ended(api: Api) -> None:
    batch_id = api.create()["id"]
    assert page(api, batch_id)[0] == []
    assert page(api, batch_id)[2]


@pytest.mark.parametrize("after", ["x", "1-2-3", "1-0", "ffffffffffffffff-0-1", "0-0-" + "f" * 17, "-1-0-1", "%00"])
def test_bad_cursors(api: Api, after: str) -> None:
    batch_id = api.create()["id"]
    answer: httpx.Response = api.http.get(f"/v1/batches/{batch_id}/results?after={after}")
    check_refused(answer, 400, "invalid_value", "after")
