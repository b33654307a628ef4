"""trunkline._lines: items to input lines and back, split at 0x0A only."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline._lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Item,
    LineSplitter,
    batch_line,
    first_endpoint,
    open_input,
    parse_result,
    rewindable,
    spool,
)
from trunkline.errors import InputError, UnreadableReply


def lines_of(items: Any, endpoint: str = CHAT, model: str | None = "m") -> list[dict[str, Any]]:
    with spool(items, endpoint, model) as file:
        return [json.loads(line) for line in file.read().splitlines()]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "model": "m"}),
        (COMPLETIONS, {"prompt": "hi", "model": "m"}),
        (EMBEDDINGS, {"input": "hi", "model": "m"}),
    ],
)
def test_a_prompt_becomes_a_line(endpoint: str, body: dict[str, Any]) -> None:
    expected = {"custom_id": "request-1", "method": "POST", "url": endpoint, "body": body}
    assert lines_of(["hi"], endpoint) == [expected]


def test_a_body_keeps_its_model_and_a_line_its_fields() -> None:
    body = {"model": "own", "messages": []}
    line = {"custom_id": "mine", "body": {"messages": []}, "extra": 1}
    assert lines_of([body, line]) == [
        {"custom_id": "request-1", "method": "POST", "url": CHAT, "body": body},
        {"custom_id": "mine", "method": "POST", "url": CHAT, "body": {"messages": [], "model": "m"}, "extra": 1},
    ]


def test_what_the_caller_gave_is_not_changed() -> None:
    body: dict[str, Any] = {"messages": []}
    batch_line(body, 1, CHAT, "m")
    batch_line({"body": body}, 1, CHAT, "m")
    assert body == {"messages": []}


@pytest.mark.parametrize(
    ("items", "model", "said"),
    [
        (["a", {"messages": []}], None, "Item 1: No model"),
        ([{"model": "m", "x": float("nan")}], None, "Item 1 cannot"),
        ([{"model": "m", "x": b"bytes"}], None, "Item 1 cannot"),
        (["a", 7], "m", "Item 2 cannot"),
        ([], "m", "no item"),
    ],
)
def test_what_is_no_request_is_refused_by_its_number(items: list[Any], model: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        lines_of(items, model=model)


def test_an_iterable_is_read_once_and_lazily() -> None:
    def prompts() -> Iterator[Item]:
        yield from ("a", "b\u2028c\x00")

    assert [line["body"]["messages"][0]["content"] for line in lines_of(prompts())] == ["a", "b\u2028c\x00"]


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line and line.strip())), st.integers(1, 7))
def test_lines_do_not_depend_on_how_they_were_cut(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    splitter = LineSplitter()
    found = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    assert found + splitter.finish() == lines


def test_other_line_ends_are_part_of_a_line() -> None:
    assert LineSplitter().feed("a\u2028b\x0b\x85c\r\n\n \nd".encode()) == ["a\u2028b\x0b\x85c\r".encode()]


def test_a_result_shows_answer_usage_or_failure() -> None:
    good = parse_result(
        b'{"custom_id":"a","response":{"status_code":200,"body":{"choices":[{"message":{"content":"yes"}}],'
        b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}},"error":null}'
    )
    assert (good.custom_id, good.text, good.failure, good.is_success) == ("a", "yes", None, True)
    assert good.usage is not None
    assert (good.usage.prompt_tokens, good.usage.cached_tokens) == (9, 4)
    refused = parse_result(b'{"response":{"status_code":400,"body":{"error":{"message":"too long","code":"c"}}}}')
    assert refused.failure is not None
    assert (refused.failure.message, refused.failure.code, refused.body) == ("too long", "c", None)
    unanswered = parse_result(b'{"response":null,"error":{"code":"batch_expired","message":"late"}}')
    assert unanswered.failure is not None
    assert unanswered.failure.code == "batch_expired"
    odd = parse_result(b'{"response":{"status_code":500,"body":"plain"}}')
    assert odd.failure is not None
    assert odd.failure.message == "the engine answered 500"
    unknown = parse_result(b'{"response":{"status_code":200,"body":{"choices":[],"usage":{"prompt_tokens":9}}}}')
    assert unknown.usage is not None
    assert (unknown.usage.cached_tokens, unknown.text) == (None, None)


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"response": 3}'])
def test_a_line_that_is_no_result_is_unreadable(line: bytes) -> None:
    with pytest.raises(UnreadableReply):
        parse_result(line)


def test_a_pipe_is_copied_and_a_file_is_not(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as out:
        out.write(b'{"url": "/v1/embeddings"}\n')
    with os.fdopen(reader, "rb") as pipe, rewindable(pipe) as copy:
        assert first_endpoint(copy) == EMBEDDINGS
        assert copy.read() == b'{"url": "/v1/embeddings"}\n'
    stream = io.BytesIO(b"x")
    with rewindable(stream) as same:
        assert same is stream


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'rb'"), rewindable(io.StringIO("x")):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("data", [b"", b"no json", b"[1]", b"{}", b'{"url": 3}', b"[" * 5000])
def test_a_first_line_without_url_names_no_endpoint(data: bytes) -> None:
    assert first_endpoint(io.BytesIO(data)) is None


def test_a_byte_order_mark_does_not_hide_the_endpoint() -> None:
    assert first_endpoint(io.BytesIO(b'\xef\xbb\xbf{"url": "/v1/completions"}')) == COMPLETIONS


def test_an_upload_is_named_as_the_contract_asks(tmp_path: Path) -> None:
    for name, sent in (("a b.jsonl", "a b.jsonl"), ("c.JSONL", "c.JSONL"), ("d.txt", "d.txt.jsonl")):
        (tmp_path / name).write_bytes(b"{}")
        with open_input(tmp_path / name) as (_, uploaded):
            assert uploaded == sent
    with pytest.raises(InputError, match="cannot be read"), open_input(tmp_path):
        pass
