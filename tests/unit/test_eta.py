"""When a running batch will be done."""

from __future__ import annotations

import pytest

from service.core.eta import OpenWork, Pace, measured_eta, rated_eta
from service.core.planrecords import Rates


def pace(lines: int, *, is_cut: bool = False, ended: float = 10.0, began: float = 20.0) -> Pace:
    return Pace(lines=lines, is_cut=is_cut, first_ended_seconds_ago=ended, first_began_seconds_ago=began)


def test_the_rest_at_the_pace_of_all_that_ended() -> None:
    assert measured_eta(100, pace(10)) == 200.0
    assert measured_eta(0, pace(10)) == 0.0


def test_of_the_newest_lines_only_the_time_since_the_first_of_them_ended_counts() -> None:
    assert measured_eta(100, pace(11, is_cut=True)) == 100.0


def test_too_few_lines_say_nothing() -> None:
    assert measured_eta(100, pace(4)) is None


def test_lines_that_were_written_together_are_not_a_pace_of_their_own() -> None:
    eta_seconds = measured_eta(1_000, pace(257, is_cut=True, ended=1e-6))
    assert eta_seconds == pytest.approx(0.25 * 1_000 / 256)


def test_rates_of_the_fleet() -> None:
    work = OpenWork(lines=10, prompt_tokens=1_000, output_tokens=100, shared_share=0.75)
    assert rated_eta(work, Rates(prefill_tokens_per_second=500, decode_tokens_per_second=50)) == pytest.approx(25)
