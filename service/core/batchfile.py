"""A batch's input file: physical lines out of byte chunks, and the request that each line holds, or its error.

CONTRACT.md sections 3 and 7 are the law here. Result lines are built in `resultline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from service.core import strictjson
from service.core.model import Endpoint

MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_LINES = 50_000
MAX_CUSTOM_ID_CHARACTERS = 256
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r"
_DIGEST_BYTES = 16

SERVER_OWNED_KEYS = frozenset(
    {
        # The server sets these itself: what a client sends would break the tenants' separation or our order.
        "cache_salt", "priority", "request_id", "rid",
        # Streaming is refused; what is left of it (null, false, options) means nothing to a batch.
        "stream", "stream_options",
        # Names or keys of other engines: the address of an engine is never taken from a request.
        "api_key", "base_url", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        # An adapter is chosen by `model`, which the prefix key knows of; a path would go past it.
        "lora_path",
    }
)  # fmt: skip

# The field that holds the prompt, by endpoint.
PROMPT_FIELDS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}


class LineCode(StrEnum):
    """Why a line, or the file, is no valid input; the `code` in a batch's `errors.data`."""

    INVALID_JSON_LINE = "invalid_json_line"
    INVALID_REQUEST = "invalid_request"
    MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
    INVALID_CUSTOM_ID = "invalid_custom_id"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    INVALID_METHOD = "invalid_method"
    INVALID_URL = "invalid_url"
    STREAMING_UNSUPPORTED = "streaming_unsupported"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_MISMATCH = "model_mismatch"
    LINE_TOO_LONG = "line_too_long"
    TOO_MANY_TASKS = "too_many_tasks"  # of the file: ends the validation
    TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"  # of the file; intake finds it, it knows the quota
    EMPTY_BATCH = "empty_batch"  # of the file, line null


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One non-blank physical line. `raw` is None for a line over the limit, which is never held."""

    line_no: int  # 1-based; blank lines count
    start: int  # offset in the file of the line's first byte, after a byte-order mark
    end: int  # offset of the next line: where reading goes on after a restart
    raw: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why a line is refused. `custom_id` only where the line has one that is text of at most 256 characters."""

    code: LineCode
    message: str
    param: str | None
    custom_id: str | None = None
    line_no: int | None = None


def error_entry(error: LineError) -> dict[str, Any]:
    """The error as `errors.data` of a batch shows it."""
    line = None if error.code == LineCode.EMPTY_BATCH else error.line_no
    return {"code": error.code.value, "line": line, "message": error.message, "param": error.param}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLine:
    """One valid request. `body` and `body_bytes` (UTF-8 JSON) are the client's, less SERVER_OWNED_KEYS."""

    line_no: int
    custom_id: str
    model: str  # as the client wrote it
    body: dict[str, Any]
    body_bytes: bytes


class _Refused(Exception):
    """A rule is broken: carries code, message and param up to `parse_line`."""

    def __init__(self, code: LineCode, message: str, param: str | None) -> None:
        super().__init__(message)
        self.error = LineError(code=code, message=message, param=param)


def iter_lines(
    chunks: Iterable[bytes], *, limit_bytes: int = MAX_LINE_BYTES, offset: int = 0, line_no: int = 1
) -> Iterator[RawLine]:
    """The non-blank lines of a file that arrives in chunks of any size; at most one line is held at a time.

    Lines end at 0x0A and nowhere else; one 0x0D before it is dropped, and one byte-order mark at offset 0. To go on
    after a restart, pass chunks from `RawLine.end` on, that offset, and the next line's number.
    """
    line = _Line(limit_bytes=limit_bytes, start=offset, line_no=line_no)
    for chunk in chunks:
        begin = 0
        while (newline := chunk.find(b"\n", begin)) >= 0:
            line.add(chunk[begin:newline])
            yield from line.take(newline_bytes=1)
            begin = newline + 1
        line.add(chunk[begin:])
    yield from line.take(newline_bytes=0)


class _Line:
    """The line being read: its bytes up to the limit, and beyond that only its length and whether it is blank."""

    def __init__(self, *, limit_bytes: int, start: int, line_no: int) -> None:
        self._limit_bytes = limit_bytes
        self._hold_bytes = limit_bytes + len(_BOM) + 1  # a mark and a 0x0D do not count against the limit
        self._start, self._line_no = start, line_no
        self._held, self._length, self._rest_is_blank = bytearray(), 0, True

    def add(self, piece: bytes) -> None:
        room = max(self._hold_bytes + 1 - len(self._held), 0)
        self._held += piece[:room]
        self._length += len(piece)
        self._rest_is_blank = self._rest_is_blank and not piece[room:].strip(_BLANK)

    def take(self, *, newline_bytes: int) -> Iterator[RawLine]:
        """Yield the line unless it is blank, and begin the next."""
        raw, start, end = bytes(self._held), self._start, self._start + self._length + newline_bytes
        whole = self._length == len(raw)
        if start == 0 and raw.startswith(_BOM):
            raw, start = raw[len(_BOM) :], len(_BOM)
        blank = self._rest_is_blank and not raw.strip(_BLANK)
        if not blank:
            raw = raw.removesuffix(b"\r") if whole else raw
            fits = whole and len(raw) <= self._limit_bytes
            yield RawLine(line_no=self._line_no, start=start, end=end, raw=raw if fits else None)
        self._start, self._line_no = end, self._line_no + 1
        self._held, self._length, self._rest_is_blank = bytearray(), 0, True


def parse_line(raw: bytes, *, endpoint: str, line_no: int) -> ParsedLine | LineError:
    """One line's request, or its first error in the order JSON, custom_id, method, url, body.

    Whether the model is served and the custom_id new takes the whole file: see `FileValidator`.
    """
    try:
        value = strictjson.loads(raw)
    except strictjson.NotJson as error:
        message = f"The line is not valid JSON: {error}."
        return LineError(code=LineCode.INVALID_JSON_LINE, message=message, param=None, line_no=line_no)
    except strictjson.AmbiguousJson as error:
        return LineError(
            code=LineCode.INVALID_REQUEST, message=str(error), param=error.path or None,
            custom_id=_showable_custom_id(error.value), line_no=line_no,
        )  # fmt: skip
    try:
        return _request(value, endpoint=endpoint, line_no=line_no)
    except _Refused as refused:
        return replace(refused.error, custom_id=_showable_custom_id(value), line_no=line_no)


def _request(value: Any, *, endpoint: str, line_no: int) -> ParsedLine:
    if not isinstance(value, dict):
        raise _Refused(LineCode.INVALID_REQUEST, "The line must be a JSON object.", None)
    custom_id = _required_text(value, "custom_id", "custom_id")
    _check_custom_id(custom_id)
    if _required_text(value, "method", "method").upper() != "POST":
        raise _Refused(LineCode.INVALID_METHOD, "The method must be POST.", "method")
    if _required_text(value, "url", "url") != endpoint:
        raise _Refused(LineCode.INVALID_URL, f"The url must be the batch's endpoint, {endpoint}.", "url")
    body = _required(value, "body", "body")
    model = _check_body(body, Endpoint(endpoint), at="body")
    kept = strip_body(body)
    return ParsedLine(
        line_no=line_no,
        custom_id=custom_id,
        model=model,
        body=kept,
        body_bytes=strictjson.dumps(kept),
    )


def check_body(body: Any, *, endpoint: str, at: str = "body") -> LineError | None:
    """The first error of a request body by itself, as of POST /jobs; None for a good one. `at` begins each param."""
    try:
        _check_body(body, Endpoint(endpoint), at=at)
    except _Refused as refused:
        return refused.error
    return None


def strip_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body without SERVER_OWNED_KEYS, in the client's order."""
    return {key: field for key, field in body.items() if key not in SERVER_OWNED_KEYS}


def _check_body(body: Any, endpoint: Endpoint, *, at: str) -> str:
    """The model that a sound body names."""
    prefix = f"{at}." if at else ""
    if not isinstance(body, dict):
        raise _Refused(LineCode.INVALID_REQUEST, "The body must be an object.", at or None)
    model = _required_text(body, "model", f"{prefix}model")
    field = PROMPT_FIELDS[endpoint]
    prompt = _required(body, field, f"{prefix}{field}")
    if not _is_prompt(prompt, endpoint):
        raise _Refused(LineCode.INVALID_REQUEST, f"{field} is of a wrong type.", f"{prefix}{field}")
    stream = body.get("stream")
    if stream is True:
        message = "Streaming is not supported: leave stream out, or set it to false."
        raise _Refused(LineCode.STREAMING_UNSUPPORTED, message, f"{prefix}stream")
    if stream is not None and stream is not False:
        raise _Refused(LineCode.INVALID_REQUEST, "stream must be a boolean.", f"{prefix}stream")
    if body.get("chat_template") is not None:  # it would alter the prompt behind the prefix key, and run code
        message = "A chat template in a request is not accepted; the served model has its own."
        raise _Refused(LineCode.INVALID_REQUEST, message, f"{prefix}chat_template")
    return model


def _is_prompt(prompt: Any, endpoint: Endpoint) -> bool:
    """Chat: objects. Else a text, texts, token ids, or lists of token ids."""
    if endpoint is Endpoint.CHAT:
        return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list):
        return False
    return any(all(is_item(item) for item in prompt) for is_item in (_is_text, _is_token, _is_tokens))


def _is_text(item: Any) -> bool:
    return isinstance(item, str)


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 0xFFFFFFFF


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and all(_is_token(token) for token in item)


def _required(holder: dict[str, Any], key: str, param: str) -> Any:
    value = holder.get(key)
    if value is None:
        raise _Refused(LineCode.MISSING_REQUIRED_PARAMETER, f"Missing required parameter: '{param}'.", param)
    return value


def _required_text(holder: dict[str, Any], key: str, param: str) -> str:
    value = _required(holder, key, param)
    if not isinstance(value, str):
        raise _Refused(LineCode.INVALID_REQUEST, f"'{param}' must be a string.", param)
    return value


def _check_custom_id(custom_id: str) -> None:
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARACTERS} characters."
        raise _Refused(LineCode.INVALID_CUSTOM_ID, message, "custom_id")
    if any(c < " " or "\x7f" <= c <= "\x9f" for c in custom_id):
        raise _Refused(LineCode.INVALID_CUSTOM_ID, "custom_id must hold no control characters.", "custom_id")


def _showable_custom_id(value: Any) -> str | None:
    """The custom_id of a refused line, where it has one that an error line can carry and Postgres can hold."""
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    if not isinstance(custom_id, str) or len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
        return None
    surrogate = any("\ud800" <= c <= "\udfff" for c in custom_id)
    return None if surrogate or "\0" in custom_id else custom_id


class FileValidator:
    """What takes the whole file: repeated custom_ids, models, the number of lines. Feed it every line in order.

    Memory: a 16-byte digest and a line number for each custom_id, about 150 bytes.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        known_models: Callable[[str], str | None],
        max_lines: int = MAX_LINES,
        model_policy: str = "mixed",
    ) -> None:
        """`known_models` gives the served name of a model, alias or adapter, None for one not served."""
        self._endpoint = endpoint
        self._known_models = known_models
        self._max_lines = max_lines
        self._strict = model_policy == "strict"
        self._first_lines: dict[bytes, int] = {}
        self._first_model: str | None = None
        self.lines = 0  # non-blank lines so far

    def check(self, line: RawLine) -> ParsedLine | LineError:
        """The line's request, or its error. After `too_many_tasks` nothing more needs to be read."""
        self.lines += 1
        if self.lines > self._max_lines:
            message = f"The file has more than {self._max_lines} lines."
            return self._error(line, LineCode.TOO_MANY_TASKS, message, None, None)
        if line.raw is None:
            return self._error(line, LineCode.LINE_TOO_LONG, "The line is over the limit.", None, None)
        parsed = parse_line(line.raw, endpoint=self._endpoint, line_no=line.line_no)
        first_line = self._first_use(parsed.custom_id, line.line_no)
        if isinstance(parsed, LineError):
            return parsed
        if first_line != line.line_no:
            message = f"custom_id '{strictjson.printable(parsed.custom_id)}' is already used on line {first_line}."
            return self._error(line, LineCode.DUPLICATE_CUSTOM_ID, message, "custom_id", parsed.custom_id)
        return self._check_model(line, parsed)

    def finish(self) -> LineError | None:
        """The error of the file as a whole, once every line was checked."""
        if self.lines:
            return None
        return LineError(code=LineCode.EMPTY_BATCH, message="The file holds no request.", param=None)

    def _first_use(self, custom_id: str | None, line_no: int) -> int:
        if custom_id is None:
            return line_no
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        return self._first_lines.setdefault(digest, line_no)

    def _check_model(self, line: RawLine, parsed: ParsedLine) -> ParsedLine | LineError:
        served = self._known_models(parsed.model)
        if served is None:
            message = f"The model '{strictjson.printable(parsed.model)}' is not served."
            return self._error(line, LineCode.MODEL_NOT_FOUND, message, "body.model", parsed.custom_id)
        self._first_model = self._first_model or served
        if self._strict and served != self._first_model:
            message = f"The batch began with model '{self._first_model}', and its model_policy is strict."
            return self._error(line, LineCode.MODEL_MISMATCH, message, "body.model", parsed.custom_id)
        return parsed

    def _error(
        self, line: RawLine, code: LineCode, message: str, param: str | None, custom_id: str | None
    ) -> LineError:
        return LineError(code=code, message=message, param=param, custom_id=custom_id, line_no=line.line_no)
