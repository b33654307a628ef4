"""The accounting of a batch: every non-blank line ends exactly once, in exactly one of its two files."""

from __future__ import annotations

from dataclasses import dataclass


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
