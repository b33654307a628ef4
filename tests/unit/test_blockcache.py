"""service.core.blockcache: ids share what keys share, and no block is lost or held twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixes import key_of

from service.core import prefix
from service.core.blockcache import BlockCache, block_ids, check_cache

ROOT = prefix.root_digest(model="m", revision=None, adapter=None, salt=b"")


@given(
    common=st.integers(0, 6000),
    tails=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    block_size=st.sampled_from([16, 32, 48, 64, 96, 128, 512]),
)
def test_ids_are_shared_as_far_as_the_keys(common: int, tails: tuple[int, int], block_size: int) -> None:
    prompts = [np.concatenate([np.arange(common), np.full(tail, 10**6 + n)]) for n, tail in enumerate(tails)]
    keys = [prefix.prefix_key(prompt, ROOT) for prompt in prompts]
    a, b = (block_ids(key, len(p), block_size, n) for n, (key, p) in enumerate(zip(keys, prompts, strict=True)))
    assert [len(a), len(b)] == [len(prompt) // block_size for prompt in prompts]
    n_shared = prefix.shared_tokens(*keys) // block_size
    assert a[:n_shared] == b[:n_shared]
    assert set(a[n_shared:]).isdisjoint(b[n_shared:])
    assert len(set(a)) == len(a)


def test_equal_hashes_below_different_parents_are_different_blocks() -> None:
    a, b = block_ids(key_of([1, 9, 9]), 96, 32, 1), block_ids(key_of([2, 9, 9]), 96, 32, 2)
    assert set(a).isdisjoint(b)
    assert set(block_ids(key_of([0, 0]), 64, 32, 1)).isdisjoint(block_ids(key_of([1, 0]), 64, 32, 1))


def test_blocks_beyond_the_key_are_the_job_s_own() -> None:
    assert block_ids(b"", 64, 32, 1) != block_ids(b"", 64, 32, 2)
    assert all(block_id < 0 for block_id in block_ids(b"", 64, 32, 0))


def fill(cache: BlockCache, ids: list[int]) -> list[int]:
    blocks = cache.take(cache.hits(ids, 10**6), len(ids))
    for block, block_id in zip(blocks, ids, strict=True):
        cache.publish(block, block_id)
    return blocks


def test_the_tail_of_the_least_recent_is_evicted_first() -> None:
    cache = BlockCache(capacity_blocks=6, block_size=32)
    for ids in ([1, 2, 3], [4, 5, 6]):
        cache.release(fill(cache, ids))
    fill(cache, [7])
    assert len(cache.hits([1, 2, 3], 1000)) == 2
    assert len(cache.hits([4, 5, 6], 1000)) == 3


def test_pinned_blocks_are_never_evicted() -> None:
    cache = BlockCache(capacity_blocks=4, block_size=32)
    fill(cache, [1, 2])
    cache.release(fill(cache, [3, 4]))
    assert not cache.fits([], 3)
    assert not cache.fits(cache.hits([3, 4], 1000), 3)
    with pytest.raises(ValueError, match="do not fit"):
        cache.take([], 3)
    fill(cache, [5, 6])
    assert len(cache.hits([1, 2], 1000)) == 2
    assert cache.hits([3], 1000) == []


def test_a_block_held_twice_hits_until_both_are_gone() -> None:
    cache = BlockCache(capacity_blocks=2, block_size=32)
    first, second = cache.take([], 1), cache.take([], 1)
    for block in (*first, *second):
        cache.publish(block, 7)
    cache.release(first)
    cache.release(second)
    fill(cache, [8])
    assert cache.hits([7], 1000) == second
    cache.release(cache.take([], 1))
    assert cache.hits([7], 1000) == []


def test_the_block_of_the_last_token_never_hits() -> None:
    cache = BlockCache(capacity_blocks=9, block_size=32)
    fill(cache, [1, 2])
    assert len(cache.hits([1, 2], 64)) == 1
    assert len(cache.hits([1, 2], 65)) == 2
    assert cache.hits([1, 2], 0) == []


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2), st.booleans())),
    st.integers(1, 12),
)
def test_no_block_is_lost_or_held_twice(events: list[tuple[list[int], int, bool]], capacity: int) -> None:
    cache, running = BlockCache(capacity_blocks=capacity, block_size=32), []
    for path, extra, release in events:
        ids = [hash(tuple(path[: depth + 1])) for depth in range(len(path))]
        hits = cache.hits(ids, 32 * len(ids) + 1)
        if cache.fits(hits, len(ids) + extra):
            blocks = cache.take(hits, len(ids) + extra)
            running.append(blocks)
            for block, block_id in zip(blocks, ids, strict=False):
                cache.publish(block, block_id)
        if release and running:
            cache.release(running.pop(0))
        check_cache(cache)
        assert cache.free_blocks >= 0
    for blocks in running:
        cache.release(blocks)
    check_cache(cache)
    assert cache.free_blocks == capacity
