"""The prefix groups of a batch and the bound of its cached tokens, over all its keys, a page at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from service.core import prefix
from service.store import instances, lines
from service.store.lines import KeyRow
from service.work import Work

_DEFAULT_BLOCK_TOKENS = 32


def measure_batch(work: Work, batch_id: str) -> tuple[int, int]:
    """(prefix groups, bound tokens): `prefix.prefix_groups` and `prefix.bound_tokens` without holding every key.

    The bound is taken at the smallest block size of the ready instances of each job's model.
    """
    boots = work.database.run(lambda conn: instances.ready_boots(conn, work.settings.stale_boot_seconds))
    blocks: dict[str, int] = {}
    for boot in boots:
        if boot.block_size:
            blocks[boot.model] = min(boot.block_size, blocks.get(boot.model, boot.block_size))
    with work.database.transaction() as conn:
        return _sum(lines.keys_in_order(conn, batch_id), blocks)


def _sum(pages: Iterable[list[KeyRow]], blocks: dict[str, int]) -> tuple[int, int]:
    groups = bound = 0
    last: list[KeyRow] = []  # of the page before: its neighbour is the first of this one
    for page in pages:
        page_groups, page_bound = _measure([*last, *page], blocks)
        groups += page_groups + (0 if last else 1)
        bound += page_bound
        last = page[-1:]
    return groups, bound


def _measure(rows: list[KeyRow], blocks: dict[str, int]) -> tuple[int, int]:
    """(groups that begin, tokens that can come from cache) behind the first row, in key order."""
    shared = prefix.neighbour_shared_tokens([row.prefix_key for row in rows])
    tokens = np.array([row.prompt_tokens for row in rows], dtype=np.int64)
    same = prefix.shares_group(shared, tokens, np.roll(tokens, 1))
    bound = sum(
        prefix.cacheable_tokens(count, row.prompt_tokens, blocks.get(row.model, _DEFAULT_BLOCK_TOKENS))
        for count, row in zip(shared[1:].tolist(), rows[1:], strict=True)
    )
    return int((~same[1:]).sum()), bound
