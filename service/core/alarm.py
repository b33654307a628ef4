"""The alarm of a boot: its engine counts, cuts or keeps the prompts otherwise than the plan thinks (`key mismatch`).

Judged from finished jobs alone, again at every heartbeat, so that no question is put to a busy engine. The canaries at
the engine's start (workers/agreement.py) find most of it before a job runs; this finds what they do not ask.

The thresholds hold against what a sound engine does. Evictions do not count: a job is evidence of a cold cache only
where its neighbour had ended on this boot before it was fed, and less than half of the capacity was written since.
Nor does a job whose neighbour ran beside it, or a cache of unknown capacity, unless nothing at all was served of many
jobs in a row: in planned order even the smallest cache serves the job that follows its neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.core.history import Neighbour
from service.core.prefix import rung_span

WINDOW_JOBS = 256  # that a boot keeps for judgement, the newest
_LEAST_JOBS = 4  # of a kind: fewer are an accident, or one odd body
_DIFFERING_SHARE = 0.1  # of the counts of prompt tokens: a template may differ for one kind of body only
_ODD_SHARE = 0.25  # of the measured, where none should be: a block twice too large shows in one of two
_SHORT_SHARE = 0.25  # of the jobs that should have hit: a block four times too small shows in one of two
_GROUP_JOBS = 6  # of one prefix in a row, which is one tenant's
_COLD_JOBS = 24  # in a row that were served nothing
_DISTINCT_DEPTHS = 3  # least, to tell a block size from the depth that the prompts happen to share
_FACTORS = (2, 4, 8, 16, 32)  # by which blocks may be larger than told
_ESTIMATED_BLOCKS = 4  # least that is predicted from bytes of a prompt for a cold cache to be no rounding


class Mismatch(StrEnum):
    """What is wrong with a boot, as its row says."""

    TOKENS = "tokens"  # other tokens than the keys are made of: template, tokenizer or revision
    BLOCK_SIZE = "block_size"  # the engine's blocks are not as large as the boot says
    CACHE = "cache"  # it does not serve what it has just computed: another salt in each request, or no cache


ADVICE = {
    Mismatch.TOKENS: "its tokens are not those the prefix keys are made of. Check `tokenizer`, the chat template and "
    "`revision` in MODELS against what the engine loads, then restart its worker",
    Mismatch.BLOCK_SIZE: "its cache works in other blocks than its boot says. Set `block_size` in the instance's "
    "`options` to the engine's own, or take it out, then restart its worker",
    Mismatch.CACHE: "its cache does not serve prompts that it has just computed. Look for a gateway that alters "
    "`cache_salt` or the prompt, for an engine whose prefix caching is off, and for one far smaller than the plan "
    "assumes (`kv_capacity_tokens` in the instance's `options` says it), then restart its worker",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One finished job, as far as it says something about its engine."""

    prefix: bytes  # that it was predicted to find; empty for none
    predicted_cached_tokens: int
    cached_tokens: int | None
    planned_prompt_tokens: int | None  # None: its key is made of bytes, its length an estimate
    prompt_tokens: int | None  # as the engine counts
    neighbour: Neighbour  # where that prefix had been computed


def judge(seen: Sequence[Observation], block_size: int | None, *, shares_in_flight: bool) -> Mismatch | None:
    """What the jobs of one boot, oldest first, prove; None for nothing. `block_size` is the one its row says.

    `shares_in_flight`: two jobs at the engine at once share what the first has computed, as vLLM does.
    """
    if _tokens_differ(seen):
        return Mismatch.TOKENS
    measured = [item for item in seen if item.cached_tokens is not None]
    near = [item for item in measured if item.predicted_cached_tokens and item.neighbour is Neighbour.COMPUTED]
    if block_size and (_is_finer(measured, block_size) or _is_coarser(near, block_size)):
        return Mismatch.BLOCK_SIZE
    if _is_short(near, block_size) or _is_cold(measured, block_size, shares_in_flight):
        return Mismatch.CACHE
    return None


def is_short(item: Observation, block_size: int | None) -> bool:
    """Whether the job was served less than predicted by more than one block or one rung, whichever is larger.

    A prediction made of bytes is an estimate: there only nothing at all is short.
    """
    tolerance = max(block_size or 0, rung_span(item.predicted_cached_tokens))
    if item.planned_prompt_tokens is None:
        return not item.cached_tokens and item.predicted_cached_tokens >= _ESTIMATED_BLOCKS * tolerance
    return item.predicted_cached_tokens - (item.cached_tokens or 0) > tolerance


def _tokens_differ(seen: Sequence[Observation]) -> bool:
    compared = [item for item in seen if item.planned_prompt_tokens is not None and item.prompt_tokens is not None]
    differing = sum(item.planned_prompt_tokens != item.prompt_tokens for item in compared)
    return differing >= max(_LEAST_JOBS, _DIFFERING_SHARE * len(compared))


def _is_finer(measured: Sequence[Observation], block_size: int) -> bool:
    """The cache served parts of what should be one block."""
    served = [item.cached_tokens for item in measured if item.cached_tokens]
    odd = sum(tokens % block_size != 0 for tokens in served)
    return odd >= max(_LEAST_JOBS, _ODD_SHARE * len(served))


def _is_coarser(near: Sequence[Observation], block_size: int) -> bool:
    """Jobs that should have hit were served what larger blocks allow, and never more than those.

    Too little by a block or less is what a sound engine may do (vLLM drops the last one for speculative decoding), so
    that counts only where prompts of several depths agree on a block.
    """
    served = [item for item in near if item.cached_tokens and item.planned_prompt_tokens is not None]
    short = [item for item in served if (item.cached_tokens or 0) < item.predicted_cached_tokens]
    if len(short) < max(_LEAST_JOBS, _SHORT_SHARE * len(near)):
        return False
    is_far = sum(is_short(item, block_size) for item in short) >= _LEAST_JOBS
    if not is_far and len({item.predicted_cached_tokens for item in served}) < _DISTINCT_DEPTHS:
        return False
    return any(all(_is_cut_by(factor * block_size, item) for item in served) for factor in _FACTORS)


def _is_cut_by(block: int, item: Observation) -> bool:
    """Whether an engine of such blocks serves this, or more for it found a longer prefix."""
    cached = item.cached_tokens or 0
    whole = item.predicted_cached_tokens // block * block
    return cached % block == 0 and (cached == whole or cached >= item.predicted_cached_tokens)


def _is_short(near: Sequence[Observation], block_size: int | None) -> bool:
    """Many jobs that should have hit did not, or all of the last ones of some prefix."""
    short = sum(is_short(item, block_size) for item in near)
    if short >= max(_LEAST_JOBS, _SHORT_SHARE * len(near)):
        return True
    groups: defaultdict[bytes, list[bool]] = defaultdict(list)
    for item in near:
        groups[item.prefix].append(is_short(item, block_size))
    return any(len(each) >= _GROUP_JOBS and all(each[-_GROUP_JOBS:]) for each in groups.values())


def _is_cold(measured: Sequence[Observation], block_size: int | None, shares_in_flight: bool) -> bool:
    """The last jobs whose neighbour ran here, or runs, were served nothing, every one."""
    here = {Neighbour.COMPUTED, Neighbour.RECENT} | ({Neighbour.IN_FLIGHT} if shares_in_flight else set())
    last = [item for item in measured if item.predicted_cached_tokens and item.neighbour in here][-_COLD_JOBS:]
    return len(last) >= _COLD_JOBS and all(not item.cached_tokens and is_short(item, block_size) for item in last)
