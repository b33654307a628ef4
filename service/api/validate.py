"""`POST /files?validate=true`: every error of the lines that were just uploaded, found as a batch would find them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from service.api.context import Context
from service.api.errors import invalid_value
from service.core import strictjson
from service.core.batchfile import FileValidator, LineCode, LineError, RawLine, error_entry, iter_lines
from service.core.model import Endpoint

_PEEKED_LINES = 1_000  # in search of one whose url says which endpoint the file is for
_MEMORY_BYTES = 1 << 20  # of a report; what is longer waits on disk
_CHUNK_BYTES = 1 << 16
# This thread and the event loop share one interpreter: without rests, each step of every other request waits 5 ms
# (the switch interval) for its turn.
_LINES_BEFORE_REST = 5
_REST_SECONDS = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found: non-blank lines, those without an error, and the errors as JSON texts, parted by commas."""

    lines: int
    valid: int
    errors: SpooledTemporaryFile[bytes]

    @property
    def errors_bytes(self) -> int:
        return self.errors.seek(0, 2)


def is_asked(request: Request) -> bool:
    """Raises ApiError for a value that is neither true nor false."""
    value = request.query_params.get("validate", "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid_value("validate", "validate must be true or false.")
    return value in ("true", "1")


def judge(context: Context, store_path: str) -> Report:
    """Read a file of the store from end to end. For a thread: it takes as long as pass 1 of intake.

    The endpoint, which only a batch names, is taken from the first line whose url is one of ours. Raises StoreFailed.
    """
    endpoint = _endpoint_of(_lines(context, store_path))
    validator = FileValidator(
        endpoint=endpoint,
        known_models=lambda name: _served(context, endpoint, name),
        max_lines=context.settings.max_lines,
    )
    errors: SpooledTemporaryFile[bytes] = SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115 (the answer closes it)
    found = 0
    for error in _errors(validator, _lines(context, store_path)):
        errors.write((b"," if found else b"") + json.dumps(error_entry(error), separators=(",", ":")).encode())
        found += error.code not in (LineCode.EMPTY_BATCH, LineCode.TOO_MANY_TASKS)
    lines = min(validator.lines, context.settings.max_lines)
    return Report(lines=lines, valid=lines - found, errors=errors)


def report_answer(file: dict[str, Any], report: Report) -> Response:
    """The file object and its `validation`; the errors go out in pieces, however many they are."""
    head = json.dumps(file, separators=(",", ":"))[:-1]
    head += f',"validation":{{"lines":{report.lines},"valid":{report.valid},"errors":['
    tail = b"]}}"
    length = len(head) + report.errors_bytes + len(tail)
    pieces = _pieces(head.encode(), report, tail)
    return StreamingResponse(pieces, 200, {"content-length": str(length)}, media_type="application/json")


def _pieces(head: bytes, report: Report, tail: bytes) -> Iterator[bytes]:
    yield head
    with report.errors as errors:
        errors.seek(0)
        while piece := errors.read(_CHUNK_BYTES):
            yield piece
    yield tail


def _lines(context: Context, store_path: str) -> Iterator[RawLine]:
    return iter_lines(context.blobs.read(store_path), limit_bytes=context.settings.max_line_bytes)


def _errors(validator: FileValidator, lines: Iterable[RawLine]) -> Iterator[LineError]:
    for number, line in enumerate(lines):
        if number % _LINES_BEFORE_REST == 0:
            time.sleep(_REST_SECONDS)
        checked = validator.check(line)
        if isinstance(checked, LineError):
            yield checked
            if checked.code is LineCode.TOO_MANY_TASKS:
                return
    of_file = validator.finish()
    if of_file is not None:
        yield of_file


def _endpoint_of(lines: Iterable[RawLine]) -> str:
    for line in islice(lines, _PEEKED_LINES):
        try:
            value = strictjson.loads(line.raw or b"")
        except (strictjson.NotJson, strictjson.AmbiguousJson):
            continue
        url = value.get("url") if isinstance(value, dict) else None
        if isinstance(url, str) and url in set(Endpoint):
            return url
    return Endpoint.CHAT


def _served(context: Context, endpoint: str, name: str) -> str | None:
    model = context.models.resolve(name)
    return model.name if model is not None and endpoint in model.endpoints else None
