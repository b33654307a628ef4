"""The commonest errors of a batch: samples that the store has counted, under the codes and words of its error file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.model import LineErrorCode
from service.core.resultline import DEFAULT_MESSAGES, error_envelope

TOP_ERRORS = 10
MAX_MESSAGE_CHARACTERS = 1_000
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSample:
    """So many lines with one error: answered (`status_code`), skipped (`skipped_for`), or neither (`code`)."""

    count: int
    status_code: int | None = None
    response: bytes | None = None  # an engine's answer; None too where it is too long to be a message
    code: str | None = None  # a LineErrorCode
    skipped_for: str | None = None  # a code of validation
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopError:
    """`message` is one of those that were counted; the others differ from it in numbers at most."""

    code: str | None
    message: str
    count: int


def top_errors(samples: Iterable[ErrorSample], limit: int = TOP_ERRORS) -> list[TopError]:
    """The commonest first. What differs only in numbers (token counts, ids) is counted together."""
    found: dict[tuple[str | None, int | None, str], TopError] = {}
    for sample in samples:
        code, message = _words(sample)
        message = message[:MAX_MESSAGE_CHARACTERS]
        key = (code, sample.status_code, _NUMBER.sub("#", message))
        known = found.get(key)
        count = sample.count + (known.count if known else 0)
        found[key] = TopError(code=code, message=known.message if known else message, count=count)
    return sorted(found.values(), key=lambda error: (-error.count, error.code or "", error.message))[:limit]


def _words(sample: ErrorSample) -> tuple[str | None, str]:
    """Code and message, as the line in the error file has them."""
    if sample.status_code is not None:
        inside = error_envelope(sample.status_code, sample.response or b"")["error"]
        return inside["code"], inside["message"]
    if sample.skipped_for is not None:
        return LineErrorCode.SKIPPED_INVALID_LINE.value, f"{sample.skipped_for}: {sample.message}"
    code = LineErrorCode(sample.code or LineErrorCode.WORKER_LOST)
    return code.value, sample.message or DEFAULT_MESSAGES[code]
