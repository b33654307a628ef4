"""When a running batch will be done, from how fast its lines ended lately, else from what engines are known to do."""

from __future__ import annotations

from dataclasses import dataclass

from service.core.planrecords import Rates

_LEAST_LINES = 5  # fewer say little of the next ones
_LEAST_SPAN_SECONDS = 0.25  # results are written in groups, up to 0.2 s apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Lines of a batch that were answered lately, as of now."""

    lines: int
    is_cut: bool  # there were more: `lines` are the newest of them
    first_ended_seconds_ago: float
    first_began_seconds_ago: float  # the earliest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWork:
    """What is left of a batch, by the mean of its jobs."""

    lines: int
    prompt_tokens: float  # of one line
    output_tokens: float  # of one line, predicted
    shared_share: float  # of the prompt tokens, that may come from the cache


def measured_eta(open_lines: int, pace: Pace) -> float | None:
    """Seconds at the pace of late; None where too little ended. A batch that has come to a stand gets later and later,
    until nothing of late is left."""
    if pace.lines < _LEAST_LINES:
        return None
    if pace.is_cut:
        lines, span_seconds = pace.lines - 1, pace.first_ended_seconds_ago
    else:
        lines, span_seconds = pace.lines, pace.first_began_seconds_ago
    return open_lines * max(span_seconds, _LEAST_SPAN_SECONDS) / lines


def rated_eta(work: OpenWork, rates: Rates) -> float:
    """Seconds with nothing beside it, at the rates of all the engines together."""
    prefill_tokens = work.prompt_tokens * (1 - work.shared_share)
    return work.lines * (
        prefill_tokens / rates.prefill_tokens_per_second + work.output_tokens / rates.decode_tokens_per_second
    )
