"""The prefix key: a prompt's chained hashes at fixed depths, so that sorting keys walks the prefix tree.

A *rung* is a depth in tokens at which the chained hash is recorded: every 32 tokens to 4,096, every 128 to 32,768,
every 512 beyond. The chain is vLLM's idea of a block hash (each block's hash folds in its parent's); the rungs are
the same for every engine, so one key serves instances of any block size. DESIGN.md section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

KEY_VERSION = 1  # folded into the root: keys of another version share nothing with these
RUNG_BYTES = 4  # kept of each 16-byte hash; a collision mis-groups a job and harms nothing else
BYTES_PER_TOKEN = 4  # assumed where there is no tokenizer
_DIGEST_BYTES = 16
_FINE, _MIDDLE, _COARSE = 32, 128, 512  # tokens from one rung to the next
_FINE_END, _MIDDLE_END = 4096, 32768  # where the next spacing begins
_MATRIX_KEYS, _MATRIX_BYTES = 4096, 2 * 2**20  # compared at once
_FINE_RUNGS = _FINE_END // _FINE
_MIDDLE_RUNGS = _FINE_RUNGS + (_MIDDLE_END - _FINE_END) // _MIDDLE


def rungs_covered(n_tokens: int) -> int:
    """How many rungs a prompt of `n_tokens` covers in full."""
    if n_tokens <= _FINE_END:
        return max(n_tokens, 0) // _FINE
    if n_tokens <= _MIDDLE_END:
        return _FINE_RUNGS + (n_tokens - _FINE_END) // _MIDDLE
    return _MIDDLE_RUNGS + (n_tokens - _MIDDLE_END) // _COARSE


def rungs_to_tokens(n_rungs: int) -> int:
    """Depth in tokens of the last of the first `n_rungs` rungs; 0 for none."""
    if n_rungs <= _FINE_RUNGS:
        return n_rungs * _FINE
    if n_rungs <= _MIDDLE_RUNGS:
        return _FINE_END + (n_rungs - _FINE_RUNGS) * _MIDDLE
    return _MIDDLE_END + (n_rungs - _MIDDLE_RUNGS) * _COARSE


def rung_depths(n_tokens: int) -> list[int]:
    """Depths in tokens, ascending, of every rung that a prompt of `n_tokens` covers in full."""
    return [rungs_to_tokens(n_rungs) for n_rungs in range(1, rungs_covered(n_tokens) + 1)]


def rung_span(n_tokens: int) -> int:
    """Distance in tokens from depth `n_tokens` to the next rung: the key's resolution there."""
    if n_tokens < _FINE_END:
        return _FINE
    return _MIDDLE if n_tokens < _MIDDLE_END else _COARSE


def root_digest(
    *,
    model: str,
    revision: str | None,
    adapter: str | None,
    salt: bytes,
    media: Sequence[bytes] = (),
    kind: Literal["tokens", "bytes"] = "tokens",
) -> bytes:
    """The 16-byte start of the chain: two jobs share nothing unless all of this is equal.

    Every field is written with a tag and its length, and absent differs from empty, so no two sets of fields give
    the same input to the hash. `media` are content digests in prompt order.
    """
    root = blake2b(digest_size=_DIGEST_BYTES, person=b"trunkline-prefix")
    fields: list[tuple[bytes, bytes | None]] = [
        (b"v", KEY_VERSION.to_bytes(4, "little")),
        (b"k", kind.encode()),
        (b"m", model.encode()),
        (b"r", None if revision is None else revision.encode()),
        (b"a", None if adapter is None else adapter.encode()),
        (b"s", salt),
        *((b"d", digest) for digest in media),
    ]
    for tag, value in fields:
        if value is not None:
            root.update(tag + len(value).to_bytes(8, "little") + value)
    return root.digest()


def prefix_key(tokens: Sequence[int] | NDArray[Any], root: bytes) -> bytes:
    """Key of a prompt given as token ids (0 to 2**32 - 1): 4 bytes a rung, `RUNG_BYTES * rungs_covered(len)` in all.

    A prompt below 32 tokens has the empty key: it sorts first, shares nothing, and any instance will do for it.
    Raises ValueError on an id out of range or a root that is not from `root_digest`.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError("token ids must be a flat sequence of integers")
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF:
        raise ValueError("token ids must lie between 0 and 2**32 - 1")
    return _chain(ids.astype("<u4").tobytes(), root)


def prefix_key_bytes(data: bytes, root: bytes) -> bytes:
    """Key where no tokenizer is to be had: of the canonical rendering, four bytes counted as one token.

    The root must be made with kind="bytes", so that such keys share nothing with keys of tokens. Take
    `tokens_of_bytes` for the job's prompt_tokens.
    """
    return _chain(data, root)


def tokens_of_bytes(n_bytes: int) -> int:
    """The token count that goes with `prefix_key_bytes`: an estimate, rounded up."""
    return -(-n_bytes // BYTES_PER_TOKEN)


def _chain(data: bytes, root: bytes) -> bytes:
    if len(root) != _DIGEST_BYTES:
        raise ValueError("root must be the 16 bytes of root_digest")
    view = memoryview(data)
    key = bytearray()
    parent, start = root, 0
    for depth in rung_depths(len(data) // BYTES_PER_TOKEN):
        end = depth * BYTES_PER_TOKEN
        step = blake2b(parent, digest_size=_DIGEST_BYTES)
        step.update(view[start:end])
        parent, start = step.digest(), end
        key += parent[:RUNG_BYTES]
    return bytes(key)


def shared_rungs(a: bytes, b: bytes) -> int:
    """Number of leading rungs that two keys have in common."""
    n_bytes = min(len(a), len(b))
    if a[:RUNG_BYTES] != b[:RUNG_BYTES]:
        return 0
    differing = int.from_bytes(a[:n_bytes], "big") ^ int.from_bytes(b[:n_bytes], "big")
    return (n_bytes - (differing.bit_length() + 7) // 8) // RUNG_BYTES


def shared_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two prompts share from their start, rounded down to a rung."""
    return rungs_to_tokens(shared_rungs(a, b))


def sort_order(keys: Sequence[bytes], prompt_tokens: IntArray | None = None) -> IntArray:
    """Indices int64[n] that put `keys` in order: a depth-first walk of the prefix tree.

    Equal keys go by prompt length, shortest first (the last token of a prompt is always recomputed, so the longer of
    two gains more from the shorter than the other way round), then by position.
    """
    if prompt_tokens is None:
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    by_length = np.argsort(prompt_tokens, kind="stable").tolist()
    return np.array(sorted(by_length, key=keys.__getitem__), dtype=np.int64)


def neighbour_shared_tokens(keys_sorted: Sequence[bytes]) -> IntArray:
    """int64[n]: tokens that each key shares with the one before it; 0 for the first. Any order will do.

    Compared as matrices of rungs, some keys at a time: a tenth of the time that key by key takes.
    """
    n = len(keys_sorted)
    rungs = np.zeros(n, dtype=np.int64)
    n_bytes = np.fromiter(map(len, keys_sorted), dtype=np.int64, count=n)
    start = 0
    while start < n - 1:
        end, widest = start + 1, int(n_bytes[start])
        while end < n and end - start < _MATRIX_KEYS:
            wider = max(widest, int(n_bytes[end]))
            if end > start + 1 and wider * (end - start + 1) > _MATRIX_BYTES:
                break
            end, widest = end + 1, wider
        rungs[start + 1 : end] = _shared_rungs_each(keys_sorted[start:end], n_bytes[start:end], widest)
        start = end - 1
    return _depths(int(rungs.max(initial=0)))[rungs]


def _shared_rungs_each(keys: Sequence[bytes], n_bytes: IntArray, widest: int) -> IntArray:
    """int64[n - 1]: leading rungs that each of the keys, all but the first, shares with the one before it."""
    if not widest:
        return np.zeros(len(keys) - 1, dtype=np.int64)
    matrix = np.frombuffer(b"".join([key.ljust(widest, b"\0") for key in keys]), dtype="<u4").reshape(len(keys), -1)
    differs = matrix[1:] != matrix[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), widest // RUNG_BYTES)
    result: IntArray = np.minimum(first, np.minimum(n_bytes[1:], n_bytes[:-1]) // RUNG_BYTES)
    return result


@cache
def _depths_up_to(n_rungs: int) -> IntArray:
    return np.array([rungs_to_tokens(rung) for rung in range(n_rungs + 1)], dtype=np.int64)


def _depths(n_rungs: int) -> IntArray:
    """int64[n_rungs + 1 or more]: tokens of every number of rungs."""
    return _depths_up_to(-(-n_rungs // 1024) * 1024)


def cacheable_tokens(shared: int, prompt_tokens: int, block_size: int) -> int:
    """What an engine can serve of `shared` tokens: full blocks, and never the block of the prompt's last token."""
    most = max(prompt_tokens - 1, 0) // block_size
    return min(shared // block_size, most) * block_size


def cacheable_tokens_each(shared: IntArray, prompt_tokens: IntArray, block_size: int) -> IntArray:
    """`cacheable_tokens` over arrays of one length."""
    most = np.maximum(prompt_tokens - 1, 0) // block_size
    result: IntArray = np.minimum(shared // block_size, most) * block_size
    return result


def bound_tokens(keys: Sequence[bytes], prompt_tokens: IntArray, block_size: int) -> int:
    """The most tokens that any schedule could serve from cache: one engine, unbounded cache, in key order."""
    order = sort_order(keys, prompt_tokens)
    shared = neighbour_shared_tokens([keys[place] for place in order.tolist()])
    return int(cacheable_tokens_each(shared, prompt_tokens[order], block_size).sum())


def shares_group(shared: IntArray, prompt_tokens: IntArray, prompt_tokens_before: IntArray) -> NDArray[np.bool_]:
    """Whether each job is of one group with the job before it: they share half of the shorter prompt or more."""
    same: NDArray[np.bool_] = (shared > 0) & (2 * shared >= np.minimum(prompt_tokens, prompt_tokens_before))
    return same


def prefix_groups(keys_sorted: Sequence[bytes], prompt_tokens_sorted: IntArray) -> IntArray:
    """int64[n]: group number of each job in key order, from 0. Prompts below one rung are a group each."""
    if not keys_sorted:
        return np.zeros(0, dtype=np.int64)
    shared = neighbour_shared_tokens(keys_sorted)
    same = shares_group(shared, prompt_tokens_sorted, np.roll(prompt_tokens_sorted, 1))
    same[0] = True
    groups: IntArray = np.cumsum(~same, dtype=np.int64)
    return groups


def group_label(key: bytes, depth_tokens: int) -> str:
    """Eight hex digits that name the prefix of `depth_tokens` (or the whole key, if shorter); "short" for no rung."""
    end = RUNG_BYTES * min(rungs_covered(depth_tokens), len(key) // RUNG_BYTES)
    return key[end - RUNG_BYTES : end].hex() if end else "short"
