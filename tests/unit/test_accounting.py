"""The invariant of a batch's counts."""

from __future__ import annotations

import pytest

from service.core.accounting import AccountingBroken, Counts, check_batch_accounting


def test_counts_that_add_up_pass() -> None:
    counts = Counts(completed=3, failed=2, cancelled=1, expired=4)
    check_batch_accounting(total=10, counts=counts, written=counts)
    assert counts.errors == 7


@pytest.mark.parametrize(
    ("total", "counts", "written"),
    [
        (4, Counts(completed=3), None),
        (2, Counts(completed=3), None),
        (2, Counts(completed=3, expired=-1), None),
        (3, Counts(completed=3), Counts(completed=2, failed=1)),
    ],
)
def test_counts_that_do_not_are_refused(total: int, counts: Counts, written: Counts | None) -> None:
    with pytest.raises(AccountingBroken):
        check_batch_accounting(total=total, counts=counts, written=written)
