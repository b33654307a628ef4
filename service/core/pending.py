"""The jobs of one flow that wait, in slots: arrays that grow by doubling, and are packed at every plan.

44 bytes a job in arrays (at most twice that after a growth) and one reference to its key. A slot's key is given up as
soon as its job is taken, so memory falls with the backlog.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.cut import FloatArray
from service.core.plan import Backlog
from service.core.policy import Arrivals
from service.core.prefix import IntArray

_COLUMNS: dict[str, type] = {
    "job_ids": np.int64,
    "prompt_tokens": np.int32,
    "output_tokens": np.int32,
    "body_bytes": np.int32,
    "owners": np.int32,
    "deadlines": np.float64,
    "due": np.float64,
    "alive": np.bool_,
}


class Pending:
    """Slots are numbered in order of arrival until `pack` numbers them anew."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []  # b"" once taken
        self.count = 0  # alive
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype=kind) for name, kind in _COLUMNS.items()}

    def __len__(self) -> int:
        """Slots in use, alive or not."""
        return len(self.keys)

    def extend(self, arrivals: Arrivals) -> range:
        """The slots of the jobs that came."""
        start, more = len(self.keys), len(arrivals.jobs.job_ids)
        self._reserve(start + more)
        self.keys.extend(arrivals.jobs.keys)
        values = {
            "job_ids": arrivals.jobs.job_ids,
            "prompt_tokens": arrivals.jobs.prompt_tokens,
            "output_tokens": arrivals.jobs.output_tokens,
            "body_bytes": arrivals.jobs.body_bytes,
            "owners": arrivals.owners,
            "deadlines": arrivals.deadlines,
            "due": np.nan,
            "alive": True,
        }
        for name, value in values.items():
            self._columns[name][start : start + more] = value
        self.count += more
        return range(start, start + more)

    def column(self, name: str, slots: Sequence[int] | IntArray) -> IntArray:
        """int64[slots] of a column of whole numbers."""
        return self._columns[name][np.asarray(slots, dtype=np.int64)].astype(np.int64)

    def prompt_tokens(self, slot: int) -> int:
        return int(self._columns["prompt_tokens"][slot])

    def deadlines(self, slots: Sequence[int] | IntArray) -> FloatArray:
        """float64[slots]."""
        found: FloatArray = self._columns["deadlines"][np.asarray(slots, dtype=np.int64)]
        return found

    def due(self, slots: IntArray) -> FloatArray:
        """float64[slots]: the deadlines that are kept, inf for others; nan where that was not said yet."""
        found: FloatArray = self._columns["due"][slots]
        return found

    def set_due(self, slots: IntArray, due: FloatArray) -> None:
        """Say which deadlines are kept."""
        self._columns["due"][slots] = due

    def alive(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots whose job still waits, in the order given."""
        flags = self._columns["alive"]
        return [slot for slot in slots if flags[slot]]

    def alive_slots(self) -> IntArray:
        """All of them, in order of arrival."""
        return np.flatnonzero(self._columns["alive"][: len(self.keys)])

    def take(self, slots: Iterable[int]) -> None:
        """The jobs wait no longer."""
        flags = self._columns["alive"]
        for slot in slots:
            if flags[slot]:
                flags[slot] = False
                self.keys[slot] = b""
                self.count -= 1

    def drop(self, owner: int) -> int:
        """All jobs of an owner wait no longer; how many they were. Costs a look at every slot."""
        n = len(self.keys)
        mine = np.flatnonzero((self._columns["owners"][:n] == owner) & self._columns["alive"][:n])
        self.take(mine.tolist())
        return int(mine.size)

    def pack(self) -> IntArray:
        """Number the waiting jobs anew, from 0 in order of arrival, and free the memory of the others. Returns the new
        number of every old slot that is alive, as int64[old slots]."""
        n, slots = len(self.keys), self.alive_slots()
        numbers: IntArray = np.cumsum(self._columns["alive"][:n], dtype=np.int64) - 1
        if len(slots) < n:
            keys = self.keys
            self.keys = [keys[slot] for slot in slots.tolist()]
            self._columns = {name: column[slots] for name, column in self._columns.items()}
        return numbers

    def backlog(self, slots: IntArray) -> Backlog:
        """What the planner takes, with slots for job ids."""
        return Backlog(
            job_ids=slots,
            keys=[self.keys[slot] for slot in slots.tolist()],
            prompt_tokens=self.column("prompt_tokens", slots),
            output_tokens=self.column("output_tokens", slots),
            body_bytes=self.column("body_bytes", slots),
        )

    def _reserve(self, n: int) -> None:
        size = len(self._columns["job_ids"])
        if n <= size:
            return
        for name, column in self._columns.items():
            grown = np.zeros(max(n, 2 * size if size else n), dtype=column.dtype)
            grown[:size] = column
            self._columns[name] = grown
