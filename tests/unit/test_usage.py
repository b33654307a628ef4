"""service.core.usage: unknown stays unknown, and every miss has its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.alarm import Mismatch
from service.core.history import Neighbour
from service.core.model import Endpoint, MissCause
from service.core.usage import (
    UNKNOWN,
    Circumstances,
    Usage,
    bypasses_cache,
    classify_miss,
    parse_usage,
    read_usage,
    total,
)

VLLM = {
    "usage": {
        "prompt_tokens": 100,
        "total_tokens": 107,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
}
FULL = Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=7, reasoning_tokens=3)


def test_the_shapes_of_the_engines() -> None:
    assert parse_usage(VLLM) == FULL
    responses = {
        "input_tokens": 100,
        "output_tokens": 7,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    assert parse_usage({"usage": responses}) == FULL
    assert read_usage(json.dumps(VLLM).encode()) == FULL


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, [], "x"])
def test_cached_tokens_that_are_not_told_are_unknown(details: object) -> None:
    usage = parse_usage({"usage": {"prompt_tokens": 5, "prompt_tokens_details": details}})
    assert usage == Usage(prompt_tokens=5)


@pytest.mark.parametrize("value", [True, "5", -1, 1.5, [], None, float("nan"), float("inf")])
def test_odd_counts_are_unknown(value: object) -> None:
    assert parse_usage({"usage": {"prompt_tokens": value, "completion_tokens": 3.0}}) == Usage(completion_tokens=3)


def test_a_part_beyond_its_whole_and_several_prompts_are_unknown() -> None:
    assert (
        parse_usage({"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}}).cached_tokens
        is None
    )
    assert parse_usage(VLLM, prompts=2).cached_tokens is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"3", b"null", b'{"usage":[]}', b"[" * 100_000])
def test_bodies_without_usage(body: bytes) -> None:
    assert read_usage(body) == UNKNOWN


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: (
            st.lists(x)
            | st.dictionaries(st.sampled_from(["usage", "prompt_tokens", "prompt_tokens_details", "cached_tokens"]), x)
        ),
    )
)
def test_any_json_is_survived(body: object) -> None:
    usage = parse_usage(body)
    assert usage.cached_tokens is None or usage.cached_tokens >= 0


counts = st.none() | st.integers(0, 50)


@given(st.lists(st.tuples(counts, counts, counts), max_size=8))
def test_totals_skip_what_is_unknown(lines: list[tuple[int | None, int | None, int | None]]) -> None:
    usages = [Usage(prompt_tokens=p, cached_tokens=c, completion_tokens=o) for p, c, o in lines]
    sums = total(usages)
    known = [(p, c) for p, c, _ in lines if p is not None and c is not None]
    assert sums.lines == len(lines)
    assert sums.lines_unknown == len(lines) - len(known)
    assert sums.cached_tokens == sum(c for _, c in known)
    assert sums.measured_prompt_tokens == sum(p for p, _ in known)
    assert sums.completion_tokens == sum(o for _, _, o in lines if o is not None)
    assert (sums.hit_rate is None) == (sums.measured_prompt_tokens == 0)


def miss(predicted: int, measured: int | None, *, prompt_tokens: int = 1000, **known: Any) -> MissCause | None:
    return classify_miss(
        predicted_cached_tokens=predicted,
        cached_tokens=measured,
        prompt_tokens=prompt_tokens,
        block_size=32,
        circumstances=Circumstances(**known),
    )


@pytest.mark.parametrize(
    ("known", "cause"),
    [
        ({}, MissCause.UNKNOWN),
        ({"neighbour": Neighbour.OLD}, MissCause.EVICTED),
        ({"neighbour": Neighbour.RECENT}, MissCause.EVICTED),
        ({"neighbour": Neighbour.OLD, "rerun": True, "moved": True}, MissCause.EVICTED),
        ({"neighbour": Neighbour.IN_FLIGHT, "moved": True}, MissCause.IN_FLIGHT),
        ({"neighbour": Neighbour.FORMER}, MissCause.RESTARTED),
        ({"neighbour": Neighbour.COMPUTED}, MissCause.UNKNOWN),
        ({"neighbour": Neighbour.COMPUTED, "shared_engine": True}, MissCause.EVICTED),
        ({"neighbour": Neighbour.NOWHERE}, MissCause.FIRST_OF_GROUP),
        ({"neighbour": Neighbour.NOWHERE, "leads_cohort": True}, MissCause.OTHER_INSTANCE),
        ({"neighbour": Neighbour.NOWHERE, "moved": True}, MissCause.OTHER_INSTANCE),
        ({"neighbour": Neighbour.NOWHERE, "moved": True, "rerun": True}, MissCause.RESTARTED),
        ({"neighbour": Neighbour.OLD, "mismatch": Mismatch.TOKENS}, MissCause.KEY_MISMATCH),
        ({"neighbour": Neighbour.OLD, "mismatch": Mismatch.BLOCK_SIZE}, MissCause.KEY_MISMATCH),
        ({"neighbour": Neighbour.OLD, "mismatch": Mismatch.CACHE}, MissCause.SALT),
        ({"cache_bypassed": True, "mismatch": Mismatch.TOKENS}, MissCause.CACHE_BYPASSED),
    ],
)
def test_a_shortfall_has_the_cause_that_explains_it_best(known: dict[str, Any], cause: MissCause) -> None:
    assert miss(640, 0, **known) is cause
    assert miss(640, 640, **known) is None
    assert miss(640, 800, **known) is None
    assert miss(640, None, **known) is None


def test_a_prefix_that_is_there_in_part_lost_its_tail() -> None:
    assert miss(640, 608, neighbour=Neighbour.COMPUTED) is MissCause.EVICTED
    assert miss(640, 608, neighbour=Neighbour.OLD) is MissCause.EVICTED


def test_prompts_that_nothing_was_predicted_for() -> None:
    assert miss(0, 0, first_of_group=True) is MissCause.FIRST_OF_GROUP
    assert miss(64, 64, first_of_group=True) is MissCause.FIRST_OF_GROUP
    assert miss(0, 0) is MissCause.BELOW_ONE_BLOCK
    assert miss(0, 0, prompt_tokens=20, first_of_group=True) is MissCause.BELOW_ONE_BLOCK
    assert miss(0, 320) is None
    assert miss(0, 992, first_of_group=True) is None  # all that can be served of 1000 tokens was


def test_a_group_that_began_elsewhere_is_no_first() -> None:
    """A steal corrects the prediction of its first job to nothing."""
    assert miss(0, 0, moved=True) is MissCause.OTHER_INSTANCE
    assert miss(0, 0, leads_cohort=True) is MissCause.OTHER_INSTANCE
    assert miss(0, 0, leads_cohort=True, prompt_tokens=60) is MissCause.BELOW_ONE_BLOCK
    assert miss(0, 0, moved=True, rerun=True) is MissCause.RESTARTED


@given(
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.builds(
        Circumstances,
        neighbour=st.sampled_from([*Neighbour]),
        first_of_group=st.booleans(),
        leads_cohort=st.booleans(),
        moved=st.booleans(),
        rerun=st.booleans(),
        cache_bypassed=st.booleans(),
        mismatch=st.none() | st.sampled_from(Mismatch),
        shared_engine=st.booleans(),
    ),
)
def test_every_missing_token_has_a_cause(predicted: int, measured: int, known: Circumstances) -> None:
    cause = classify_miss(
        predicted_cached_tokens=predicted,
        cached_tokens=measured,
        prompt_tokens=2001,
        block_size=32,
        circumstances=known,
    )
    if measured < predicted:
        assert cause is not None
        sure_and_cold = known.neighbour is Neighbour.COMPUTED and measured == 0 and known.mismatch is None
        assert (cause is MissCause.UNKNOWN) <= sure_and_cold


@pytest.mark.parametrize(
    ("endpoint", "body", "bypasses"),
    [
        (Endpoint.CHAT, {"prompt_logprobs": 0}, True),
        (Endpoint.CHAT, {"prompt_logprobs": None}, False),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": 'what is "prompt_logprobs"?'}]}, False),
        (Endpoint.CHAT, {"echo": True}, True),
        (Endpoint.CHAT, {"logprobs": True, "top_logprobs": 3}, False),
        (Endpoint.COMPLETIONS, {"echo": True}, False),
        (Endpoint.COMPLETIONS, {"echo": True, "logprobs": 1}, True),
        (Endpoint.COMPLETIONS, {"logprobs": 1}, False),
    ],
)
def test_what_reads_no_cache(endpoint: Endpoint, body: dict[str, Any], bypasses: bool) -> None:
    assert bypasses_cache(endpoint, json.dumps(body).encode()) is bypasses
    assert not bypasses_cache(endpoint, b"no json")


def test_an_absurd_count_is_unknown() -> None:
    usage = parse_usage({"usage": {"prompt_tokens": 10**30, "completion_tokens": 2**31 - 1}})
    assert (usage.prompt_tokens, usage.completion_tokens) == (None, 2**31 - 1)
