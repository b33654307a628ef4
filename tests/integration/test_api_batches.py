"""Batches over HTTP: the SDK's round trip, every refusal of a create, repeats, pages, cancel."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import redis
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api, steady  # noqa: F401 - two are fixtures
from control_fixtures import jsonl, request

from service.control import run_task
from service.core.model import BatchStatus, TaskKind
from service.ports import free_port
from service.settings import Settings
from service.store import batches
from service.store.control_tables import control_task, idempotency_key
from service.store.session import Database
from service.store.tables import batch

CHAT = "/v1/chat/completions"


def open_tasks(api: Api, kind: TaskKind) -> list[tuple[int, str]]:
    with api.database.transaction() as conn:
        rows = conn.execute(
            sa.select(control_task.c.id, control_task.c.subject)
            .where(control_task.c.kind == kind, control_task.c.state == "ready")
            .order_by(control_task.c.id)
        )
        return [(row.id, row.subject) for row in rows]


def take_in(api: Api, batch_id: str) -> None:
    """Run the intake that the create asked for."""
    (task_id,) = [task_id for task_id, subject in open_tasks(api, TaskKind.INTAKE) if subject == batch_id]
    run_task(api.desk().work, task_id)


def test_the_sdk_creates_polls_and_downloads(api: Api) -> None:
    sdk, desk = api.sdk(), api.desk()
    lines = jsonl([request("a"), request("b", text="\u2028\0é"), request("c")])
    uploaded = sdk.files.create(file=("in.jsonl", lines), purpose="batch")
    made = sdk.batches.create(
        input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", metadata={"run": "nightly"}
    )
    assert (made.status, made.object, made.endpoint, made.metadata) == ("validating", "batch", CHAT, {"run": "nightly"})
    assert made.expires_at == made.created_at + 86_400
    assert (made.request_counts.total, made.errors, made.output_file_id, made.in_progress_at) == (0, None, None, None)
    take_in(api, made.id)
    running = sdk.batches.retrieve(made.id)
    assert (running.status, running.request_counts.total, running.model) == ("in_progress", 3, "tiny")
    desk.answer(made.id, ["a", "b"])
    desk.answer(made.id, ["c"], status_code=400)
    (task_id,) = desk.finalize()
    run_task(desk.work, task_id)
    ended = sdk.batches.retrieve(made.id)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 2, 1)
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.input_tokens_details.cached_tokens) == (30, 12)
    assert (ended.usage.output_tokens, ended.usage.total_tokens) == (6, 36)
    assert ended.output_file_id
    assert ended.error_file_id
    answers = [json.loads(line) for line in sdk.files.content(ended.output_file_id).iter_lines()]
    assert [line["custom_id"] for line in answers] == ["a", "b"]
    assert sdk.files.retrieve(ended.output_file_id).purpose == "batch_output"
    assert {item.id for item in sdk.files.list()} == {uploaded.id, ended.output_file_id, ended.error_file_id}


def test_the_batch_object_has_every_field_null_rather_than_absent(api: Api) -> None:
    made = api.create()
    assert list(made) == [
        "id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status",
        "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at", "finalizing_at",
        "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at", "request_counts", "usage",
        "metadata", "queue",
    ]  # fmt: skip
    assert made["queue"] == {
        "priority": "normal",
        "paused": False,
        "retry_of": None,
        "prefix_groups": None,
        "queued": 0,
        "running": 0,
        "retrying": 0,
        "cancelled": 0,
        "expired": 0,
        "skipped": 0,
        "eta_seconds": None,
        "position": None,
        "cache": {
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "predicted_cached_tokens": 0,
            "bound_tokens": None,
            "lines_unknown": 0,
        },
    }


def test_the_queue_shows_what_the_rows_say(api: Api) -> None:
    desk = api.desk()
    made = api.create(queue={"priority": "high", "on_invalid_line": "skip", "order": "input", "model_policy": "strict"})
    take_in(api, made["id"])
    desk.answer(made["id"], ["c0"])
    first, second = (row.id for row in desk.jobs(made["id"])[1:])
    with api.database.transaction() as conn:
        cohort_id = conn.execute(
            sa.text(
                "insert into cohort (model, queue, sequence, n_jobs, priority, state) "
                "values ('tiny', 'instance.one', 1, 1, 1, 'running') returning id"
            )
        ).scalar_one()
        conn.execute(sa.text("update job set cohort_id = :cohort where id = :id"), {"cohort": cohort_id, "id": first})
        conn.execute(sa.text("update job set not_before = now() + interval '1 h' where id = :id"), {"id": second})
    queue = api.http.get(f"/v1/batches/{made['id']}").json()["queue"]
    assert (queue["priority"], queue["queued"], queue["running"], queue["retrying"]) == ("high", 0, 1, 1)
    assert queue["prefix_groups"] is not None
    assert (queue["cache"]["prompt_tokens"], queue["cache"]["cached_tokens"]) == (10, 4)
    row = desk.batch(made["id"])
    assert (row.on_invalid_line, row.line_order, row.model_policy) == ("skip", "input", "strict")


def test_bad_lines_fail_the_batch_and_are_shown(api: Api) -> None:
    file_id = api.upload(b"not json\n\n" + jsonl([request("a", url="/v1/other"), request("a", model="unknown")]))
    made = api.create(file_id)
    take_in(api, made["id"])
    failed = api.sdk().batches.retrieve(made["id"])
    assert (failed.status, failed.request_counts.total if failed.request_counts else None) == ("failed", 0)
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [(error.code, error.line, error.param) for error in failed.errors.data] == [
        ("invalid_json_line", 1, None),
        ("invalid_url", 3, "url"),
        ("duplicate_custom_id", 4, "custom_id"),
    ]


FILE = "the uploaded file"  # replaced by its id


def body_with(**fields: Any) -> dict[str, Any]:
    return {"input_file_id": FILE, "endpoint": CHAT, "completion_window": "24h", **fields}


def body_without(name: str) -> dict[str, Any]:
    return {key: value for key, value in body_with().items() if key != name}


CREATE_ERRORS = [
    *((body_without(name), 400, "missing_required_parameter", name) for name in body_with()),
    *((body_with(**{name: None}), 400, "missing_required_parameter", name) for name in body_with()),
    *((body_with(**{name: 5}), 400, "invalid_type", name) for name in body_with()),
    *((body_with(metadata=value), 400, "invalid_type", "metadata") for value in ("text", [], {"a": 1}, {"a": None})),
    (body_with(output_expires_after=3600), 400, "invalid_type", "output_expires_after"),
    (body_with(queue="high"), 400, "invalid_type", "queue"),
    *((body_with(endpoint=value), 400, "invalid_value", "endpoint") for value in ("/v1/responses", "", "\0")),
    *(
        (body_with(completion_window=value), 400, "invalid_value", "completion_window")
        for value in ("", "24", "0h", "-1h", "31d", "24 h", "1w", "24H", "1.5h", "\u0662\u0664h", "9999999d")
    ),
    (body_with(metadata={f"k{n}": "v" for n in range(17)}), 400, "metadata_too_large", "metadata"),
    (body_with(metadata={"k" * 65: "v"}), 400, "metadata_too_large", "metadata"),
    (body_with(metadata={"k": "v" * 513}), 400, "metadata_too_large", "metadata"),
    (body_with(metadata={"k": "a\0b"}), 400, "invalid_value", "metadata"),
    (body_with(metadata={"k": "\ud800"}), 400, "invalid_value", "metadata"),
    *(
        (body_with(output_expires_after=value), 400, "invalid_value", "output_expires_after")
        for value in (
            {"anchor": "created_at", "seconds": 3599},
            {"anchor": "created_at", "seconds": 2_592_001},
            {"anchor": "now", "seconds": 3600},
            {"seconds": 3600},
            {"anchor": "created_at"},
        )
    ),
    *(
        (body_with(queue={field: value}), 400, "invalid_value", f"queue.{field}")
        for field, value in (
            ("priority", "interactive"),
            ("priority", 1),
            ("on_invalid_line", "ignore"),
            ("order", ["any"]),
            ("model_policy", ""),
        )
    ),
    *(
        (body_with(input_file_id=value), 404, "not_found", "input_file_id")
        for value in ("file-" + "0" * 32, "file-1", "", "\0")
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), CREATE_ERRORS)
def test_create_errors(steady: Api, body: dict[str, Any], status: int, code: str, param: str) -> None:
    if body.get("input_file_id") == FILE:
        body = {**body, "input_file_id": steady.upload()}
    before = steady.http.get("/v1/batches").json()
    check_refused(steady.http.post("/v1/batches", content=json.dumps(body)), status, code, param)
    assert steady.http.get("/v1/batches").json() == before


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'{"endpoint": NaN}', "invalid_json", None),
        (b'{"endpoint": 1e400}', "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"metadata": {"n": ' + b"9" * 5000 + b"}}", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b"null", "invalid_type", None),
        (b'{"endpoint": "a", "endpoint": "b"}', "invalid_value", "endpoint"),
    ],
)
def test_bodies_that_are_no_json_object(steady: Api, raw: bytes, code: str, param: str | None) -> None:
    check_refused(steady.http.post("/v1/batches", content=raw), 400, code, param)


def test_a_file_of_another_purpose(api: Api) -> None:
    file_id = api.upload()
    with api.database.transaction() as conn:
        conn.execute(sa.text("update file set purpose = 'batch_output'"))
    check_refused(api.http.post("/v1/batches", json=api.create_body(file_id)), 400, "invalid_purpose", "input_file_id")


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("36h", 129_600), ("30d", 2_592_000), ("024h", 86_400)])
def test_windows(steady: Api, window: str, seconds: int) -> None:
    made = steady.create(completion_window=window)
    assert (made["completion_window"], made["expires_at"] - made["created_at"]) == (window, seconds)


def test_fields_that_are_not_known_are_ignored(api: Api) -> None:
    made = api.create(surprise=1, metadata=None, queue=None, output_expires_after=None)
    assert "surprise" not in made
    assert made["metadata"] is None


def test_a_tenant_over_its_quota_gets_429(settings: Settings, database: Database, broker_url: str) -> None:
    with serve_api(settings, database, broker_url, max_queued_lines=3) as api:
        first = api.create()
        take_in(api, first["id"])
        body = api.create_body()
        check_refused(api.http.post("/v1/batches", json=body), 429, "queue_full")
        with pytest.raises(openai.RateLimitError):
            api.sdk().batches.create(input_file_id=body["input_file_id"], endpoint=CHAT, completion_window="24h")
        api.desk().answer(first["id"], ["c0"])
        assert api.create(body["input_file_id"])["status"] == "validating"


def test_the_hint_goes_to_control_and_a_broker_that_is_down_is_no_error(
    settings: Settings, database: Database, broker_url: str
) -> None:
    with serve_api(settings, database, broker_url) as api:
        made = api.create()
        ((task_id, subject),) = open_tasks(api, TaskKind.INTAKE)
        assert subject == made["id"]
    client = redis.Redis.from_url(broker_url)
    _, message = client.blpop(["control"], timeout=10)
    client.close()
    assert json.loads(message)["headers"]["argsrepr"] == str([task_id])  # and nothing but the id
    with serve_api(settings, database, f"redis://127.0.0.1:{free_port()}/0") as api:
        made = api.create()
        assert api.http.get(f"/v1/batches/{made['id']}").json()["status"] == "validating"
        assert len(open_tasks(api, TaskKind.INTAKE)) == 2


def test_the_same_key_and_body_is_the_same_batch(api: Api) -> None:
    body = api.create_body(metadata={"a": "1", "b": "2"})
    headers = {"idempotency-key": "nightly-1"}
    first = api.http.post("/v1/batches", json=body, headers=headers).json()
    reordered = dict(reversed(body.items()))
    again = api.http.post("/v1/batches", content=json.dumps(reordered, indent=3), headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, first["id"])
    assert [subject for _, subject in open_tasks(api, TaskKind.INTAKE)] == [first["id"]]
    for other in ({**body, "metadata": {"a": "2", "b": "2"}}, {**body, "unknown": 1}):
        check_refused(
            api.http.post("/v1/batches", json=other, headers=headers), 409, "idempotency_conflict", "Idempotency-Key"
        )
    assert api.http.post("/v1/batches", json=body, headers={"idempotency-key": "nightly-2"}).json()["id"] != first["id"]
    assert api.http.post("/v1/batches", json=body).json()["id"] != first["id"]


def test_a_repeat_is_answered_though_the_file_is_gone(api: Api) -> None:
    body, headers = api.create_body(), {"idempotency-key": "k"}
    first = api.http.post("/v1/batches", json=body, headers=headers).json()
    with api.database.transaction() as conn:
        conn.execute(sa.text("delete from file"))
    assert api.http.post("/v1/batches", json=body, headers=headers).json() == first


def test_a_refused_create_keeps_no_key(api: Api) -> None:
    headers = {"idempotency-key": "k"}
    check_refused(
        api.http.post("/v1/batches", json=api.create_body("file-" + "0" * 32), headers=headers),
        404,
        "not_found",
        "input_file_id",
    )
    assert api.http.post("/v1/batches", json=api.create_body(), headers=headers).status_code == 200


def test_a_key_is_kept_for_24_hours_and_its_tenant(api: Api) -> None:
    body, headers = api.create_body(), {"idempotency-key": "k"}
    first = api.http.post("/v1/batches", json=body, headers=headers).json()
    with api.database.transaction() as conn:
        conn.execute(sa.update(idempotency_key).values(created_at=sa.text("created_at - interval '24 h'")))
    second = api.http.post("/v1/batches", json={**body, "completion_window": "1d"}, headers=headers)
    assert (second.status_code, second.json()["id"] == first["id"]) == (200, False)


@pytest.mark.parametrize("key", ["k" * 256, "a\tb"])
def test_keys_that_are_none(steady: Api, key: str) -> None:
    answer = steady.http.post("/v1/batches", json=steady.create_body(), headers={"idempotency-key": key})
    check_refused(answer, 400, "invalid_value", "Idempotency-Key")


def test_creates_at_the_same_moment_with_one_key_make_one_batch(api: Api) -> None:
    body, headers = api.create_body(), {"idempotency-key": "k"}
    together = threading.Barrier(8)

    def create(_: int) -> str:
        together.wait()
        return str(httpx.post(f"{api.url}/v1/batches", json=body, headers=headers, timeout=30).json()["id"])

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 1
    assert len(open_tasks(api, TaskKind.INTAKE)) == 1


def test_a_retry_of_the_sdk_gets_the_batch_that_the_lost_answer_made(api: Api) -> None:
    body = api.create_body()

    def create(retry: int, **changes: Any) -> str:
        headers = {"x-stainless-retry-count": str(retry)}
        return str(api.http.post("/v1/batches", json={**body, **changes}, headers=headers).json()["id"])

    first = create(0)
    assert create(1) == first
    assert create(2) == first
    second = create(0)  # the application meant it twice
    assert second != first
    assert create(1) == second
    assert create(1, completion_window="1h") not in (first, second)
    with api.database.transaction() as conn:
        conn.execute(sa.update(idempotency_key).values(created_at=sa.text("created_at - interval '15 min'")))
    assert create(1) not in (first, second)


def test_pages(api: Api) -> None:
    file_id = api.upload()
    ids = [api.create(file_id)["id"] for _ in range(5)][::-1]
    assert [item.id for item in api.sdk().batches.list(limit=2)] == ids
    page = api.http.get("/v1/batches", params={"limit": 2, "after": ids[1]}).json()
    assert [item["id"] for item in page["data"]] == ids[2:4]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[3], True)
    assert api.http.get("/v1/batches", params={"after": ids[3]}).json()["has_more"] is False
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert api.http.get("/v1/batches?limit=0").json() == empty
    with api.database.transaction() as conn:
        conn.execute(sa.delete(control_task))
        conn.execute(sa.delete(batch).where(batch.c.id == ids[1]))
    assert api.http.get("/v1/batches", params={"limit": 2, "after": ids[1]}).json() == page


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=-1", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=", "limit"), ("limit=1.5", "limit"),
     ("after=file-" + "0" * 32, "after"), ("after=nothing", "after"), ("after=", "after"), ("after=%00", "after")],
)  # fmt: skip
def test_page_errors(steady: Api, query: str, param: str) -> None:
    check_refused(steady.http.get(f"/v1/batches?{query}"), 400, "invalid_value", param)


@pytest.mark.parametrize("batch_id", ["batch_" + "0" * 32, "batch_1", "file-" + "0" * 32, "%00", "batch_%ED%A0%80"])
def test_unknown_batches_are_404_on_every_call(steady: Api, batch_id: str) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/results")):
        check_refused(steady.http.request(method, f"/v1/batches/{batch_id}{path}"), 404, "not_found", "batch_id")


@pytest.mark.parametrize("status", list(BatchStatus))
def test_cancel_from_every_status(steady: Api, status: BatchStatus) -> None:
    made = steady.create()
    with steady.database.transaction() as conn:
        conn.execute(sa.update(batch).where(batch.c.id == made["id"]).values(status=status))
    answer = steady.http.post(f"/v1/batches/{made['id']}/cancel")
    task_subjects = [subject for _, subject in open_tasks(steady, TaskKind.CANCEL)]
    if status in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED):
        check_refused(answer, 409, "batch_not_cancellable", "batch_id")
        assert made["id"] not in task_subjects
        return
    moves = status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    assert answer.json()["status"] == ("cancelling" if moves else status)
    assert (answer.json()["cancelling_at"] is not None) == moves
    assert (made["id"] in task_subjects) == moves
    assert steady.http.post(f"/v1/batches/{made['id']}/cancel").json()["status"] == answer.json()["status"]


def test_the_sdk_cancels_and_sees_no_retries_of_a_409(api: Api) -> None:
    made = api.create()
    assert api.sdk().batches.cancel(made["id"]).status == "cancelling"
    ((task_id, _),) = open_tasks(api, TaskKind.CANCEL)
    run_task(api.desk().work, task_id)
    assert api.sdk().batches.retrieve(made["id"]).status == "cancelled"
    with api.database.transaction() as conn:
        conn.execute(sa.update(batch).values(status=BatchStatus.COMPLETED))
    with pytest.raises(openai.ConflictError) as refused:
        api.sdk().batches.cancel(made["id"])
    assert refused.value.code == "batch_not_cancellable"
    assert refused.value.request.headers["x-stainless-retry-count"] == "0"


def test_every_arrow_is_guarded(api: Api) -> None:
    made = api.create()
    with api.database.transaction() as conn:
        assert not batches.move_batch(conn, made["id"], BatchStatus.FINALIZING)
        assert batches.move_batch(conn, made["id"], BatchStatus.IN_PROGRESS, total=3)
        assert not batches.move_batch(conn, made["id"], BatchStatus.IN_PROGRESS)
        assert batches.move_batch(conn, made["id"], BatchStatus.FINALIZING)
        assert not batches.move_batch(conn, made["id"], BatchStatus.CANCELLING)
        assert batches.move_batch(conn, made["id"], BatchStatus.COMPLETED)
    seen = api.http.get(f"/v1/batches/{made['id']}").json()
    assert seen["request_counts"]["total"] == 3
    assert all(seen[f"{status}_at"] for status in ("in_progress", "finalizing", "completed"))
