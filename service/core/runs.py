"""The plan in force of one flow: a run of pieces for each instance, and an index over all pieces in key order.

A piece is a cohort to be: neighbouring jobs in execution order, which inside a piece is key order. Pieces leave at the
head when their instance has room, and at the tail when another instance has run dry.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from service.core.prefix import IntArray, shared_tokens

_LOOK_BACK = 16  # pieces


class Piece:
    """Slots of jobs that run one after the other on one instance."""

    __slots__ = ("begins_group", "first_key", "instance", "seconds", "serial", "slots")

    def __init__(self, slots: Iterable[int], *, first_key: bytes, seconds: float, begins_group: bool = False) -> None:
        self.slots = array("q", slots)
        self.first_key = first_key
        self.seconds = seconds  # estimated
        self.begins_group = begins_group  # no job before its first, here or elsewhere, was of that one's group
        self.instance = -1  # of the run it is in
        self.serial = -1  # tells pieces of one first key apart


class Runs:
    """One deque of pieces an instance, and the sum of their estimated seconds."""

    def __init__(self, n_instances: int) -> None:
        self.seconds = [0.0] * n_instances
        self._lanes: list[deque[Piece]] = [deque() for _ in range(n_instances)]
        self._index: list[tuple[bytes, int]] = []  # (first key, serial) of every piece, ascending
        self._by_serial: dict[int, Piece] = {}
        self._serials = 0

    def __iter__(self) -> Iterator[Piece]:
        """Every piece, instance by instance in execution order."""
        for lane in self._lanes:
            yield from lane

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._by_serial)

    def lane(self, instance: int) -> Sequence[Piece]:
        """An instance's pieces, the next one in front."""
        return self._lanes[instance]

    def append(self, instance: int, piece: Piece) -> None:
        """To the tail of a run."""
        self._lanes[instance].append(piece)
        self._enter(instance, piece)

    def append_head(self, instance: int, piece: Piece) -> None:
        """To the head of a run."""
        self._lanes[instance].appendleft(piece)
        self._enter(instance, piece)

    def pop_head(self, instance: int) -> Piece | None:
        """The next piece of an instance; None where it has none."""
        return self._leave(self._lanes[instance].popleft()) if self._lanes[instance] else None

    def pop_tail(self, instance: int) -> Piece:
        """The last piece of an instance, which must have one."""
        return self._leave(self._lanes[instance].pop())

    def neighbours(self, key: bytes) -> list[Piece]:
        """The piece that begins after `key`, and those that begin at or before it, back to one that holds more than
        one job: a late arrival alone, planned elsewhere, must not hide the piece that it fell out of."""
        place = bisect_right(self._index, (key, self._serials))
        around = [self._by_serial[serial] for _, serial in self._index[place : place + 1]]
        for _, serial in reversed(self._index[max(place - _LOOK_BACK, 0) : place]):
            around.append(self._by_serial[serial])
            if len(around[-1].slots) > 1:
                break
        return around

    def insert(self, piece: Piece, place: int, slot: int, key: bytes, seconds: float) -> None:
        """A job joins a piece at index `place` of it."""
        piece.slots.insert(place, slot)
        piece.seconds += seconds
        self.seconds[piece.instance] += seconds
        if place == 0:
            self._forget(piece)
            piece.first_key = key
            insort(self._index, (key, piece.serial))

    def renumber(self, numbers: IntArray) -> None:
        """Every slot s is numbers[s] from now on."""
        for piece in self:
            piece.slots = array("q", numbers[np.asarray(piece.slots)].tolist())

    def _enter(self, instance: int, piece: Piece) -> None:
        piece.instance, piece.serial = instance, self._serials
        self._serials += 1
        self._by_serial[piece.serial] = piece
        insort(self._index, (piece.first_key, piece.serial))
        self.seconds[instance] += piece.seconds

    def _leave(self, piece: Piece) -> Piece:
        self._forget(piece)
        del self._by_serial[piece.serial]
        left = self.seconds[piece.instance] - piece.seconds
        self.seconds[piece.instance] = left if self._lanes[piece.instance] else 0.0  # no rounding is left behind
        return piece

    def _forget(self, piece: Piece) -> None:
        del self._index[bisect_left(self._index, (piece.first_key, piece.serial))]


def place_in(piece: Piece, keys: Sequence[bytes], key: bytes) -> int:
    """Where in key order a job joins a piece: before the index returned."""
    return bisect_right(piece.slots, key, key=lambda slot: keys[slot])


def most_shared(piece: Piece, place: int, keys: Sequence[bytes], key: bytes) -> int:
    """Tokens that a job which joins at `place` shares with the neighbour in the piece that it shares more with."""
    around = piece.slots[max(place - 1, 0) : place + 1]
    return max((shared_tokens(keys[slot], key) for slot in around), default=0)
