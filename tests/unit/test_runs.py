"""service.core.runs: lanes, sums and the index over all pieces agree, whatever is inserted, taken and renumbered."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import key_of

from service.core.runs import Piece, Runs, most_shared, place_in

INSTANCES = 3


def check_runs(runs: Runs, lanes: list[list[list[int]]], keys: dict[int, bytes]) -> None:
    """`lanes`: slots, by piece, by instance. The index is seen through `neighbours`, which is all it is for."""
    assert [[list(piece.slots) for piece in runs.lane(number)] for number in range(INSTANCES)] == lanes
    assert len(runs) == sum(map(len, lanes))
    assert [list(piece.slots) for piece in runs] == [slots for lane in lanes for slots in lane]
    for number in range(INSTANCES):
        pieces = runs.lane(number)
        assert runs.seconds[number] == pytest.approx(sum(piece.seconds for piece in pieces))
        assert all(piece.instance == number for piece in pieces)
        assert all(piece.first_key == keys[piece.slots[0]] for piece in pieces)
    firsts = sorted(piece.first_key for piece in runs)
    for key in (b"", key_of([1]), key_of([2, 2]), b"\xff" * 8, *firsts):
        check_neighbours(
            runs.neighbours(key), [one for one in firsts if one <= key], [one for one in firsts if one > key]
        )


def check_neighbours(found: list[Piece], before: list[bytes], after: list[bytes]) -> None:
    """The one after, then those before, the nearest first, as far as the first that holds several jobs."""
    assert [piece.first_key for piece in found[: len(after[:1])]] == after[:1]
    back = found[len(after[:1]) :]
    assert [piece.first_key for piece in back] == before[::-1][: len(back)]
    assert bool(back) == bool(before)
    assert all(len(piece.slots) == 1 for piece in back[:-1])


class Story:
    """Random calls, and what must come of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runs = Runs(INSTANCES)
        self.lanes: list[list[list[int]]] = [[] for _ in range(INSTANCES)]
        self.keys: dict[int, bytes] = {}

    def new_slot(self) -> int:
        slot = len(self.keys)
        self.keys[slot] = key_of([self.random.randrange(4) for _ in range(self.random.randrange(1, 5))])
        return slot

    def append(self) -> None:
        slots = sorted((self.new_slot() for _ in range(self.random.randrange(1, 4))), key=lambda slot: self.keys[slot])
        piece = Piece(slots, first_key=self.keys[slots[0]], seconds=self.random.random())
        number = self.random.randrange(INSTANCES)
        if self.random.random() < 0.5:
            self.runs.append(number, piece)
            self.lanes[number].append(slots)
        else:
            self.runs.append_head(number, piece)
            self.lanes[number].insert(0, slots)

    def pop(self) -> None:
        number = self.random.randrange(INSTANCES)
        lane = self.lanes[number]
        if not lane:
            assert self.runs.pop_head(number) is None
        elif self.random.random() < 0.5:
            piece = self.runs.pop_head(number)
            assert piece is not None
            assert list(piece.slots) == lane.pop(0)
        else:
            assert list(self.runs.pop_tail(number).slots) == lane.pop()
        if not lane:
            assert self.runs.seconds[number] == 0.0

    def insert(self) -> None:
        pieces = [(number, place) for number, lane in enumerate(self.lanes) for place in range(len(lane))]
        if not pieces:
            return
        number, at = self.random.choice(pieces)
        piece, slot = self.runs.lane(number)[at], self.new_slot()
        place = place_in(piece, [self.keys[one] for one in range(len(self.keys))], self.keys[slot])
        self.runs.insert(piece, place, slot, self.keys[slot], 0.25)
        self.lanes[number][at].insert(place, slot)
        ordered = [self.keys[one] for one in piece.slots]
        assert ordered == sorted(ordered)

    def renumber(self) -> None:
        """As `Pending.pack` does: what is in no run loses its number, the others keep their order."""
        used = sorted(slot for lane in self.lanes for slots in lane for slot in slots)
        numbers = np.full(len(self.keys), -1, dtype=np.int64)
        numbers[used] = np.arange(len(used))
        self.runs.renumber(numbers)
        self.lanes = [[[int(numbers[slot]) for slot in slots] for slots in lane] for lane in self.lanes]
        self.keys = {int(numbers[slot]): self.keys[slot] for slot in used}


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32))
def test_lanes_sums_and_index_agree(seed: int) -> None:
    story = Story(seed)
    for _ in range(40):
        story.random.choices([story.append, story.pop, story.insert, story.renumber], [4, 3, 4, 1])[0]()
        check_runs(story.runs, story.lanes, story.keys)
    while len(story.runs):
        story.pop()
        check_runs(story.runs, story.lanes, story.keys)
    assert story.runs.neighbours(b"") == []


def test_pieces_of_one_first_key_are_told_apart() -> None:
    runs, key = Runs(2), key_of([1])
    for slot in range(3):
        runs.append(slot % 2, Piece([slot], first_key=key, seconds=1.0))
    assert list(runs.pop_tail(0).slots) == [2]
    nearest = runs.neighbours(key)[0]
    assert list(nearest.slots) == [1]
    assert runs.pop_head(1) is nearest
    assert [list(piece.slots) for piece in runs.neighbours(key)] == [[0]]


def test_jobs_that_are_alone_do_not_hide_the_piece_before_them() -> None:
    runs = Runs(1)
    runs.append(0, Piece([0, 1], first_key=key_of([1]), seconds=1.0))
    for slot in (2, 3):
        runs.append(0, Piece([slot], first_key=key_of([1, slot]), seconds=1.0))
    assert [list(piece.slots) for piece in runs.neighbours(key_of([1, 9]))] == [[3], [2], [0, 1]]


def test_what_a_job_shares_is_with_the_better_neighbour() -> None:
    keys = [key_of([1, 1, 1]), key_of([1, 2, 3, 4]), key_of([1, 2, 3, 5]), key_of([3])]
    piece = Piece(range(4), first_key=keys[0], seconds=1.0)
    key = key_of([1, 2, 3, 4, 9])
    place = place_in(piece, keys, key)
    assert place == 2
    assert most_shared(piece, place, keys, key) == 4 * 32
    assert most_shared(piece, place_in(piece, keys, key_of([3, 1])), keys, key_of([3, 1])) == 32
    assert most_shared(piece, 0, keys, key_of([0])) == 0
