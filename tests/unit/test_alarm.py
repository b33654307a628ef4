"""service.core.alarm: what proves an engine wrong, and what a sound one may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.alarm import ADVICE, Mismatch, Observation, judge
from service.core.history import Neighbour

BLOCK = 32
HIT = Observation(
    prefix=b"p" * 80,
    predicted_cached_tokens=640,
    cached_tokens=640,
    planned_prompt_tokens=700,
    prompt_tokens=700,
    neighbour=Neighbour.COMPUTED,
)
MISS = replace(HIT, cached_tokens=0)


def verdict(*seen: Observation, shares: bool = True, block: int | None = BLOCK) -> Mismatch | None:
    return judge(seen, block, shares_in_flight=shares)


def other(number: int, item: Observation) -> Observation:
    """The same in a group of its own."""
    return replace(item, prefix=number.to_bytes(80, "big"))


def test_a_wrong_template_shows_in_the_counts() -> None:
    longer = replace(HIT, prompt_tokens=731)
    assert verdict(*[longer] * 3) is None
    assert verdict(*[longer] * 4) is Mismatch.TOKENS
    assert verdict(*[HIT] * 36, *[longer] * 4) is Mismatch.TOKENS  # the tenth that has tools
    assert verdict(*[HIT] * 200, *[longer] * 4) is None  # four odd bodies of many
    estimated = replace(longer, planned_prompt_tokens=None)
    assert verdict(*[estimated] * 50) is None
    assert verdict(*[replace(longer, prompt_tokens=None)] * 50) is None


def test_a_cold_cache_where_the_neighbour_must_be_there() -> None:
    assert verdict(*[HIT] * 9, *(other(n, MISS) for n in range(3))) is None
    assert verdict(*[HIT] * 9, *(other(n, MISS) for n in range(4))) is Mismatch.CACHE
    assert verdict(*[MISS] * 4) is Mismatch.CACHE
    assert verdict(*[HIT] * 99, *[other(1, MISS)] * 5) is None
    assert verdict(*[HIT] * 99, *[other(1, MISS)] * 6) is Mismatch.CACHE  # one tenant's, all of the last
    assert verdict(*[HIT] * 99, *[other(1, MISS)] * 6, other(1, HIT)) is None


@pytest.mark.parametrize(
    "where", [Neighbour.OLD, Neighbour.RECENT, Neighbour.IN_FLIGHT, Neighbour.FORMER, Neighbour.NOWHERE]
)
def test_evictions_races_and_restarts_are_no_alarm(where: Neighbour) -> None:
    misses = [replace(MISS, neighbour=where)] * 200
    assert verdict(*misses, replace(HIT, neighbour=where)) is None


def test_a_cache_that_serves_nothing_at_all_of_what_just_ran_is_wrong() -> None:
    recent, beside = (replace(MISS, neighbour=where) for where in (Neighbour.RECENT, Neighbour.IN_FLIGHT))
    assert verdict(*[recent] * 23) is None
    assert verdict(*[recent] * 24) is Mismatch.CACHE
    assert verdict(*[beside] * 24) is Mismatch.CACHE
    assert verdict(*[beside] * 24, shares=False) is None
    for where in (Neighbour.OLD, Neighbour.NOWHERE, Neighbour.FORMER):
        assert verdict(*[replace(recent, neighbour=where)] * 99) is None
    assert verdict(*[replace(recent, cached_tokens=None)] * 99) is None


def test_a_prediction_made_of_bytes_is_held_only_to_the_roughest() -> None:
    rough = replace(HIT, planned_prompt_tokens=None)
    assert verdict(*[replace(rough, cached_tokens=64)] * 99) is None
    assert verdict(*[replace(rough, cached_tokens=0, predicted_cached_tokens=96)] * 99) is None
    assert verdict(*[replace(rough, cached_tokens=0)] * 4) is Mismatch.CACHE


def blocks_of(true_block: int, depths: range) -> list[Observation]:
    """What an engine of such blocks serves of prompts of many depths."""
    return [
        other(n, replace(HIT, predicted_cached_tokens=depth, cached_tokens=depth // true_block * true_block))
        for n, depth in enumerate(depths)
    ]


@pytest.mark.parametrize("true_block", [64, 128, 256])
def test_larger_blocks_than_told(true_block: int) -> None:
    found = verdict(*blocks_of(true_block, range(640, 1280, BLOCK)))
    assert found is Mismatch.BLOCK_SIZE
    assert ADVICE[found]


@pytest.mark.parametrize("true_block", [1, 8, 16])
def test_smaller_blocks_than_told(true_block: int) -> None:
    served = [
        replace(item, cached_tokens=(item.predicted_cached_tokens + 17) // true_block * true_block)
        for item in blocks_of(1, range(640, 1280, BLOCK))
    ]
    assert verdict(*served) is Mismatch.BLOCK_SIZE
    assert verdict(*served, block=None) is None


def test_a_cache_that_drops_the_last_block_is_sound() -> None:
    """vLLM does so for speculative decoding with EAGLE."""
    dropped = [
        replace(item, cached_tokens=item.predicted_cached_tokens - BLOCK)
        for item in blocks_of(1, range(640, 1280, BLOCK))
    ]
    assert verdict(*dropped) is None
    assert verdict(*[replace(HIT, cached_tokens=608)] * 99) is None


@given(
    st.lists(
        st.builds(
            lambda depth, extra, where: replace(
                HIT,
                predicted_cached_tokens=depth * BLOCK,
                cached_tokens=(depth + extra) * BLOCK,
                prompt_tokens=5000,
                planned_prompt_tokens=5000,
                neighbour=where,
            ),
            st.integers(0, 40),
            st.integers(0, 10),
            st.sampled_from(Neighbour),
        ),
        max_size=300,
    )
)
def test_an_engine_that_serves_what_was_predicted_never_sounds_it(seen: list[Observation]) -> None:
    assert verdict(*seen) is None
