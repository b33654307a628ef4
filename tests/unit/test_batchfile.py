"""service.core.batchfile: every row of CONTRACT.md's table of validation errors, and the splitting of lines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.batchfile import (
    SERVER_OWNED_KEYS,
    FileValidator,
    LineCode,
    LineError,
    ParsedLine,
    RawLine,
    check_body,
    iter_lines,
    parse_line,
)

CHAT = "/v1/chat/completions"


def request(**changes: object) -> dict[str, object]:
    line: dict[str, object] = {
        "custom_id": "a",
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    }
    return {key: value for key, value in (line | changes).items() if value is not ...}


def body(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return {key: value for key, value in (fields | changes).items() if value is not ...}


def parse(line: object, endpoint: str = CHAT) -> ParsedLine | LineError:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(raw, endpoint=endpoint, line_no=7)


# --- lines


def split(data: bytes, sizes: list[int], limit: int = 1000) -> list[RawLine]:
    chunks, begin = [], 0
    for size in sizes:
        chunks.append(data[begin : begin + size])
        begin += size
    return list(iter_lines([*chunks, data[begin:]], limit_bytes=limit))


pieces = st.sampled_from([b"a", b"{}", b"\n", b"\r", b"\r\n", b" ", b"\t", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x0c"])


def expected_lines(data: bytes, limit: int) -> list[tuple[int, bytes | None]]:
    lines = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip(b" \t\r"):
            content = line.removesuffix(b"\r")
            lines.append((number, content if len(content) <= limit else None))
    return lines


@given(st.lists(pieces, max_size=30).map(b"".join), st.lists(st.integers(0, 5)), st.integers(1, 8))
def test_lines_do_not_depend_on_the_chunks(data: bytes, sizes: list[int], limit: int) -> None:
    lines = split(data, sizes, limit)
    assert [(line.line_no, line.raw) for line in lines] == expected_lines(data, limit)
    for line in lines:
        if line.raw is not None:
            assert data[line.start : line.end].removesuffix(b"\n").removesuffix(b"\r") == line.raw


@given(st.lists(pieces, max_size=30).map(b"".join))
def test_reading_goes_on_after_any_line(data: bytes) -> None:
    lines = split(data, [])
    for place, line in enumerate(lines):
        rest = iter_lines([data[line.end :]], limit_bytes=1000, offset=line.end, line_no=line.line_no + 1)
        assert list(rest) == lines[place + 1 :]


def test_offsets_begin_after_the_mark() -> None:
    lines = split(b"\xef\xbb\xbf{}\r\n\n x", [1, 1])
    assert lines == [
        RawLine(line_no=1, start=3, end=7, raw=b"{}"),
        RawLine(line_no=3, start=8, end=10, raw=b" x"),
    ]


def test_a_long_line_is_reported_without_being_held() -> None:
    held = iter_lines((b"x" * 1000 for _ in range(1000)), limit_bytes=10)
    assert list(held) == [RawLine(line_no=1, start=0, end=1_000_000, raw=None)]
    assert split(b" " * 5000 + b"\n", [100], limit=10) == []
    assert split(b" " * 5000 + b"x\n", [100], limit=10)[0].raw is None


# --- one line


def test_a_good_line() -> None:
    parsed = parse(request(body=body(temperature=0.5, x="\0é")))
    assert isinstance(parsed, ParsedLine)
    assert (parsed.line_no, parsed.custom_id, parsed.model) == (7, "a", "m")
    assert json.loads(parsed.body_bytes) == parsed.body == body(temperature=0.5, x="\0é")
    assert parsed.body_bytes.index(b"temperature") < parsed.body_bytes.index(b'"x"')


def test_server_owned_keys_are_stripped_from_the_body_alone() -> None:
    extra = dict.fromkeys(SERVER_OWNED_KEYS, "x") | {"stream": False}
    parsed = parse(request(body=body(**extra, metadata={"priority": 1})))
    assert isinstance(parsed, ParsedLine)
    assert parsed.body == body(metadata={"priority": 1})
    assert isinstance(parse(request(body=body(stream=None))), ParsedLine)


@pytest.mark.parametrize("raw", [b"{", b'{"a":NaN}', b"\xff", b"{} {}", b"[" * 5000, b'{"a":1e999}'])
def test_invalid_json_line(raw: bytes) -> None:
    error = parse(raw)
    assert isinstance(error, LineError)
    assert (error.code, error.param, error.custom_id, error.line_no) == ("invalid_json_line", None, None, 7)


RAW = json.dumps(request()).encode()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ([], "invalid_request", None),
        (3, "invalid_request", None),
        (request(custom_id=3), "invalid_request", "custom_id"),
        (request(method=3), "invalid_request", "method"),
        (request(url=[]), "invalid_request", "url"),
        (request(body="x"), "invalid_request", "body"),
        (request(body=body(model=3)), "invalid_request", "body.model"),
        (request(body=body(messages="x")), "invalid_request", "body.messages"),
        (request(body=body(messages=["x"])), "invalid_request", "body.messages"),
        (request(body=body(stream="yes")), "invalid_request", "body.stream"),
        (request(body=body(stream=1)), "invalid_request", "body.stream"),
        (request(body=body(chat_template="{{x}}")), "invalid_request", "body.chat_template"),
        (request(body=body(x="\ud800")), "invalid_request", "body.x"),
        (request(custom_id="\ud800"), "invalid_request", "custom_id"),
        (RAW.replace(b'"model": "m"', b'"model": "m", "model": "n"'), "invalid_request", "body.model"),
        (RAW.replace(b'"url"', b'"custom_id": "b", "url"'), "invalid_request", "custom_id"),
        (request(custom_id=...), "missing_required_parameter", "custom_id"),
        (request(custom_id=None), "missing_required_parameter", "custom_id"),
        (request(method=...), "missing_required_parameter", "method"),
        (request(url=...), "missing_required_parameter", "url"),
        (request(body=...), "missing_required_parameter", "body"),
        (request(body=body(model=...)), "missing_required_parameter", "body.model"),
        (request(body=body(messages=...)), "missing_required_parameter", "body.messages"),
        (request(body=body(messages=None)), "missing_required_parameter", "body.messages"),
        (request(custom_id=""), "invalid_custom_id", "custom_id"),
        (request(custom_id="x" * 257), "invalid_custom_id", "custom_id"),
        (request(custom_id="a\nb"), "invalid_custom_id", "custom_id"),
        (request(custom_id="a\0b"), "invalid_custom_id", "custom_id"),
        (request(custom_id="a\x85b"), "invalid_custom_id", "custom_id"),
        (request(method="GET"), "invalid_method", "method"),
        (request(url="/v1/embeddings"), "invalid_url", "url"),
        (request(url=CHAT + "/"), "invalid_url", "url"),
        (request(body=body(stream=True)), "streaming_unsupported", "body.stream"),
    ],
)
def test_every_error_has_its_code_and_param(line: object, code: str, param: str | None) -> None:
    error = parse(line)
    assert isinstance(error, LineError)
    assert (error.code, error.param, error.line_no) == (code, param, 7)


def test_errors_name_the_line_s_custom_id_where_it_has_a_usable_one() -> None:
    assert parse(request(url="x")).custom_id == "a"
    assert parse(request(custom_id="a\nb")).custom_id == "a\nb"
    assert parse(request(custom_id="a\0b")).custom_id is None
    assert parse(request(custom_id="x" * 257)).custom_id is None
    assert parse(request(body=body(x="\ud800"))).custom_id == "a"


@pytest.mark.parametrize(
    ("endpoint", "field", "good", "bad"),
    [
        ("/v1/completions", "prompt", ["x", ["x", "y"], [1, 2], [[1], [2]], ""], [3, {}, [1, "x"], [True], [-1]]),
        ("/v1/embeddings", "input", ["x", ["x"], [5], [[5]]], [3, [[["x"]]], [None]]),
    ],
)
def test_prompts_of_the_other_endpoints(endpoint: str, field: str, good: list[object], bad: list[object]) -> None:
    for prompt in good:
        line = request(url=endpoint, body={"model": "m", field: prompt})
        assert isinstance(parse(line, endpoint), ParsedLine), prompt
    for prompt in bad:
        error = parse(request(url=endpoint, body={"model": "m", field: prompt}), endpoint)
        assert isinstance(error, LineError), prompt
        assert (error.code, error.param) == ("invalid_request", f"body.{field}")
    error = parse(request(url=endpoint, body={"model": "m"}), endpoint)
    assert (error.code, error.param) == ("missing_required_parameter", f"body.{field}")


def test_a_body_can_be_checked_by_itself() -> None:
    assert check_body(body(), endpoint=CHAT) is None
    assert check_body(body(model=None), endpoint=CHAT, at="").param == "model"
    assert check_body([], endpoint=CHAT).param == "body"


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_is_a_request_or_an_error(value: object) -> None:
    assert isinstance(parse(value), (ParsedLine, LineError))


# --- the whole file

SERVED = {"m": "m", "alias": "m", "n": "n"}


def check(*lines: object, **options: object) -> list[ParsedLine | LineError]:
    validator = FileValidator(endpoint=CHAT, known_models=SERVED.get, **options)
    data = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    checked = [validator.check(line) for line in iter_lines([data], limit_bytes=500)]
    end = validator.finish()
    return checked if end is None else [*checked, end]


def codes(checked: list[ParsedLine | LineError]) -> list[str | None]:
    return [line.code if isinstance(line, LineError) else None for line in checked]


def test_a_second_use_of_a_custom_id_names_the_first_line() -> None:
    checked = check(b"", request(), request(custom_id="b"), request(), request())
    assert codes(checked) == [None, None, "duplicate_custom_id", "duplicate_custom_id"]
    assert all("line 2" in error.message and error.custom_id == "a" for error in checked[2:])
    assert [error.line_no for error in checked[2:]] == [4, 5]


def test_a_refused_line_uses_its_custom_id_too() -> None:
    assert codes(check(request(url="x"), request())) == ["invalid_url", "duplicate_custom_id"]


def test_models() -> None:
    lines = [request(custom_id=str(i), body=body(model=name)) for i, name in enumerate(["alias", "m", "n", "gone"])]
    assert codes(check(*lines)) == [None, None, None, "model_not_found"]
    assert codes(check(*lines, model_policy="strict")) == [None, None, "model_mismatch", "model_not_found"]
    assert check(lines[3])[0].param == "body.model"


def test_limits_of_the_file() -> None:
    lines = [request(custom_id=str(i)) for i in range(3)]
    assert codes(check(*lines, max_lines=2)) == [None, None, "too_many_tasks"]
    assert codes(check(request(body=body(x="y" * 500)), lines[0])) == ["line_too_long", None]


@pytest.mark.parametrize("data", [b"", b"\n \t\r\n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_an_empty_batch(data: bytes) -> None:
    [error] = check(data)
    assert (error.code, error.line_no, error.param) == (LineCode.EMPTY_BATCH, None, None)


def test_offered_codes_are_those_of_the_contract() -> None:
    assert len(LineCode) == 14
