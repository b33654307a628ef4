"""service.core.recent: the longest match is that of all keys that still fit their instance's cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prefixes import key_of

from service.core.prefix import shared_tokens
from service.core.recent import Recent

paths = st.lists(st.integers(0, 2), max_size=5)


def test_the_instance_that_ran_a_group_last_is_found() -> None:
    recent = Recent(2)
    assert recent.longest_match(key_of([1, 2])) == (0, -1)
    recent.add(0, key_of([1, 2, 3]), 100, 1000)
    recent.add(1, key_of([1, 5]), 100, 1000)
    assert recent.longest_match(key_of([1, 2, 9])) == (64, 0)
    assert recent.longest_match(key_of([1, 5, 5])) == (64, 1)
    assert recent.longest_match(key_of([7])) == (0, -1)


def test_what_the_cache_has_no_room_for_is_forgotten_oldest_first() -> None:
    recent = Recent(1)
    recent.add(0, key_of([1, 1]), 60, 100)
    recent.add(0, key_of([2, 2]), 40, 100)
    recent.add(0, key_of([3, 3]), 1, 100)
    assert recent.longest_match(key_of([1, 1])) == (0, -1)
    assert recent.longest_match(key_of([2, 2])) == (64, 0)
    recent.add(0, key_of([4, 4]), 101, 100)
    assert recent.longest_match(key_of([3, 3])) == (0, -1)
    assert recent.longest_match(key_of([4, 4])) == (0, -1)


def test_a_new_boot_holds_nothing_and_the_others_keep_what_they_have_under_their_new_number() -> None:
    recent = Recent(2)
    recent.add(0, key_of([1, 1]), 10, 100)
    recent.add(1, key_of([2, 2]), 10, 100)
    recent.change_fleet([None, 1, 0])
    assert recent.longest_match(key_of([1, 1])) == (64, 2)
    assert recent.longest_match(key_of([2, 2])) == (64, 1)
    recent.change_fleet([None, None])
    assert recent.longest_match(key_of([1, 1])) == (0, -1)
    recent.add(1, key_of([1, 1]), 10, 100)
    assert recent.longest_match(key_of([1, 1])) == (64, 1)


def test_each_group_of_a_run_finds_what_its_instance_ran_of_it_before() -> None:
    recent = Recent(2)
    recent.add(0, key_of([1, 2, 3]), 10, 1000)
    recent.add(1, key_of([8, 8, 8]), 10, 1000)
    keys = [key_of([0]), key_of([1, 2, 4]), key_of([1, 2, 5]), key_of([8, 8, 9])]
    cached = np.array([0, 0, 64, 0])
    begins = np.array([True, True, False, True])
    recent.recall(0, keys, np.array([100] * 4), cached, begins, 16)
    assert cached.tolist() == [0, 64, 64, 0]


@given(
    st.lists(st.tuples(st.integers(0, 2), paths, st.integers(0, 60)), max_size=40),
    paths,
)
def test_it_agrees_with_looking_at_every_key(added: list[tuple[int, list[int], int]], path: list[int]) -> None:
    recent = Recent(3)
    held: list[list[tuple[bytes, int]]] = [[], [], []]
    for instance, rungs, tokens in added:
        recent.add(instance, key_of(rungs), tokens, 100)
        held[instance].append((key_of(rungs), tokens))
        while sum(tokens for _, tokens in held[instance]) > 100:
            held[instance].pop(0)
    tokens, instance = recent.longest_match(key_of(path))
    most = max((shared_tokens(key, key_of(path)) for keys in held for key, _ in keys), default=0)
    assert tokens == most
    assert (instance == -1) == (most == 0)
    if most:
        assert any(shared_tokens(key, key_of(path)) == most for key, _ in held[instance])
