"""Public ids: a prefix, 12 hex digits of milliseconds, 20 of randomness: ids sort by the time they were made."""

from __future__ import annotations

import re

RANDOM_BYTES = 10

FILE_PREFIX = "file-"
BATCH_PREFIX = "batch_"
JOB_PREFIX = "job_"
LINE_PREFIX = "batch_req_"
EVENT_PREFIX = "evt_"

_TAIL = re.compile(r"[0-9a-f]{32}", re.ASCII)


def make_id(prefix: str, unix_ms: int, random_bytes: bytes) -> str:
    """`random_bytes` is RANDOM_BYTES long; `unix_ms` is the database's clock, so every host's ids sort together."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"{RANDOM_BYTES} random bytes expected, got {len(random_bytes)}")
    return f"{prefix}{unix_ms:012x}{random_bytes.hex()}"


def is_id(prefix: str, text: str) -> bool:
    """Whether `text` could be an id of that kind. What is none is never sent to the database (NUL, surrogates)."""
    return text.startswith(prefix) and _TAIL.fullmatch(text, len(prefix)) is not None


def line_id(job_id: int) -> str:
    """The public id of a line of a batch."""
    return f"{LINE_PREFIX}{job_id:016x}"


def unsent_line_id(batch_id: str, line_no: int) -> str:
    """The public id of a line that never became a job."""
    return f"{LINE_PREFIX}{batch_id.removeprefix(BATCH_PREFIX)}{line_no:08x}"
