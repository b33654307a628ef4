"""JSON Lines in both directions: prompts and bodies to an input file, result files to lines."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from trunkline.errors import InputError, UnreadableReply
from trunkline.wire import Result

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

_SPOOL_BYTES = 8 * 2**20  # kept in memory; a longer batch goes to a temporary file

_LONGEST_LINE_BYTES = 16 * 2**20  # twice what a server takes by default

Item = str | Mapping[str, Any]


def request_body(item: Item, endpoint: str, model: str | None) -> dict[str, Any]:
    """The body of one request. A string is its prompt; a mapping is the body itself. Raises InputError."""
    body = _body_of_prompt(item, endpoint) if isinstance(item, str) else dict(item)
    if model is not None:
        body.setdefault("model", model)
    if "model" not in body:
        raise InputError("No model is named: pass model=, or put `model` into every body.")
    return body


def batch_line(item: Item, number: int, endpoint: str, model: str | None) -> dict[str, Any]:
    """One line of an input file. A mapping with `body` is a line already, only its gaps are filled."""
    is_line = not isinstance(item, str) and isinstance(item.get("body"), Mapping)
    given: dict[str, Any] = dict(cast("Mapping[str, Any]", item)) if is_line else {}
    body = request_body(given["body"] if is_line else item, endpoint, model)
    filled = {"custom_id": f"request-{number}", "method": "POST", "url": endpoint}
    return {**filled, **given, "body": body}


@contextmanager
def spool(items: Iterable[Item], endpoint: str, model: str | None) -> Iterator[BinaryIO]:
    """A temporary input file of these items, at its start. Raises InputError naming the item, counted from 1."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
        for number, item in enumerate(items, start=1):
            try:
                line = json.dumps(batch_line(item, number, endpoint, model), allow_nan=False)
            except (TypeError, ValueError, AttributeError) as error:
                raise InputError(f"Item {number} cannot be a request: {error}.") from error
            except InputError as error:
                raise InputError(f"Item {number}: {error}") from error
            file.write(line.encode() + b"\n")
        if file.tell() == 0:
            raise InputError("There is no item to submit.")
        file.seek(0)
        yield cast(BinaryIO, file)


@contextmanager
def open_input(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, str]]:
    """An input file and the name it is uploaded under, which ends in .jsonl as the contract asks. Raises InputError."""
    where = Path(path)
    try:
        file = where.open("rb")
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}.") from error
    with file:
        yield file, where.name if where.suffix.lower() == ".jsonl" else f"{where.name}.jsonl"


@contextmanager
def rewindable(stream: BinaryIO) -> Iterator[BinaryIO]:
    """`stream` itself where it can be read again, else a temporary copy. Raises InputError where it is text."""
    if isinstance(stream.read(0), str):
        raise InputError("The file is open as text; open it with mode 'rb'.")
    if stream.seekable():
        yield stream
        return
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield cast(BinaryIO, copy)


def first_endpoint(file: BinaryIO) -> str | None:
    """The url of an input file's first line, None where there is none to be read; the file is rewound."""
    first = file.readline(_LONGEST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
    file.seek(0)
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return url if isinstance(url, str) else None


class LineSplitter:
    """Chunks to lines, split at 0x0A and nowhere else: other line ends are part of a record."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their ends; blank ones are left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line for line in lines if line.strip()]

    def finish(self) -> list[bytes]:
        """The last line, where it has no end."""
        return self.feed(b"\n")


def parse_result(line: bytes) -> Result:
    """Raises UnreadableReply."""
    try:
        return Result.model_validate(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise UnreadableReply("A line of a result file is no result.") from error


def _body_of_prompt(prompt: str, endpoint: str) -> dict[str, Any]:
    match endpoint:
        case "/v1/chat/completions":
            return {"messages": [{"role": "user", "content": prompt}]}
        case "/v1/completions":
            return {"prompt": prompt}
        case "/v1/embeddings":
            return {"input": prompt}
    raise InputError(f"A plain prompt cannot be sent to {endpoint}; pass bodies instead.")
