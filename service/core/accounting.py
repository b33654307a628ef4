"""The accounting of a batch: every non-blank line ends exactly once, in exactly one of its two files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.model import LineErrorCode


class AccountingBroken(ValueError):
    """The counts of a batch do not add up to its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Ended lines by outcome; skipped lines are in `failed`."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def errors(self) -> int:
        """Lines that belong in the error file."""
        return self.failed + self.cancelled + self.expired


def check_batch_accounting(*, total: int, counts: Counts, written: Counts | None = None) -> None:
    """Raise AccountingBroken unless the counts add up to `total`, none is negative, and what was written agrees."""
    values = (counts.completed, counts.failed, counts.cancelled, counts.expired)
    if min(values) < 0 or sum(values) != total:
        raise AccountingBroken(f"{sum(values)} lines ended of {total}: {counts}")
    if written is not None and written != counts:
        raise AccountingBroken(f"written {written}, counted {counts}")


def count_written(output: Iterable[bytes], error: Iterable[bytes]) -> Counts:
    """What the lines of a batch's two files say, to be held against its counts. Raises ValueError for a line that is
    no result line. `output` need only be counted; an error line says itself whether it was cancelled or expired."""
    codes = Counter(_code_of(line) for line in error)
    cancelled, expired = codes[LineErrorCode.BATCH_CANCELLED], codes[LineErrorCode.BATCH_EXPIRED]
    return Counts(
        completed=sum(1 for _ in output),
        failed=codes.total() - cancelled - expired,
        cancelled=cancelled,
        expired=expired,
    )


def _code_of(line: bytes) -> str | None:
    """The code of a line that no engine answered; None for one that an engine refused."""
    record = json.loads(line)
    error = record.get("error") if isinstance(record, dict) else None
    return error.get("code") if isinstance(error, dict) else None
