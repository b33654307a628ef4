"""Every call of the SDK that the contract names, with both of its clients, and what they make of each refusal."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, serve_api, steady  # noqa: F401 - a fixture
from both_sdks import KINDS, Sdk, sdk_of, tries
from client_steps import complete, run_open_tasks
from control_fixtures import jsonl, request
from openai.types import Batch, FileDeleted, FileObject, Model

from service.core.model import BatchStatus
from service.settings import Settings
from service.store.session import Database
from service.store.tables import batch, file

pytestmark = pytest.mark.embedded_only

CHAT = "/v1/chat/completions"
LINES = jsonl(request(f"c{n}") for n in range(3))


@pytest.fixture(params=KINDS)
def sdk(request: pytest.FixtureRequest, steady: Api) -> Iterator[Sdk]:
    """Of a tenant that no other test has."""
    with sdk_of(request.param, steady.url, steady.make_key(f"tenant-{secrets.token_hex(6)}")) as client:
        yield client


FORM: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.JSONL", LINES)}}


def key_of(api: Api) -> dict[str, str]:
    return {"authorization": f"Bearer {api.make_key('reader')}"}


def tenant_of(api: Api, sdk: Sdk) -> str:
    with api.database.transaction() as conn:
        named = sa.text("select t.name from tenant t join api_key k on k.tenant_id = t.id order by k.id desc limit 1")
        return str(conn.execute(named).scalar_one())


def upload(sdk: Sdk, data: bytes = LINES, **fields: Any) -> FileObject:
    made: FileObject = sdk.call("files.create", file=("in.jsonl", data), purpose="batch", **fields)
    return made


def create(sdk: Sdk, file_id: str, **fields: Any) -> Batch:
    fields = {"endpoint": CHAT, "completion_window": "24h", **fields}
    made: Batch = sdk.call("batches.create", input_file_id=file_id, **fields)
    return made


def test_every_call_of_files(sdk: Sdk) -> None:
    made = upload(sdk, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert isinstance(made, FileObject)
    assert (made.expires_at or 0) - made.created_at == 3_600
    assert sdk.call("files.retrieve", made.id) == made
    assert sdk.call("files.wait_for_processing", made.id) == made
    assert sdk.call("files.content", made.id).content == LINES
    assert sdk.call("files.list").data == [made]
    assert sdk.call("files.list", purpose="batch_output").data == []
    deleted = sdk.call("files.delete", made.id)
    assert deleted == FileDeleted(id=made.id, object="file", deleted=True)
    for name in ("retrieve", "content", "delete"):
        gone = sdk.refused(f"files.{name}", made.id)
        assert (gone.status_code, gone.code, gone.param) == (404, "not_found", "file_id")
        assert isinstance(gone, openai.NotFoundError)


def test_a_file_object_has_the_fields_of_the_contract_and_no_other(steady: Api) -> None:
    made = steady.http.post("/v1/files", headers=key_of(steady), **FORM).json()
    assert made == {
        "id": made["id"],
        "object": "file",
        "bytes": len(LINES),
        "created_at": made["created_at"],
        "expires_at": None,
        "filename": "in.JSONL",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert isinstance(made["created_at"], int)


def test_every_call_of_batches(steady: Api, sdk: Sdk) -> None:
    desk = steady.desk(tenant_of(steady, sdk))
    source = upload(sdk)
    made = create(sdk, source.id, metadata={"run": "1"}, output_expires_after={"anchor": "created_at", "seconds": 7200})
    assert (made.status, made.object, made.metadata, made.endpoint) == ("validating", "batch", {"run": "1"}, CHAT)
    assert made.request_counts is not None
    assert made.request_counts.to_dict() == {"total": 0, "completed": 0, "failed": 0}
    run_open_tasks(desk)
    assert sdk.call("batches.retrieve", made.id).status == "in_progress"
    complete(desk, made.id, failed=("c1",))
    ended: Batch = sdk.call("batches.retrieve", made.id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    output = sdk.call("files.retrieve", ended.output_file_id)
    assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 7_200)
    assert {item.id for item in sdk.items("files.list")} == {source.id, ended.output_file_id, ended.error_file_id}
    written = [item.id for item in sdk.items("files.list", purpose="batch_output", limit=1)]
    assert sorted(written) == sorted(str(file_id) for file_id in (ended.output_file_id, ended.error_file_id))
    lines = [json.loads(line) for line in sdk.call("files.content", ended.error_file_id).iter_lines()]
    assert [(line["custom_id"], line["error"]) for line in lines] == [("c1", None)]
    other = create(sdk, source.id)
    assert sdk.call("batches.cancel", other.id).status == "cancelling"
    assert sdk.call("batches.cancel", other.id).status == "cancelling"
    run_open_tasks(desk)
    assert sdk.call("batches.cancel", other.id).status == "cancelled"
    assert [item.id for item in sdk.items("batches.list")] == [other.id, made.id]
    for name in ("retrieve", "cancel"):
        unknown = sdk.refused(f"batches.{name}", "batch_" + "0" * 32)
        assert (unknown.status_code, unknown.code, unknown.param) == (404, "not_found", "batch_id")


def test_every_call_of_models(sdk: Sdk) -> None:
    listed = sdk.items("models.list")
    assert [model.id for model in listed] == ["other", "small", "tiny", "tiny-legal"]
    assert all(isinstance(model, Model) for model in listed)
    assert sdk.call("models.retrieve", "tiny") == listed[2]
    unknown = sdk.refused("models.retrieve", "org/none")
    assert (unknown.status_code, unknown.code, unknown.param) == (404, "model_not_found", "model")
    assert sdk.refused("models.delete", "tiny").code == "method_not_allowed"


@pytest.mark.parametrize("what", ["files", "batches"])
def test_iterators_walk_all_pages_also_when_the_cursor_is_deleted_on_the_way(steady: Api, sdk: Sdk, what: str) -> None:
    """The default page of batches has 20, and none is given twice or left out."""
    source = upload(sdk)
    ids = [source.id, *(upload(sdk).id for _ in range(22))] if what == "files" else []
    if what == "batches":
        ids = [create(sdk, source.id).id for _ in range(23)]
    newest_first = ids[::-1]
    fields: dict[str, Any] = {} if what == "batches" else {"limit": 20}
    assert [item.id for item in sdk.items(f"{what}.list", **fields)] == newest_first
    assert [item.id for item in sdk.items(f"{what}.list", limit=7)] == newest_first
    page = sdk.call(f"{what}.list", **fields)
    assert (len(page.data), page.has_more) == (20, True)
    table = file if what == "files" else batch
    with steady.database.transaction() as conn:
        conn.execute(sa.text("delete from control_task where subject = :id"), {"id": newest_first[19]})
        conn.execute(sa.delete(table).where(table.c.id == newest_first[19]))
    assert [item.id for item in sdk.items(f"{what}.list", after=page.data[-1].id)] == newest_first[20:]


@pytest.mark.parametrize("what", ["files", "batches"])
def test_a_cursor_that_is_no_id_and_a_page_that_is_none(sdk: Sdk, what: str) -> None:
    for fields, param in (({"after": "nothing"}, "after"), ({"after": ""}, "after"), ({"limit": -1}, "limit")):
        error = sdk.refused(f"{what}.list", **fields)
        assert (error.status_code, error.code, error.param) == (400, "invalid_value", param)
        assert isinstance(error, openai.BadRequestError)
    if what == "batches":
        page = sdk.call("batches.list", limit=0)
        assert (page.data, page.has_more, page.first_id, page.last_id) == ([], False, None, None)


def test_a_conflict_is_never_repeated(steady: Api, sdk: Sdk) -> None:
    """Each 409 of the calls that the SDK has, and of an Idempotency-Key that it is told to send."""
    source = upload(sdk)
    made = create(sdk, source.id, extra_headers={"Idempotency-Key": "k"})
    assert create(sdk, source.id, extra_headers={"Idempotency-Key": "k"}).id == made.id
    used = {"Idempotency-Key": "k"}
    fields = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "1h"}
    conflicts = [
        (sdk.refused("files.delete", source.id), "file_in_use", "file_id"),
        (sdk.refused("batches.create", **fields, extra_headers=used), "idempotency_conflict", "Idempotency-Key"),
    ]
    for status in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED):
        with steady.database.transaction() as conn:
            conn.execute(sa.update(batch).where(batch.c.id == made.id).values(status=status))
        conflicts.append((sdk.refused("batches.cancel", made.id), "batch_not_cancellable", "batch_id"))
    for error, code, param in conflicts:
        assert isinstance(error, openai.ConflictError)
        assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
        assert tries(error) == 1
    assert [item.id for item in sdk.items("batches.list")] == [made.id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_queue_is_told_once_with_the_time_to_come_back(
    settings: Settings, database: Database, broker_url: str, kind: str
) -> None:
    with serve_api(settings, database, broker_url, max_queued_lines=0) as api, sdk_of(kind, api.url) as sdk:
        file_id = upload(sdk).id
        error = sdk.refused("batches.create", input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.type, tries(error)) == ("queue_full", "rate_limit_error", 1)
    assert 0 < int(error.response.headers["retry-after"]) <= 120
    with database.transaction() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(batch)).scalar_one() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_key_is_told_once(steady: Api, sdk: Sdk, kind: str) -> None:
    with sdk_of(kind, steady.url, "tl-wrong") as stranger:
        for name, fields in (("files.list", {}), ("batches.list", {}), ("models.retrieve", {"model": "tiny"})):
            error = stranger.refused(name, **fields)
            assert isinstance(error, openai.AuthenticationError)
            assert (error.code, error.type, error.param) == ("invalid_api_key", "authentication_error", None)
            assert error.request_id is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_down_is_503_and_nothing_is_written(
    settings: Settings, database: Database, broker_url: str, kind: str
) -> None:
    with (
        serve_api(settings, database, broker_url) as api,
        sdk_of(kind, api.url) as sdk,
        sdk_of(kind, api.url, max_retries=0) as once,
    ):
        fields = {"input_file_id": upload(sdk).id, "endpoint": CHAT, "completion_window": "24h"}
        store, aside = api.settings.state_folder / "files", api.settings.state_folder / "aside"
        store.rename(aside)
        store.write_text("no folder")
        down = [
            once.refused("batches.create", **fields),
            once.refused("files.create", file=("in.jsonl", LINES), purpose="batch"),
        ]
        for error in down:
            assert isinstance(error, openai.InternalServerError)
            assert (error.status_code, error.code) == (503, "service_unavailable")
            assert error.type == "server_error"
        assert (sdk.items("batches.list"), len(sdk.items("files.list"))) == ([], 1)
        with database.transaction() as conn:
            assert conn.execute(sa.text("select count(*) from control_task")).scalar_one() == 0
        store.unlink()
        aside.rename(store)
        assert sdk.call("batches.create", **fields).status == "validating"


def test_only_what_the_sdk_itself_repeats_is_taken_for_a_repeat(sdk: Sdk) -> None:
    source = upload(sdk)
    made = [create(sdk, source.id).id for _ in range(3)]
    assert len(set(made)) == 3
    again = create(sdk, source.id, extra_headers={"x-stainless-retry-count": "2"})
    assert again.id == made[-1]


METADATA = [
    {},
    {"k" * 64: "v" * 512},
    {f"key {n}": str(n) for n in range(16)},
    {"": ""},
    {"\U0001f600" * 64: "é\u2028\u0085" * 170},
]


@pytest.mark.parametrize("metadata", METADATA, ids=["empty", "long", "16", "no name", "wide"])
def test_metadata_up_to_its_limits_comes_back_as_it_was_sent(sdk: Sdk, metadata: dict[str, str]) -> None:
    made = create(sdk, upload(sdk).id, metadata=metadata)
    assert made.metadata == metadata
    assert sdk.call("batches.retrieve", made.id).metadata == metadata


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({f"k{n}": "v" for n in range(17)}, "metadata_too_large"),
        ({"k" * 65: "v"}, "metadata_too_large"),
        ({"k": "v" * 513}, "metadata_too_large"),
        ({"k": 1}, "invalid_type"),
        ({"k": None}, "invalid_type"),
        ({"k": {"a": "b"}}, "invalid_type"),
        ("text", "invalid_type"),
        ({"a\0": "b"}, "invalid_value"),
        ({"a": "\0"}, "invalid_value"),
    ],
)
def test_metadata_beyond_them_is_refused(sdk: Sdk, metadata: Any, code: str) -> None:
    fields = {"input_file_id": upload(sdk).id, "endpoint": CHAT, "completion_window": "24h"}
    error = sdk.refused("batches.create", **fields, metadata=metadata)
    assert (error.status_code, error.code, error.param) == (400, code, "metadata")
    assert sdk.items("batches.list") == []
