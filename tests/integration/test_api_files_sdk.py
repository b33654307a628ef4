"""Files through the SDK, sync and async: what it reads of a success and of each refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, steady  # noqa: F401 - two are fixtures

from service.store.tables import file

pytestmark = pytest.mark.embedded_only

LINES = b'{"n": 1}\n{"n": 2, "text": "\xe2\x80\xa8"}\n'


def test_other_tenants_files_are_404_on_every_call(api: Api) -> None:
    ours, theirs = api.make_key("ours"), api.make_key("theirs")
    file_id = api.sdk(ours).files.create(file=("in.jsonl", LINES), purpose="batch").id
    stranger = api.sdk(theirs)
    calls: list[Callable[[], Any]] = [
        lambda: stranger.files.retrieve(file_id),
        lambda: stranger.files.content(file_id),
        lambda: stranger.files.delete(file_id),
        lambda: stranger.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ]
    params = []
    for call in calls:
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "not_found"
        params.append(refused.value.param)
    assert params == ["file_id", "file_id", "file_id", "input_file_id"]
    assert list(stranger.files.list()) == []
    assert stranger.files.list(after=file_id).data == []
    assert api.sdk(ours).files.content(file_id).read() == LINES


async def test_the_async_sdk_uploads_reads_lists_downloads_and_deletes(api: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as sdk:
        made = await sdk.files.create(
            file=("in.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 2_592_000}
        )
        assert made.expires_at == made.created_at + 2_592_000
        assert await sdk.files.retrieve(made.id) == made
        assert [item.id async for item in sdk.files.list(purpose="batch", order="asc")] == [made.id]
        async with sdk.files.with_streaming_response.content(made.id) as answer:
            assert b"".join([chunk async for chunk in answer.iter_bytes()]) == LINES
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.files.create(file=("in.txt", LINES), purpose="batch")
        assert (refused.value.code, refused.value.param) == ("invalid_file_format", "file")
        assert (await sdk.files.delete(made.id)).deleted
        assert [item.id async for item in sdk.files.list()] == []


@pytest.mark.parametrize(
    ("upload", "code", "param"),
    [
        ({"file": ("in.jsonl", b""), "purpose": "batch"}, "empty_file", "file"),
        ({"file": ("in.csv", LINES), "purpose": "batch"}, "invalid_file_format", "file"),
        ({"file": ("in.jsonl", LINES), "purpose": "fine-tune"}, "invalid_value", "purpose"),
        (
            {
                "file": ("in.jsonl", LINES),
                "purpose": "batch",
                "expires_after": {"anchor": "created_at", "seconds": 3_599},
            },
            "invalid_value",
            "expires_after",
        ),
    ],
)
def test_the_sdk_reads_the_upload_errors(steady: Api, upload: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        steady.sdk().files.create(**upload)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.type == "invalid_request_error"


def test_the_sdk_reads_expired_content_and_a_range_beyond_the_end(api: Api) -> None:
    sdk = api.sdk(max_retries=0)
    file_id = api.upload(LINES)
    with pytest.raises(openai.APIStatusError) as beyond:
        sdk.files.content(file_id, extra_headers={"Range": "bytes=4000-"})
    assert (beyond.value.status_code, beyond.value.code) == (416, "invalid_range")
    assert sdk.files.content(file_id, extra_headers={"Range": "bytes=1-3"}).read() == LINES[1:4]
    with api.database.transaction() as conn:
        conn.execute(sa.update(file).values(expires_at=sa.func.now()))
    with pytest.raises(openai.NotFoundError) as expired:
        sdk.files.content(file_id)
    assert (expired.value.code, expired.value.param) == ("file_expired", "file_id")
    assert sdk.files.retrieve(file_id).id == file_id  # the object stays, with its expires_at
