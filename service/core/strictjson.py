"""Strict JSON from strangers: what the json module lets through is refused, and the field at fault is named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 100  # of nested objects and arrays; the outermost counts as 1
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_CHARACTERS = 100  # of a name in a message or a path


class NotJson(ValueError):
    """The bytes are no JSON that every reader would read alike."""


class AmbiguousJson(ValueError):
    """The JSON parses, but a key is repeated in one object, or a string is no Unicode text.

    `path` is the dotted path of the field, "" for the outermost value; `value` is what was parsed, the last of
    repeated keys having won, so that a caller can still say whose line it was.
    """

    def __init__(self, message: str, *, path: str, value: Any) -> None:
        super().__init__(message)
        self.path = path
        self.value = value


class _Repeated(dict[str, Any]):
    """An object in which `key` came twice."""

    __slots__ = ("key",)
    key: str

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Repeated:
        value = cls(pairs)
        seen: set[str] = set()
        value.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return value


def loads(raw: bytes) -> Any:
    """The value that `raw` holds. Raises NotJson, or AmbiguousJson for repeated keys and lone surrogates.

    NotJson: no UTF-8, a byte-order mark, a syntax error, text after the value, NaN, Infinity, a number beyond a
    double, an integer of over 4,300 digits (CPython's own limit), nesting beyond 100.
    """
    repeated: list[_Repeated] = []
    value = _parse(raw, repeated)
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _too_deep(value):
        raise NotJson(f"nested more than {MAX_DEPTH} levels deep")
    if repeated:  # the last one read lies in no other such object, so it is still part of the value
        _refuse_repeated_key(value, repeated[-1])
    if _MAYBE_SURROGATE.search(raw):
        _refuse_lone_surrogates(value)
    return value


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON, keys in the order of the dicts. The value must come from `loads`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _parse(raw: bytes, repeated: list[_Repeated]) -> Any:
    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            value = _Repeated.of(pairs)
            repeated.append(value)
        return value

    decoder = json.JSONDecoder(object_pairs_hook=read_object, parse_float=_float, parse_constant=_constant)
    try:
        return decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise NotJson(f"nested more than {MAX_DEPTH} levels deep") from error
    except NotJson:
        raise
    except ValueError as error:  # what CPython says of a number beyond its limit of digits
        raise NotJson("an integer of more than 4300 digits") from error


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise NotJson("a number too large for a double")
    return value


def _constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is not JSON")


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield join(path, key), child
    elif isinstance(value, list):
        for place, child in enumerate(value):
            yield f"{path}[{place}]", child


def printable(text: str) -> str:
    """`text` as a message may quote it: at most 100 characters, none that a log, a terminal or Postgres minds."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def join(path: str, key: str) -> str:
    """The dotted path of `key` below `path`."""
    return f"{path}.{printable(key)}" if path else printable(key)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        objects = [child for node in level if isinstance(node, dict) for child in node.values()]
        arrays = [child for node in level if isinstance(node, list) for child in node]
        level = objects + arrays
    return any(isinstance(node, (dict, list)) for node in level)


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    stack = [("", value)]
    while stack:
        path, node = stack.pop()
        yield path, node
        stack.extend(_children(path, node))


def _refuse_repeated_key(value: Any, repeated: _Repeated) -> NoReturn:
    path = next(path for path, node in _walk(value) if node is repeated)
    shown = join(path, repeated.key)
    raise AmbiguousJson(f"The key '{shown}' appears twice in one object.", path=shown, value=value)


def _refuse_lone_surrogates(value: Any) -> None:
    for path, node in _walk(value):
        texts = node.keys() if isinstance(node, dict) else [node] if isinstance(node, str) else []
        if any(_has_surrogate(text) for text in texts):
            raise AmbiguousJson("A string holds half of a surrogate pair.", path=path, value=value)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
