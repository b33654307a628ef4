"""A multipart upload as it arrives: small fields kept, the file's bytes handed on, nothing held whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.api.errors import ApiError

_MAX_PARTS = 64
_MAX_HEADER_BYTES = 16_384  # of one part
_MAX_FIELD_BYTES = 65_536  # of a field that is no file
FORM_BYTES = 8 * 2**20  # more than everything around a file can take within these limits
_MAX_NAME = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(slots=True)
class _Part:
    name: str
    filename: str | None
    value: bytearray = field(default_factory=bytearray)


class UploadParser:
    """Feed it chunks; after each, `take` gives the file bytes that it held. Parts may come in any order."""

    def __init__(self, content_type: str, *, max_file_bytes: int) -> None:
        """Raises ApiError where the body is no multipart form at all: then it has no file."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = "The body must be multipart/form-data with the parts 'file' and 'purpose'."
            raise ApiError(400, "missing_required_parameter", message, param="file")
        self._max_file_bytes = max_file_bytes
        self._header_name, self._header_value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._part: _Part | None = None
        self._parts = self._file_bytes = self._fed_bytes = 0
        self._pending = bytearray()
        self._is_whole = False
        self.filename: str | None = None  # None: no part `file` yet
        self.fields: dict[str, str] = {}
        try:
            self._parser = MultipartParser(boundary, self._callbacks())  # type: ignore[arg-type]
        except FormParserError as error:
            raise _malformed() from error

    def feed(self, chunk: bytes) -> None:
        """Raises ApiError: malformed, or a file over the limit."""
        self._fed_bytes += len(chunk)
        if self._fed_bytes > self._max_file_bytes + FORM_BYTES:  # what follows the last boundary counts too
            raise file_too_large(self._max_file_bytes)
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed() from error

    def take(self) -> bytes:
        data = bytes(self._pending)
        self._pending.clear()
        return data

    @property
    def pending_bytes(self) -> int:
        return len(self._pending)

    def finish(self) -> None:
        """Raises ApiError where the last boundary never came: a body that was cut off is no file."""
        if not self._is_whole:
            raise _malformed()

    def _callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._parts += 1
        self._headers, self._part = {}, None
        if self._parts > _MAX_PARTS:
            raise _malformed()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header_size()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._check_header_size()

    def _check_header_size(self) -> None:
        if len(self._header_name) + len(self._header_value) > _MAX_HEADER_BYTES or len(self._headers) > _MAX_PARTS:
            raise _malformed()

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._part = _Part(name, None if filename is None else filename.decode("utf-8", "replace"))
        if name == "file":
            if self.filename is not None:
                raise ApiError(400, "invalid_value", "There is more than one part 'file'.", param="file")
            self.filename = self._part.filename or ""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        assert self._part is not None
        if self._part.name == "file":
            self._file_bytes += end - start
            if self._file_bytes > self._max_file_bytes:
                raise file_too_large(self._max_file_bytes)
            self._pending += data[start:end]
            return
        self._part.value += data[start:end]
        if len(self._part.value) > _MAX_FIELD_BYTES:
            raise _malformed()

    def _end(self) -> None:
        if self._part is not None and self._part.name != "file":
            self.fields[self._part.name] = self._part.value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_whole = True


def safe_filename(name: str) -> str:
    """What may be shown of a client's file name: its last component, no control characters, at most 255 long.

    It is never used as a path all the same. The ending is kept when the name is cut.
    """
    name = _CONTROL.sub("", re.split(r"[/\\]", name)[-1]).strip()
    if len(name) <= _MAX_NAME:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem[: _MAX_NAME - len(ending) - 1]}{dot}{ending}" if dot and len(ending) < 16 else name[:_MAX_NAME]


def file_too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, "file_too_large", f"The file is larger than {limit_bytes} bytes.", param="file")


def _malformed() -> ApiError:
    return ApiError(400, "invalid_multipart", "The multipart body is malformed or was cut off.")
