"""The Range header: one range of bytes (RFC 9110 section 14)."""

from __future__ import annotations

import re

from service.api.errors import ApiError

_RANGE = re.compile(r"\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*")


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, stop) of the bytes asked for; None for all of them.

    Another unit, and several ranges at once, may be ignored by a server, and are. Raises ApiError 416 for a range
    that is malformed or lies beyond the end.
    """
    unit, equals, ranges = (header or "").partition("=")
    if unit.strip().lower() != "bytes" or not equals or "," in ranges:
        return None
    match = _RANGE.fullmatch(ranges)
    if match is None or match.group(1) == match.group(2) == "":
        raise _unsatisfiable(size)
    first, last = match.groups()
    if not first:
        length = int(last)
        start, stop = max(size - length, 0), size
    else:
        start = int(first)
        stop = min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            raise _unsatisfiable(size)
    if start >= stop:
        raise _unsatisfiable(size)
    return start, stop


def _unsatisfiable(size: int) -> ApiError:
    message = f"The range cannot be satisfied; the file has {size} bytes."
    return ApiError(416, "invalid_range", message, headers={"content-range": f"bytes */{size}"})
