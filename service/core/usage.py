"""What an engine says a job used, totals of it, and why fewer tokens came from cache than could have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from service.core.alarm import Mismatch
from service.core.history import Neighbour
from service.core.model import Endpoint, MissCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer; None = the engine did not say, never 0 for unknown."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt tokens
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None  # of the completion tokens


UNKNOWN = Usage()


def read_usage(body: bytes, *, prompts: int = 1) -> Usage:
    """`parse_usage` of a response body as it came; all unknown where it is no JSON object."""
    try:
        return parse_usage(json.loads(body), prompts=prompts)
    except (ValueError, RecursionError):
        return UNKNOWN


def parse_usage(body: Any, *, prompts: int = 1) -> Usage:
    """The usage in a parsed response body, of OpenAI's shape in either of its spellings; tolerant of any other.

    vLLM and SGLang give the cached tokens in `prompt_tokens_details` (null when the engine does not report them).
    `prompts` is the number of prompts in the request: of several, an engine reports the cached tokens of the last
    alone, so they are unknown.
    """
    usage = _mapping(_mapping(body).get("usage"))
    prompt_tokens = _first_count(usage, "prompt_tokens", "input_tokens")
    completion_tokens = _first_count(usage, "completion_tokens", "output_tokens")
    inputs = _mapping(usage.get("prompt_tokens_details")) or _mapping(usage.get("input_tokens_details"))
    outputs = _mapping(usage.get("completion_tokens_details")) or _mapping(usage.get("output_tokens_details"))
    cached_tokens = _first_count(inputs, "cached_tokens") if prompts == 1 else None
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=_at_most(cached_tokens, prompt_tokens),
        completion_tokens=completion_tokens,
        reasoning_tokens=_at_most(_first_count(outputs, "reasoning_tokens"), completion_tokens),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


_MOST_TOKENS = 2**31 - 1  # what a result row holds; no engine counts more in one answer


def _first_count(holder: Mapping[str, Any], *names: str) -> int | None:
    """The first of the fields that is a count; booleans, texts, fractions, negative and absurd numbers are none."""
    for name in names:
        value = holder.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS:
            return value
    return None


def _at_most(part: int | None, whole: int | None) -> int | None:
    """A part larger than its whole is no measurement."""
    return None if part is not None and whole is not None and part > whole else part


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums over lines; each skips the lines that do not say."""

    lines: int
    lines_unknown: int  # without cached tokens
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    measured_prompt_tokens: int  # of the lines that say how many were cached

    @property
    def hit_rate(self) -> float | None:
        """Cached / prompt tokens over the lines that say both; None for no such line."""
        return self.cached_tokens / self.measured_prompt_tokens if self.measured_prompt_tokens else None


def total(usages: Iterable[Usage]) -> UsageTotals:
    """The totals of some lines."""
    every = list(usages)
    measured = [usage for usage in every if usage.cached_tokens is not None and usage.prompt_tokens is not None]
    return UsageTotals(
        lines=len(every),
        lines_unknown=len(every) - len(measured),
        prompt_tokens=sum(usage.prompt_tokens or 0 for usage in every),
        cached_tokens=sum(usage.cached_tokens or 0 for usage in measured),
        completion_tokens=sum(usage.completion_tokens or 0 for usage in every),
        reasoning_tokens=sum(usage.reasoning_tokens or 0 for usage in every),
        measured_prompt_tokens=sum(usage.prompt_tokens or 0 for usage in measured),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a worker knows of a job that ran, beside its tokens."""

    first_of_group: bool = False  # the planner's word: no job before it in the run was of its group
    neighbour: Neighbour | None = None  # where the predicted prefix had been computed; None: nobody knows
    leads_cohort: bool = False  # the first job of its cohort here, so its neighbour was in another one
    moved: bool = False  # its cohort was stolen or planned elsewhere before
    rerun: bool = False  # an earlier attempt of its cohort ended with its boot, or drained
    cache_bypassed: bool = False
    mismatch: Mismatch | None = None  # the alarm of the boot
    shared_engine: bool = False  # others may use the engine, and evict what is ours


def classify_miss(
    *,
    predicted_cached_tokens: int,
    cached_tokens: int | None,
    prompt_tokens: int,
    block_size: int,
    circumstances: Circumstances,
) -> MissCause | None:
    """Why the cache served less than it might have; None when it served what was predicted, or did not say.

    Missing tokens are those predicted and not served: each has a cause. A job that was served what was predicted has
    one too where most of its prompt had to be computed, so that the computed tokens are told apart. Predictions are
    rounded down to a rung and a block, so whatever is short of one is short for a reason.
    """
    if cached_tokens is None:
        return None
    if cached_tokens < predicted_cached_tokens:
        return _shortfall(circumstances, cached_tokens)
    if cached_tokens and cached_tokens >= (prompt_tokens - 1) // block_size * block_size:
        return None  # all that an engine can serve of a prompt
    if prompt_tokens <= block_size:
        return MissCause.BELOW_ONE_BLOCK
    if circumstances.first_of_group:
        return MissCause.FIRST_OF_GROUP
    if cached_tokens:
        return None
    # Of a group, and nothing was expected. A steal corrects the prediction of its first job to what the thief holds,
    # and behind a cut nothing is held: the group began elsewhere. Else two prompts share less than a block.
    is_cut = circumstances.leads_cohort and prompt_tokens > 2 * block_size
    return _elsewhere(circumstances) or (MissCause.OTHER_INSTANCE if is_cut else MissCause.BELOW_ONE_BLOCK)


_CAUSE_OF_NEIGHBOUR = {
    Neighbour.RECENT: MissCause.EVICTED,
    Neighbour.OLD: MissCause.EVICTED,
    Neighbour.IN_FLIGHT: MissCause.IN_FLIGHT,
    Neighbour.FORMER: MissCause.RESTARTED,
}


def _shortfall(known: Circumstances, cached_tokens: int) -> MissCause:
    """Why predicted tokens are missing, the surest reason first."""
    if known.cache_bypassed:
        return MissCause.CACHE_BYPASSED
    if known.mismatch is not None:
        return MissCause.SALT if known.mismatch is Mismatch.CACHE else MissCause.KEY_MISMATCH
    if known.neighbour is Neighbour.COMPUTED:
        # It must still be there. A part of it was, so the engine knows the prompt: the tail went first. Of nothing at
        # all only others can be the cause, or what the alarm is about to say.
        return MissCause.EVICTED if cached_tokens or known.shared_engine else MissCause.UNKNOWN
    if known.neighbour is Neighbour.NOWHERE:
        if known.leads_cohort:
            return _elsewhere(known) or MissCause.OTHER_INSTANCE
        return _elsewhere(known) or MissCause.FIRST_OF_GROUP  # what was to run before it was cancelled, or failed
    return _CAUSE_OF_NEIGHBOUR[known.neighbour] if known.neighbour else MissCause.UNKNOWN


def _elsewhere(known: Circumstances) -> MissCause | None:
    """A first attempt of a cohort that moved was stolen or planned anew; a later one follows a restart or a drain."""
    if known.rerun:
        return MissCause.RESTARTED
    return MissCause.OTHER_INSTANCE if known.moved else None


def bypasses_cache(endpoint: str, body: bytes) -> bool:
    """Whether vLLM reads no cache for a request: one that asks for the log probabilities of its prompt, for which
    every token must be computed (`SamplingParams.skip_reading_prefix_cache`; an echo asks for them too)."""
    try:
        fields = _mapping(json.loads(body))
    except (ValueError, RecursionError):
        return False
    if fields.get("prompt_logprobs") is not None:
        return True
    asked = fields.get("top_logprobs", 0) if endpoint == Endpoint.CHAT else fields.get("logprobs")
    return bool(fields.get("echo")) and asked is not None
