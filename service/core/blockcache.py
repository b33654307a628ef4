"""The simulated engine's cache: vLLM's prefix cache block by block, without the tokens.

After vLLM 0.32, `vllm/v1/core/block_pool.py` and `kv_cache_manager.py`: full blocks only, ids that chain their
parent's, a reference count that pins what runs, and a free list from which the least recently used is evicted, a
sequence's tail first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from service.core.prefix import RUNG_BYTES, rung_depths, rungs_covered

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0 modulo 2**64
_BLOCKS_PER_JOB = 1 << 32  # room for one job's own block ids


def block_ids(key: bytes, prompt_tokens: int, block_size: int, job_id: int) -> list[int]:
    """Ids of a prompt's full blocks: equal for two jobs exactly as far as their keys share the block's end.

    Any block size will do: a block that ends between rungs takes the next rung's hash, which covers it, and one that
    the key does not cover is the job's own, with a negative id. The id is a polynomial of all rungs up to the block,
    modulo 2**64, so that equal 4-byte hashes below different parents stay apart.
    """
    n_blocks = prompt_tokens // block_size
    n_rungs = min(len(key) // RUNG_BYTES, rungs_covered(prompt_tokens))
    covering = _covering_rungs(block_size, n_blocks + -n_blocks % 256)[:n_blocks]
    covering = covering[: int(np.searchsorted(covering, n_rungs))]  # rung index of each block that the key covers
    rungs = np.frombuffer(key, dtype=">u4", count=n_rungs).astype(np.uint64) + np.uint64(1)
    chained = np.cumsum(rungs * _powers(n_rungs + -n_rungs % 256)[:n_rungs], dtype=np.uint64)
    numbers = np.arange(len(covering), dtype=np.uint64)
    shared: list[int] = (chained[covering] * np.uint64(2 * _MULTIPLIER % 2**64 + 1) + numbers).tolist()
    return shared + [own_block_id(job_id, number) for number in range(len(shared), n_blocks)]


def own_block_id(job_id: int, number: int) -> int:
    """Id of a block that no other job can share: of its output, or of the prompt's end."""
    return -(job_id * _BLOCKS_PER_JOB + number) - 1


@lru_cache(maxsize=64)
def _covering_rungs(block_size: int, n_blocks: int) -> NDArray[np.int64]:
    """Index of the first rung at or beyond the end of each block."""
    ends = np.arange(1, n_blocks + 1, dtype=np.int64) * block_size
    depths = np.array(rung_depths(n_blocks * block_size + 512), dtype=np.int64)
    return np.searchsorted(depths, ends)


@lru_cache(maxsize=64)
def _powers(n: int) -> NDArray[np.uint64]:
    factors = np.full(max(n, 1), _MULTIPLIER, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


class BlockCache:
    """A pool of blocks. Blocks are numbered; an id is what a full block holds, and several blocks may hold one id."""

    def __init__(self, *, capacity_blocks: int, block_size: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_size = block_size
        self._pins: list[int] = []  # by block number; blocks come into being when first taken
        self._ids: list[int | None] = []
        self._holders: dict[int, list[int]] = {}  # id -> block numbers, the first of them is the one that hits
        self._blank: list[int] = []  # free, without an id: reused before anything is evicted
        self._free: OrderedDict[int, None] = OrderedDict()  # free, with an id; the next to be evicted first

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence pins."""
        return self.capacity_blocks - len(self._pins) + len(self._blank) + len(self._free)

    def hits(self, ids: Sequence[int], prompt_tokens: int) -> list[int]:
        """Block numbers of the leading ids that are held; never the block of the prompt's last token."""
        found: list[int] = []
        for block_id in ids[: max(prompt_tokens - 1, 0) // self.block_size]:
            holders = self._holders.get(block_id)
            if holders is None:
                break
            found.append(holders[0])
        return found

    def fits(self, hits: Sequence[int], n_blocks: int) -> bool:
        """Whether a sequence of `n_blocks`, of which `hits` are held, can be taken now."""
        unpinned = sum(not self._pins[block] for block in hits)
        return n_blocks - len(hits) + unpinned <= self.free_blocks

    def take(self, hits: Sequence[int], n_blocks: int) -> list[int]:
        """Pin the hits and as many other blocks as are missing to `n_blocks`, evicting what must be."""
        if not self.fits(hits, n_blocks):
            raise ValueError(f"{n_blocks} blocks do not fit")
        for block in hits:
            if not self._pins[block]:
                del self._free[block]
            self._pins[block] += 1
        return [*hits, *(self._new_block() for _ in range(n_blocks - len(hits)))]

    def publish(self, block: int, block_id: int) -> None:
        """The block is full of `block_id`, and from now on others can hit it. Idempotent."""
        if self._ids[block] is None:
            self._ids[block] = block_id
            self._holders.setdefault(block_id, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Unpin a sequence's blocks. Those that nobody pins are kept until evicted, tail first."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            if self._pins[block]:
                continue
            if self._ids[block] is None:
                self._blank.append(block)
            else:
                self._free[block] = None

    def _new_block(self) -> int:
        if self._blank:
            block = self._blank.pop()
        elif len(self._pins) < self.capacity_blocks:
            block = len(self._pins)
            self._pins.append(0)
            self._ids.append(None)
        else:
            block, _ = self._free.popitem(last=False)
            self._evict(block)
        self._pins[block] = 1
        return block

    def _evict(self, block: int) -> None:
        block_id = self._ids[block]
        assert block_id is not None  # only blocks with an id are in the list
        holders = self._holders[block_id]
        holders.remove(block)
        if not holders:
            del self._holders[block_id]
        self._ids[block] = None


def check_cache(cache: BlockCache) -> None:
    """Raise AssertionError unless every block is pinned or free exactly once, and ids and holders agree."""
    pinned = {block for block, pins in enumerate(cache._pins) if pins}
    free = [*cache._blank, *cache._free]
    assert len(free) == len(set(free)), "a block is free twice"
    assert pinned.isdisjoint(free), "a block is pinned and free"
    assert pinned.union(free) == set(range(len(cache._pins))), "a block is lost"
    assert len(cache._pins) <= cache.capacity_blocks, "more blocks than there are"
    held = {block: block_id for block_id, holders in cache._holders.items() for block in holders}
    assert held == {block: block_id for block, block_id in enumerate(cache._ids) if block_id is not None}
