"""service.core.strictjson: one reading of the bytes, or a named error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core import strictjson

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_what_json_writes_is_read_back(value: object, ascii_only: bool) -> None:
    assert strictjson.loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value
    assert json.loads(strictjson.dumps(value)) == value


@given(st.binary(max_size=40))
def test_any_bytes_give_a_value_or_a_named_error(raw: bytes) -> None:
    error: Exception | None = None
    try:
        strictjson.loads(raw)
    except (strictjson.NotJson, strictjson.AmbiguousJson) as caught:
        error = caught
    assert str(error).isprintable()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"a":1} x',
        b'{"a":1}{"b":2}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e400}',
        b'{"a":-1e400}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"9" * 4301 + b"}",
        b"[" * 101 + b"]" * 101,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"{'a':1}",
        b'{"a":"\x00"}',
        b'{"a":01}',
    ],
)
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(strictjson.NotJson):
        strictjson.loads(raw)


def test_the_limits_themselves_are_allowed() -> None:
    assert strictjson.loads(b"[" * 100 + b"]" * 100)
    assert strictjson.loads(b"[" * 100 + b"1" + b"]" * 100)
    assert strictjson.loads(b"9" * 4300) == int("9" * 4300)
    assert strictjson.loads(b"-" + b"9" * 4300) < 0
    assert strictjson.loads(b"[" + b"[]," * 500 + b"1]")
    assert strictjson.loads(b' {"a":"\\u0000\\ud83d\\ude00"} ') == {"a": "\0\U0001f600"}


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b'{"a":1,"a":2}', "a"),
        (b'{"a":{"b":1,"b":1}}', "a.b"),
        (b'{"a":[0,{"b":1,"c":2,"b":1}]}', "a[1].b"),
        (b'{"a":{"b":1,"b":1},"a":2}', "a"),
        (b'{"x":{"a":{"b":1,"b":1},"a":2}}', "x.a"),
        (b'{"":1,"":2}', ""),
    ],
)
def test_repeated_keys_are_named(raw: bytes, path: str) -> None:
    with pytest.raises(strictjson.AmbiguousJson) as caught:
        strictjson.loads(raw)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b'"\\ud800"', ""),
        (b'{"a":"\\uDFFF"}', "a"),
        (b'{"a":["x","\\ude00\\ud83d"]}', "a[1]"),
        (b'{"a":{"\\ud800":1}}', "a"),
    ],
)
def test_half_a_surrogate_pair_is_named(raw: bytes, path: str) -> None:
    with pytest.raises(strictjson.AmbiguousJson) as caught:
        strictjson.loads(raw)
    assert caught.value.path == path


def test_paths_and_quotes_are_short_and_printable() -> None:
    assert strictjson.printable("a\0b\n\ud800") == "a?b??"
    assert len(strictjson.printable("x" * 10_000)) < 120
    assert strictjson.join("", "a") == "a"
