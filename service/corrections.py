"""Feeds the ledger what results say of the caches: where each boot's results were last looked at."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from service.store import corrections
from service.store.corrections import Correction, Mark

_PER_PASS = 500  # of a boot: the rest comes with the next pass


class CorrectionFeed:
    """Begins, for each boot, with what is recorded after it was first named: the ledger knew nothing before that."""

    def __init__(self) -> None:
        self._marks: dict[int, Mark] = {}

    def next(self, conn: sa.Connection, boot_ids: Collection[int]) -> list[Correction]:
        """Corrections since the last call, of each boot in the order of recording. Boots that are not named any more
        are forgotten. When the transaction is rolled back nothing is lost that matters."""
        known = {boot_id: mark for boot_id, mark in self._marks.items() if boot_id in boot_ids}
        new = set(boot_ids) - known.keys()
        found = corrections.corrections_after(conn, known, _PER_PASS)
        start = corrections.newest_mark(conn) if new else Mark()
        self._marks = known | dict.fromkeys(new, start) | {item.boot_id: item.mark for item in found}
        return found
