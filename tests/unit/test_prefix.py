"""service.core.prefix: keys share exactly what their prompts share, to a rung."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core import prefix

ROOT = prefix.root_digest(model="m", revision=None, adapter=None, salt=b"salt")
depths = st.integers(0, 70_000)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, n)


@given(depths)
def test_rung_table_and_its_inverse_agree(n_tokens: int) -> None:
    table = prefix.rung_depths(n_tokens)
    assert len(table) == prefix.rungs_covered(n_tokens)
    assert all(prefix.rungs_covered(depth) == place + 1 for place, depth in enumerate(table))
    assert prefix.rungs_to_tokens(len(table)) <= n_tokens
    assert n_tokens < prefix.rungs_to_tokens(len(table) + 1)
    last = table[-1] if table else 0
    assert prefix.rungs_to_tokens(len(table) + 1) - last == prefix.rung_span(last)


def test_rung_spacing_is_the_one_of_the_design() -> None:
    table = prefix.rung_depths(34_000)
    assert table[:2] == [32, 64]
    assert table[127:130] == [4096, 4224, 4352]
    assert table[351:] == [32768, 33280, 33792]


@given(common=st.integers(0, 6000), tail_a=st.integers(1, 400), tail_b=st.integers(1, 400))
def test_keys_share_what_prompts_share_rounded_down_to_a_rung(common: int, tail_a: int, tail_b: int) -> None:
    head = tokens(common)
    a = np.concatenate([head, np.full(tail_a, 60_001)])
    b = np.concatenate([head, np.full(tail_b, 60_002)])
    expected = max((depth for depth in prefix.rung_depths(common)), default=0)
    assert prefix.shared_tokens(prefix.prefix_key(a, ROOT), prefix.prefix_key(b, ROOT)) == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200))
def test_lists_and_arrays_give_one_key_of_four_bytes_a_rung(ids: list[int]) -> None:
    key = prefix.prefix_key(ids, ROOT)
    assert key == prefix.prefix_key(np.array(ids, dtype=np.int64), ROOT)
    assert len(key) == prefix.RUNG_BYTES * prefix.rungs_covered(len(ids))


@pytest.mark.parametrize("bad", [[-1] * 40, [2**32] * 40, [0.5] * 40, [[1, 2], [3, 4]]])
def test_ids_that_are_no_tokens_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        prefix.prefix_key(bad, ROOT)


def test_a_root_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="root"):
        prefix.prefix_key([1] * 32, b"short")


def test_a_prompt_below_one_rung_has_the_empty_key() -> None:
    assert prefix.prefix_key([1] * 31, ROOT) == b""
    assert prefix.group_label(b"", 1000) == "short"


fields = st.tuples(
    st.text(max_size=4),
    st.none() | st.text(max_size=4),
    st.none() | st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(st.binary(max_size=3), max_size=3),
    st.sampled_from(["tokens", "bytes"]),
)


def root_of(values: tuple) -> bytes:
    model, revision, adapter, salt, media, kind = values
    return prefix.root_digest(model=model, revision=revision, adapter=adapter, salt=salt, media=media, kind=kind)


@given(fields, fields)
def test_different_fields_give_different_roots(a: tuple, b: tuple) -> None:
    assert (root_of(a) == root_of(b)) == (a == b)


def test_the_root_separates_equal_prompts() -> None:
    other = prefix.root_digest(model="m", revision=None, adapter=None, salt=b"other")
    assert prefix.shared_tokens(prefix.prefix_key(tokens(100), ROOT), prefix.prefix_key(tokens(100), other)) == 0


def test_keys_of_bytes_count_four_bytes_as_a_token() -> None:
    root = prefix.root_digest(model="m", revision=None, adapter=None, salt=b"", kind="bytes")
    a, b = b"x" * 1000 + b"left" * 50, b"x" * 1000 + b"right" * 50
    assert prefix.shared_tokens(prefix.prefix_key_bytes(a, root), prefix.prefix_key_bytes(b, root)) == 224
    assert prefix.tokens_of_bytes(1001) == 251


rungs = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"\0\0\0\0", b"\0\0\0a"]), max_size=6).map(b"".join)


@given(rungs, rungs)
def test_shared_rungs_counts_leading_units(a: bytes, b: bytes) -> None:
    units_a = [a[i : i + 4] for i in range(0, len(a), 4)]
    units_b = [b[i : i + 4] for i in range(0, len(b), 4)]
    expected = next(
        (i for i, (x, y) in enumerate(zip(units_a, units_b, strict=False)) if x != y),
        min(len(units_a), len(units_b)),
    )
    assert prefix.shared_rungs(a, b) == expected


@given(st.lists(st.tuples(rungs, st.integers(0, 31)), max_size=30))
def test_order_is_by_key_then_length_then_position(jobs: list[tuple[bytes, int]]) -> None:
    keys = [key for key, _ in jobs]
    lengths = np.array([len(key) // 4 * 32 + extra for key, extra in jobs], dtype=np.int64)
    assert prefix.sort_order(keys).tolist() == sorted(range(len(keys)), key=lambda i: (keys[i], i))
    expected = sorted(range(len(keys)), key=lambda i: (keys[i], lengths[i], i))
    assert prefix.sort_order(keys, lengths).tolist() == expected


@given(st.lists(rungs, max_size=30), st.randoms(use_true_random=False))
def test_key_order_is_a_depth_first_walk(keys: list[bytes], random) -> None:
    ordered = sorted(keys)
    shared = prefix.neighbour_shared_tokens(ordered)
    for first in range(len(ordered)):
        for second in range(first + 1, len(ordered)):
            assert prefix.shared_tokens(ordered[first], ordered[second]) == shared[first + 1 : second + 1].min()


@given(st.integers(0, 500), st.integers(1, 500), st.sampled_from([16, 32, 64, 128]))
def test_cacheable_is_full_blocks_and_never_the_last_token(shared: int, prompt: int, block: int) -> None:
    served = prefix.cacheable_tokens(shared, prompt, block)
    assert served % block == 0
    assert 0 <= served <= min(shared, prompt - 1)
    assert served + block > min(shared, prompt - 1)
    each = prefix.cacheable_tokens_each(np.array([shared]), np.array([prompt]), block)
    assert each.tolist() == [served]


small_rungs = st.lists(st.sampled_from([b"aaaa", b"bbbb"]), max_size=3).map(b"".join)


@given(st.lists(st.tuples(small_rungs, st.integers(0, 31)), max_size=6), st.randoms(use_true_random=False))
def test_no_order_serves_more_than_the_bound(jobs: list[tuple[bytes, int]], random) -> None:
    keys = [key for key, _ in jobs]
    lengths = np.array([len(key) // 4 * 32 + extra for key, extra in jobs], dtype=np.int64)
    bound = prefix.bound_tokens(keys, lengths, 32)
    order = list(range(len(jobs)))
    for _ in range(5):
        random.shuffle(order)
        served = 0
        for place, job in enumerate(order):
            best = max((prefix.shared_tokens(keys[job], keys[other]) for other in order[:place]), default=0)
            served += prefix.cacheable_tokens(best, int(lengths[job]), 32)
        assert served <= bound


def test_groups_are_runs_that_share_half_of_the_shorter_prompt() -> None:
    keys = [b"", b"aaaa", b"aaaabbbb", b"aaaabbbbcccc", b"dddd"]
    lengths = np.array([10, 40, 200, 100, 40], dtype=np.int64)
    assert prefix.prefix_groups(keys, lengths).tolist() == [0, 1, 1, 1, 2]
    assert prefix.prefix_groups([], np.zeros(0, dtype=np.int64)).tolist() == []
    lengths[1] = 65  # shares 32 of 65: less than half
    assert prefix.prefix_groups(keys, lengths).tolist() == [0, 1, 2, 2, 3]


def test_a_label_names_the_prefix_at_a_depth() -> None:
    key = bytes.fromhex("0102030405060708090a0b0c")
    assert prefix.group_label(key, 32) == "01020304"
    assert prefix.group_label(key, 70) == "05060708"
    assert prefix.group_label(key, 4000) == "090a0b0c"


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=60))
def test_neighbours_share_what_two_keys_share(rungs: list[list[int]]) -> None:
    keys = [b"".join((rung * 7).to_bytes(4, "big") for rung in path) for path in rungs]  # a rung of zeros too
    expected = [0, *(prefix.shared_tokens(a, b) for a, b in itertools.pairwise(keys))][: len(keys)]
    assert prefix.neighbour_shared_tokens(keys).tolist() == expected


def test_neighbours_share_across_the_blocks_they_are_compared_in() -> None:
    keys = [(number // 3).to_bytes(4, "big") + b"same" * (number % 700) for number in range(9_000)]
    expected = [0, *(prefix.shared_tokens(a, b) for a, b in itertools.pairwise(keys))]
    assert prefix.neighbour_shared_tokens(keys).tolist() == expected
