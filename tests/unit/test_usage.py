"""service.core.usage: unknown stays unknown, and every miss has its cause."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.model import MissCause
from service.core.usage import UNKNOWN, Usage, classify_miss, parse_usage, read_usage, total

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


def miss(predicted: int, measured: int | None, **facts: object) -> MissCause | None:
    defaults: dict = {"prompt_tokens": 1000, "block_size": 32, "first_of_group": False}
    return classify_miss(predicted_cached_tokens=predicted, cached_tokens=measured, **(defaults | facts))


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({}, MissCause.UNKNOWN),
        ({"neighbour_ran_here": True}, MissCause.EVICTED),
        ({"neighbour_ran_here": False}, MissCause.FIRST_OF_GROUP),
        ({"neighbour_ran_here": True, "other_instance": True}, MissCause.OTHER_INSTANCE),
        ({"restarted": True, "other_instance": True}, MissCause.RESTARTED),
        ({"salt_kept_apart": True}, MissCause.SALT),
        ({"key_mismatch": True, "restarted": True}, MissCause.KEY_MISMATCH),
        ({"cache_bypassed": True, "key_mismatch": True}, MissCause.CACHE_BYPASSED),
    ],
)
def test_a_shortfall_has_the_cause_that_explains_it_best(facts: dict[str, object], cause: MissCause) -> None:
    assert miss(640, 0, **facts) is cause
    assert miss(640, 640, **facts) is None
    assert miss(640, 608, **facts) is cause
    assert miss(640, 800, **facts) is None
    assert miss(640, None, **facts) is None


def test_prompts_that_nothing_was_predicted_for() -> None:
    assert miss(0, 0, first_of_group=True) is MissCause.FIRST_OF_GROUP
    assert miss(64, 64, first_of_group=True) is MissCause.FIRST_OF_GROUP
    assert miss(0, 0) is MissCause.BELOW_ONE_BLOCK
    assert miss(0, 0, prompt_tokens=20, first_of_group=True) is MissCause.BELOW_ONE_BLOCK
    assert miss(0, 320) is None


def test_an_absurd_count_is_unknown() -> None:
    usage = parse_usage({"usage": {"prompt_tokens": 10**30, "completion_tokens": 2**31 - 1}})
    assert (usage.prompt_tokens, usage.completion_tokens) == (None, 2**31 - 1)


def test_the_first_job_of_a_stolen_cohort_misses_because_its_group_ran_elsewhere() -> None:
    cause = classify_miss(
        predicted_cached_tokens=0,
        cached_tokens=0,
        prompt_tokens=640,
        block_size=32,
        first_of_group=False,
        other_instance=True,
    )
    assert cause is MissCause.OTHER_INSTANCE
