"""What an engine says a job used, totals of it, and why fewer tokens came from cache than could have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from service.core.model import MissCause


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


def classify_miss(
    *,
    predicted_cached_tokens: int,
    cached_tokens: int | None,
    prompt_tokens: int,
    block_size: int,
    first_of_group: bool,
    neighbour_ran_here: bool | None = None,
    other_instance: bool = False,
    restarted: bool = False,
    salt_kept_apart: bool = False,
    cache_bypassed: bool = False,
    key_mismatch: bool = False,
) -> MissCause | None:
    """Why the cache served less than it might have; None when it served what was predicted, or did not say.

    `first_of_group`: the planner's word that no job before it in the run was of its group. `neighbour_ran_here`:
    whether the job whose prefix it was to find ran on this boot before it; None where nobody knows.
    The remaining flags are facts about the job or the boot, told in DESIGN.md section 6. Predictions are rounded
    down to a rung and a block, so whatever is short of one is short for a reason.
    """
    if cached_tokens is None:
        return None
    if cached_tokens >= predicted_cached_tokens:
        return _no_shortfall(cached_tokens, prompt_tokens, block_size, first_of_group, other_instance)
    facts = {
        MissCause.CACHE_BYPASSED: cache_bypassed,
        MissCause.KEY_MISMATCH: key_mismatch,
        MissCause.SALT: salt_kept_apart,
        MissCause.RESTARTED: restarted,
        MissCause.OTHER_INSTANCE: other_instance,
        MissCause.EVICTED: neighbour_ran_here is True,
        MissCause.FIRST_OF_GROUP: neighbour_ran_here is False,
    }
    return next((cause for cause, holds in facts.items() if holds), MissCause.UNKNOWN)


def _no_shortfall(
    cached_tokens: int, prompt_tokens: int, block_size: int, first_of_group: bool, other_instance: bool
) -> MissCause | None:
    """As good as predicted, and yet all or most of the prompt may have been computed."""
    if prompt_tokens <= block_size and cached_tokens == 0:
        return MissCause.BELOW_ONE_BLOCK
    if first_of_group:
        return MissCause.FIRST_OF_GROUP
    if cached_tokens:
        return None
    # A steal corrects the prediction of its first job to what the thief holds, often nothing: its group ran elsewhere.
    return MissCause.OTHER_INSTANCE if other_instance else MissCause.BELOW_ONE_BLOCK
