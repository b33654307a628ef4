"""service.core.feed: never less than the engine can run, and no more behind it than ten seconds or half of that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.core.feed import jobs_wanted

ENGINE = {"max_num_seqs": 64, "kv_capacity_tokens": 1_000_000}


def test_an_empty_engine_is_filled_and_half_as_many_wait_behind() -> None:
    assert jobs_wanted(jobs=0, seconds=0.0, new_tokens=0, **ENGINE) == 96
    assert jobs_wanted(jobs=90, seconds=9.0, new_tokens=9000, **ENGINE) == 6
    assert jobs_wanted(jobs=200, seconds=9.0, new_tokens=9000, **ENGINE) == 0


def test_long_jobs_wait_for_ten_seconds_at_most_but_four_do() -> None:
    assert jobs_wanted(jobs=64, seconds=64.0, new_tokens=0, **ENGINE) == 10
    assert jobs_wanted(jobs=64, seconds=640.0, new_tokens=0, **ENGINE) == 4


def test_a_full_cache_wants_no_more() -> None:
    assert jobs_wanted(jobs=9, seconds=9.0, new_tokens=1_500_000, **ENGINE) == 0
    assert jobs_wanted(jobs=9, seconds=9.0, new_tokens=1_499_999, **ENGINE) == 65


def test_a_number_that_is_given_is_kept() -> None:
    assert jobs_wanted(jobs=60, seconds=600.0, new_tokens=9_000_000, ahead_jobs=7, **ENGINE) == 11


@given(st.integers(0, 500), st.floats(0, 1e6), st.integers(0, 3_000_000), st.integers(1, 512))
def test_what_is_wanted_keeps_its_bounds(jobs: int, seconds: float, new_tokens: int, max_num_seqs: int) -> None:
    wanted = jobs_wanted(
        jobs=jobs, seconds=seconds, new_tokens=new_tokens, max_num_seqs=max_num_seqs, kv_capacity_tokens=1_000_000
    )
    assert 0 <= wanted <= max(max_num_seqs + max(max_num_seqs // 2, 4) - jobs, 0)
    if new_tokens < 1_500_000:
        assert wanted >= min(max_num_seqs - jobs, max_num_seqs)
