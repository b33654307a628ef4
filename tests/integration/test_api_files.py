"""Files over HTTP: uploads of every shape, every refusal, pages, ranges, deletes."""

from __future__ import annotations

import hashlib
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from api_fixtures import Api, api, check_refused, serve_api, steady  # noqa: F401 - two are fixtures

from service.settings import Settings
from service.store.session import Database
from service.store.tables import file

pytestmark = pytest.mark.embedded_only

LINES = b'{"n": 1}\n{"n": 2, "text": "\xe2\x80\xa8"}\n'


def form(*parts: tuple[str, str | None, bytes], boundary: str = "XX", end: str = "--XX--\r\n") -> dict[str, Any]:
    """A multipart request by hand: (name, filename, content) in that order."""
    body = b""
    for name, filename, content in parts:
        name_part = f'; filename="{filename}"' if filename is not None else ""
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{name_part}\r\n\r\n'.encode()
        body += content + b"\r\n"
    return {
        "content": body + end.encode(),
        "headers": {"content-type": f"multipart/form-data; boundary={boundary}"},
    }


PURPOSE = ("purpose", None, b"batch")
GOOD = ("file", "in.jsonl", LINES)


def stored_files(api: Api) -> tuple[list[str], list[Path]]:
    """The ids that are listed, and what lies in the store."""
    listed = [item["id"] for item in api.http.get("/v1/files").json()["data"]]
    return listed, sorted(path for path in (api.settings.state_folder / "files").rglob("*") if path.is_file())


def test_the_sdk_uploads_reads_lists_downloads_and_deletes(api: Api) -> None:
    sdk = api.sdk()
    made = sdk.files.create(file=("my requests.jsonl", LINES), purpose="batch")
    assert (made.object, made.bytes, made.filename) == ("file", len(LINES), "my requests.jsonl")
    assert (made.purpose, made.status, made.expires_at) == ("batch", "processed", None)
    assert sdk.files.retrieve(made.id) == made
    assert [item.id for item in sdk.files.list()] == [made.id]
    assert sdk.files.content(made.id).read() == LINES
    assert sdk.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as refused:
        sdk.files.retrieve(made.id)
    assert (refused.value.code, refused.value.param, refused.value.type) == (
        "not_found",
        "file_id",
        "invalid_request_error",
    )


def test_what_is_stored_is_hashed_and_nothing_else_is_left(api: Api) -> None:
    file_id = api.upload(LINES)
    with api.database.transaction() as conn:
        row = conn.execute(sa.select(file).where(file.c.id == file_id)).one()
    assert row.sha256 == hashlib.sha256(LINES).digest()
    assert "in.jsonl" not in row.store_path
    found = [path for path in api.settings.state_folder.joinpath("files").rglob("*") if path.is_file()]
    assert [str(path).endswith(row.store_path) for path in found] == [True]
    api.http.delete(f"/v1/files/{file_id}")
    assert not found[0].exists()


def test_the_sdk_sets_an_expiry(api: Api) -> None:
    made = api.sdk().files.create(
        file=("in.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600


def test_parts_may_come_in_any_order(steady: Api) -> None:
    for parts in ((PURPOSE, GOOD), (GOOD, PURPOSE), (("extra", None, b"x"), GOOD, ("more", "f.bin", b"y"), PURPOSE)):
        answer = steady.http.post("/v1/files", **form(*parts))
        assert answer.status_code == 200, answer.text
        assert steady.http.get(f"/v1/files/{answer.json()['id']}/content").content == LINES


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (form(PURPOSE), 400, "missing_required_parameter", "file"),
        (form(GOOD), 400, "missing_required_parameter", "purpose"),
        ({"json": {"purpose": "batch"}}, 400, "missing_required_parameter", "file"),
        (
            {"content": b"", "headers": {"content-type": "multipart/form-data"}},
            400,
            "missing_required_parameter",
            "file",
        ),
        (form(("purpose", None, b"fine-tune"), GOOD), 400, "invalid_value", "purpose"),
        (form(("purpose", None, b"batch_output"), GOOD), 400, "invalid_value", "purpose"),
        (form(PURPOSE, ("file", "in.json", LINES)), 400, "invalid_file_format", "file"),
        (form(PURPOSE, ("file", "jsonl", LINES)), 400, "invalid_file_format", "file"),
        (form(PURPOSE, ("file", None, LINES)), 400, "invalid_file_format", "file"),
        (form(PURPOSE, ("file", "in.jsonl", b"")), 400, "empty_file", "file"),
        (form(PURPOSE, GOOD, GOOD), 400, "invalid_value", "file"),
        (form(PURPOSE, GOOD, end=""), 400, "invalid_multipart", None),
        (form(PURPOSE, GOOD, boundary="YY"), 400, "invalid_multipart", None),
        *(
            (
                form(
                    PURPOSE,
                    GOOD,
                    *(
                        (f"expires_after[{key}]", None, value)
                        for key, value in (("anchor", anchor), ("seconds", seconds))
                        if value
                    ),
                ),
                400,
                "invalid_value",
                "expires_after",
            )
            for anchor, seconds in [
                (b"created_at", b"3599"),
                (b"created_at", b"2592001"),
                (b"created_at", b"-5"),
                (b"created_at", b"1e5"),
                (b"created_at", "\u0663\u0666\u0660\u0660".encode()),
                (b"created_at", b""),
                (b"", b"3600"),
                (b"last_active_at", b"3600"),
            ]
        ),
    ],
)
def test_upload_errors(steady: Api, request_: dict[str, Any], status: int, code: str, param: str | None) -> None:
    if request_.get("headers", {}).get("content-type", "").endswith("YY"):
        request_ = {**request_, "headers": {"content-type": "multipart/form-data; boundary=ZZ"}}
    before = stored_files(steady)
    check_refused(steady.http.post("/v1/files", **request_), status, code, param)
    assert stored_files(steady) == before


def test_a_file_over_the_limit_is_413_also_for_a_client_that_sends_on(
    settings: Settings, database: Database, broker_url: str
) -> None:
    with serve_api(settings, database, broker_url, max_file_bytes=100_000) as api:
        assert api.upload(b"x" * 100_000)
        check_refused(
            api.http.post("/v1/files", **form(PURPOSE, ("file", "a.jsonl", b"x" * 100_001))),
            413,
            "file_too_large",
            "file",
        )
        with pytest.raises(openai.APIStatusError) as refused:
            api.sdk().files.create(file=("in.jsonl", b"x" * 30_000_000), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
        kept = [path for path in (settings.state_folder / "files").rglob("*") if path.is_file()]
        assert len(kept) == 1


def test_a_client_that_asks_first_is_refused_before_it_sends(
    settings: Settings, database: Database, broker_url: str
) -> None:
    with serve_api(settings, database, broker_url, max_file_bytes=100) as api:
        address = httpx.URL(api.url)
        head = (
            "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=XX\r\n"
            "Content-Length: 9000000\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection((address.host, address.port or 0)) as client:
            client.sendall(head.encode())
            client.settimeout(10)
            answer = b""
            while b"}}" not in answer:  # head and body may come in two pieces
                answer += client.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"file_too_large" in answer


def test_a_client_that_goes_away_leaves_nothing(api: Api) -> None:
    def cut_off() -> Iterator[bytes]:
        yield form(PURPOSE, GOOD, end="")["content"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.http.post("/v1/files", content=cut_off(), headers={"content-type": "multipart/form-data; boundary=XX"})
    assert api.http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../etc/in.jsonl", "in.jsonl"),
        ("C:\\\\data\\\\in.JSONL", "in.JSONL"),
        ("a\tb\x1b[31m.jsonl", "ab[31m.jsonl"),
        ("n" * 400 + ".jsonl", "n" * 249 + ".jsonl"),
        ("données.jsonl", "données.jsonl"),
    ],
)
def test_names_are_shown_harmless(steady: Api, sent: str, shown: str) -> None:
    answer = steady.http.post("/v1/files", **form(PURPOSE, ("file", sent, LINES)))
    assert answer.json()["filename"] == shown


def test_pages(api: Api) -> None:
    ids = [api.upload() for _ in range(5)]
    sdk = api.sdk()
    assert [item.id for item in sdk.files.list(limit=2)] == ids[::-1]  # the SDK walks on by itself
    assert [item.id for item in sdk.files.list(limit=2, order="asc")] == ids
    page = api.http.get("/v1/files", params={"limit": 2, "after": ids[3]}).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[2], ids[1], True)
    api.http.delete(f"/v1/files/{ids[3]}")
    assert api.http.get("/v1/files", params={"limit": 2, "after": ids[3]}).json() == page
    assert api.http.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
    assert api.http.get("/v1/files?purpose=%00").json()["data"] == []
    assert len(api.http.get("/v1/files", params={"purpose": "batch"}).json()["data"]) == 4


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=many", "limit"),
        ("limit=-1", "limit"),
        ("order=up", "order"),
        ("after=batch_1", "after"),
        ("after=file-%00", "after"),
    ],
)
def test_page_errors(steady: Api, query: str, param: str) -> None:
    check_refused(steady.http.get(f"/v1/files?{query}"), 400, "invalid_value", param)


@pytest.mark.parametrize(
    ("range_", "expected"),
    [
        ("bytes=0-3", LINES[:4]),
        ("bytes=5-", LINES[5:]),
        ("bytes=-4", LINES[-4:]),
        ("bytes=-4000", LINES),
        ("bytes=9-4000", LINES[9:]),
    ],
)
def test_ranges(steady: Api, range_: str, expected: bytes) -> None:
    file_id = steady.upload(LINES)
    answer = steady.http.get(f"/v1/files/{file_id}/content", headers={"range": range_})
    assert (answer.status_code, answer.content) == (206, expected)
    start = LINES.index(expected)
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/{len(LINES)}"


@pytest.mark.parametrize("range_", ["lines=1-2", "bytes=0-1,3-4", "nonsense"])
def test_ranges_of_other_kinds_get_the_whole_file(steady: Api, range_: str) -> None:
    answer = steady.http.get(f"/v1/files/{steady.upload(LINES)}/content", headers={"range": range_})
    assert (answer.status_code, answer.content) == (200, LINES)
    assert answer.headers["content-type"] == "application/jsonl"
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("range_", ["bytes=5-2", "bytes=4000-", "bytes=-0", "bytes=a-b", "bytes=-"])
def test_ranges_that_cannot_be_satisfied(steady: Api, range_: str) -> None:
    answer = steady.http.get(f"/v1/files/{steady.upload(LINES)}/content", headers={"range": range_})
    check_refused(answer, 416, "invalid_range")
    assert answer.headers["content-range"] == f"bytes */{len(LINES)}"


def test_a_resumed_download_of_another_file_starts_again(steady: Api) -> None:
    file_id = steady.upload(LINES)
    etag = steady.http.get(f"/v1/files/{file_id}/content").headers["etag"]
    for if_range, status in ((etag, 206), ('"other"', 200)):
        headers = {"range": "bytes=1-", "if-range": if_range}
        assert steady.http.get(f"/v1/files/{file_id}/content", headers=headers).status_code == status


def test_an_expired_file_has_no_content(api: Api) -> None:
    file_id = api.upload()
    with api.database.transaction() as conn:
        conn.execute(sa.update(file).values(expires_at=sa.func.now()))
    check_refused(api.http.get(f"/v1/files/{file_id}/content"), 404, "file_expired", "file_id")
    check_refused(api.http.post("/v1/batches", json=api.create_body(file_id)), 404, "file_expired", "input_file_id")


@pytest.mark.parametrize("file_id", ["file-1", "batch_" + "0" * 32, "file-" + "0" * 32, "file-%00", "file-%ED%A0%80"])
def test_unknown_files_are_404_on_every_call(steady: Api, file_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        check_refused(steady.http.request(method, f"/v1/files/{file_id}{path}"), 404, "not_found", "file_id")


def test_a_file_in_use_stays(api: Api) -> None:
    file_id = api.upload()
    batch = api.create(file_id)
    check_refused(api.http.delete(f"/v1/files/{file_id}"), 409, "file_in_use", "file_id")
    with api.database.transaction() as conn:
        conn.execute(sa.text("update batch set status = 'completed'"))
    assert api.http.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    assert api.http.get(f"/v1/batches/{batch['id']}").json()["input_file_id"] == file_id


def test_bytes_that_are_gone_are_503(api: Api) -> None:
    file_id = api.upload()
    for path in (api.settings.state_folder / "files").rglob("*"):
        if path.is_file():
            path.unlink()
    answer: httpx.Response = api.http.get(f"/v1/files/{file_id}/content")
    check_refused(answer, 503, "service_unavailable")
    body = api.create_body(file_id)
    check_refused(api.http.post("/v1/batches", json=body), 503, "service_unavailable")
    assert api.http.get("/v1/batches").json()["data"] == []


def test_what_comes_after_the_form_is_limited_too(settings: Settings, database: Database, broker_url: str) -> None:
    def endless() -> Iterator[bytes]:
        yield form(PURPOSE, GOOD)["content"]
        for _ in range(200):
            yield b"z" * 65_536

    with serve_api(settings, database, broker_url, max_file_bytes=100_000) as api:
        headers = {"content-type": "multipart/form-data; boundary=XX"}
        check_refused(api.http.post("/v1/files", content=endless(), headers=headers), 413, "file_too_large", "file")
        assert stored_files(api) == ([], [])


class LostCommits(Database):
    """Commits, and its answer is lost, when told so; with `is_away` it is then gone for the next transaction."""

    loses = is_away = False

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        before = self.is_away and not self.loses
        if before:
            self.is_away = False
            raise sa.exc.OperationalError("", None, Exception("connection refused"))
        with super().transaction() as conn:
            inserted = conn.execute(sa.select(sa.func.count()).select_from(file)).scalar_one()
            yield conn
            inserted -= conn.execute(sa.select(sa.func.count()).select_from(file)).scalar_one()
        if inserted and self.loses:
            self.loses = False
            raise sa.exc.OperationalError("", None, Exception("server closed the connection unexpectedly"))


@pytest.mark.parametrize("is_away", [False, True])
def test_an_upload_whose_commit_was_not_answered_keeps_its_bytes(
    settings: Settings, database_url: str, broker_url: str, is_away: bool
) -> None:
    database = LostCommits(database_url)
    with serve_api(settings, database, broker_url) as api:
        database.loses, database.is_away = True, is_away
        answer = api.http.post("/v1/files", **form(PURPOSE, GOOD))
        if is_away:
            check_refused(answer, 503, "service_unavailable")
        ((file_id,), (_,)) = stored_files(api)
        assert is_away or answer.json()["id"] == file_id
        assert api.http.get(f"/v1/files/{file_id}/content").content == LINES
    database.close()


def test_memory_does_not_grow_with_the_file(api: Api) -> None:
    """`python -m bench.transfer` measures the same on a process of its own with 1 GB."""
    piece = b"x" * 65_536
    head, tail = form(PURPOSE, ("file", "in.jsonl", b"@"))["content"].split(b"@")

    def pieces() -> Iterator[bytes]:
        yield head
        for _ in range(1_000):
            yield piece
        yield tail

    headers = {"content-type": "multipart/form-data; boundary=XX"}
    tracemalloc.start()
    try:
        made = api.http.post("/v1/files", content=pieces(), headers=headers).json()
        assert made["bytes"] == 65_536_000
        with api.http.stream("GET", f"/v1/files/{made['id']}/content") as answer:
            assert sum(map(len, answer.iter_raw())) == 65_536_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * 2**20, f"{peak_bytes:,}"
