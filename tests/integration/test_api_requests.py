"""The lines of a batch over HTTP: every state, every field, pages, filters."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, steady  # noqa: F401 - two are fixtures
from client_steps import run_open_tasks
from control_fixtures import Desk, jsonl, request
from seeds import add_boot

from service.core.model import BatchStatus, TaskKind
from service.store import batches
from service.store.requests import LineStatus
from service.store.tables import batch, cohort, job, job_result

FIELDS = [
    "id", "line", "custom_id", "status", "attempts", "instance", "cohort", "predicted_cached_tokens",
    "cached_tokens", "prompt_tokens", "completion_tokens", "miss_cause", "queue_ms", "run_ms",
]  # fmt: skip


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


@pytest.fixture
def mixed(api: Api, desk: Desk) -> str:
    """A batch with a line in every state but `expired`; two lines are skipped, one of them in the middle."""
    rows = [request(f"c{n}") for n in range(6)]
    data = b"no json\n\n" + jsonl(rows[:3]) + jsonl([request("bad", method="GET")]) + jsonl(rows[3:])
    batch_id = str(api.create(api.upload(data), queue={"on_invalid_line": "skip"})["id"])
    run_open_tasks(desk)
    ids = {row.custom_id: row.id for row in desk.jobs(batch_id)}
    with api.database.transaction() as conn:
        boot = add_boot(conn)
        made = sa.insert(cohort).returning(cohort.c.id)
        values = {"model": "tiny", "queue": "instance.one", "sequence": 1, "n_jobs": 2, "priority": 1, "attempt": 2}
        values |= {"instance_boot_id": boot}
        running, ready = (conn.scalar(made.values(**values, state=state)) for state in ("running", "ready"))
        bound = sa.update(job)
        conn.execute(bound.where(job.c.id.in_([ids["c0"], ids["c1"]])).values(cohort_id=running))
        conn.execute(bound.where(job.c.id == ids["c1"]).values(predicted_cached_tokens=64, tries=1))
        conn.execute(bound.where(job.c.id == ids["c2"]).values(cohort_id=ready))
        conn.execute(bound.where(job.c.id == ids["c3"]).values(not_before=sa.text("now() + interval '1 h'"), tries=3))
        conn.execute(bound.where(job.c.id == ids["c5"]).values(cohort_id=0))
        answered = {"cohort_id": running, "attempt": 1, "instance_boot_id": boot, "queue_ms": 5, "run_ms": 70}
        answered |= {"miss_cause": "evicted", "predicted_cached_tokens": 32, "cached_tokens": 0, "prompt_tokens": 40}
        answered |= {"completion_tokens": 3, "outcome": "succeeded", "status_code": 200}
        conn.execute(sa.insert(job_result).values(job_id=ids["c0"], batch_id=batch_id, **answered))
        for name, outcome in (("c4", "failed"), ("c5", "cancelled")):
            conn.execute(sa.insert(job_result).values(job_id=ids[name], batch_id=batch_id, outcome=outcome))
    return batch_id


def page(api: Api, batch_id: str, **query: Any) -> dict[str, Any]:
    answer = api.http.get(f"/v1/batches/{batch_id}/requests", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_line_with_its_state_in_line_order(api: Api, mixed: str) -> None:
    found = page(api, mixed)
    assert [(line["line"], line["custom_id"], line["status"]) for line in found["data"]] == [
        (1, None, "skipped"),
        (3, "c0", "succeeded"),
        (4, "c1", "running"),
        (5, "c2", "queued"),
        (6, "bad", "skipped"),
        (7, "c3", "retrying"),
        (8, "c4", "failed"),
        (9, "c5", "cancelled"),
    ]
    assert all(list(line) == FIELDS for line in found["data"])
    assert (found["object"], found["has_more"]) == ("list", False)
    assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], found["data"][-1]["id"])
    skipped, succeeded, running, queued, _, retrying, _, cancelled = found["data"]
    assert {name: succeeded[name] for name in FIELDS[4:] if name != "cohort"} == {
        "attempts": 1, "instance": "one", "predicted_cached_tokens": 32, "cached_tokens": 0, "prompt_tokens": 40,
        "completion_tokens": 3, "miss_cause": "evicted", "queue_ms": 5, "run_ms": 70,
    }  # fmt: skip
    assert (running["attempts"], running["instance"], running["predicted_cached_tokens"]) == (3, "one", 64)
    assert running["cohort"] == succeeded["cohort"]
    assert (queued["cohort"], retrying["cohort"], retrying["attempts"]) == (running["cohort"] + 1, None, 3)
    assert (cancelled["cohort"], cancelled["cached_tokens"]) == (None, None)
    assert (skipped["attempts"], skipped["run_ms"]) == (0, None)


def test_the_ids_are_those_of_the_result_lines(api: Api, mixed: str) -> None:
    ids = {line["custom_id"]: line["id"] for line in page(api, mixed)["data"]}
    results = [line for line in api.http.get(f"/v1/batches/{mixed}/results").text.split("\n") if line]
    assert len(results) == 5
    for line in results:
        assert any(f'"id":"{found}"' in line for found in ids.values())


@pytest.mark.parametrize("status", list(LineStatus))
def test_the_filter_agrees_with_the_rows(api: Api, mixed: str, status: LineStatus) -> None:
    everything = page(api, mixed)["data"]
    assert page(api, mixed, status=status)["data"] == [line for line in everything if line["status"] == status]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("cursor", ["id", "line"])
def test_pages_hold_every_line_once(api: Api, mixed: str, limit: int, cursor: str) -> None:
    everything = page(api, mixed)["data"]
    found: list[dict[str, Any]] = []
    has_more, after = True, {}
    while has_more:
        part = page(api, mixed, limit=limit, **after)
        assert len(part["data"]) <= limit
        found += part["data"]
        has_more, after = part["has_more"], {"after": found[-1][cursor]}
    assert found == everything


def test_the_default_page_has_20_lines_and_0_is_an_empty_one(api: Api, desk: Desk) -> None:
    made = api.create(api.upload(jsonl(request(f"c{n}") for n in range(25))))
    assert page(api, made["id"]) == EMPTY  # intake has not been there
    run_open_tasks(desk)
    first = page(api, made["id"])
    assert (len(first["data"]), first["has_more"]) == (20, True)
    assert page(api, made["id"], limit=0) == EMPTY
    assert page(api, made["id"], after=25) == EMPTY
    assert page(api, made["id"], after=999_999_999) == EMPTY


EMPTY = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_the_sdk_reads_a_page(api: Api, mixed: str) -> None:
    options: Any = {"params": {"status": "failed"}}
    found: Any = api.sdk().get(f"/batches/{mixed}/requests", cast_to=object, options=options)
    assert [line["custom_id"] for line in found["data"]] == ["c4"]
    with pytest.raises(openai.BadRequestError) as refused:
        api.sdk().get(f"/batches/{mixed}/requests", cast_to=object, options={"params": {"status": "none"}})
    assert (refused.value.code, refused.value.param) == ("invalid_value", "status")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("status=", "status"), ("status=done", "status"), ("status=Failed", "status"),
        ("limit=-1", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"),
        ("after=", "after"), ("after=-1", "after"), ("after=c1", "after"), ("after=%00", "after"),
        ("after=9999999999", "after"), ("after=batch_req_" + "f" * 16, "after"),
        ("after=batch_req_" + "0" * 15 + "9", "after"), ("after=batch_req_" + "0" * 40, "after"),
    ],
)  # fmt: skip
def test_refusals(steady: Api, query: str, param: str) -> None:
    made = steady.create()
    check_refused(steady.http.get(f"/v1/batches/{made['id']}/requests?{query}"), 400, "invalid_value", param)


def test_a_line_of_another_batch_is_no_cursor(api: Api, mixed: str, desk: Desk) -> None:
    other = api.create()["id"]
    run_open_tasks(desk)
    for line in page(api, mixed)["data"][:2]:
        refused = api.http.get(f"/v1/batches/{other}/requests", params={"after": line["id"]})
        check_refused(refused, 400, "invalid_value", "after")


def test_another_tenants_batch_is_404(api: Api, mixed: str) -> None:
    other = api.as_tenant(api.make_key("other"))
    check_refused(other.get(f"/v1/batches/{mixed}/requests"), 404, "not_found", "batch_id")
    other.close()


def test_expired_lines_and_what_a_failed_batch_left(api: Api, desk: Desk) -> None:
    expired, failed = (api.create()["id"] for _ in range(2))
    run_open_tasks(desk)
    desk.answer(expired, ["c1"])
    desk.answer(failed, ["c1"])
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == expired).values(expires_at=sa.func.now()))
        assert batches.move_batch(conn, failed, BatchStatus.FAILED)
    desk.start(TaskKind.EXPIRE, expired)
    run_open_tasks(desk)
    assert [line["status"] for line in page(api, expired)["data"]] == ["expired", "succeeded", "expired"]
    assert len(page(api, expired, status="expired")["data"]) == 2
    assert [line["status"] for line in page(api, failed)["data"]] == ["cancelled", "succeeded", "cancelled"]
    assert [line["custom_id"] for line in page(api, failed, status="cancelled")["data"]] == ["c0", "c2"]
    assert page(api, failed, status="queued")["data"] == []


def test_a_failed_validation_has_no_lines(api: Api, desk: Desk) -> None:
    made = api.create(api.upload(b"no json\n"))
    run_open_tasks(desk)
    assert api.http.get(f"/v1/batches/{made['id']}").json()["status"] == "failed"
    assert page(api, made["id"]) == EMPTY
