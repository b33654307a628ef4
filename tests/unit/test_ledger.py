"""service.core.ledger: no more held than fits, the least recent tail forgotten first, results believed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prefixes import RATES, key_of

from service.core.ledger import BootView, Ledger
from service.core.plan import Rates


def boot(boot_id: int, load_seconds: float = 0.0, rates: Rates = RATES) -> BootView:
    return BootView(boot_id=boot_id, block_size=32, rates=rates, load_seconds=load_seconds)


def opened(*capacities: int) -> Ledger:
    ledger = Ledger()
    for boot_id, capacity in enumerate(capacities):
        ledger.open(boot_id, capacity)
    return ledger


def test_a_job_goes_where_its_prefix_is() -> None:
    ledger = opened(10_000, 10_000)
    key = key_of([1] * 20)
    ledger.record(1, key, 650)
    choice = ledger.choose(key, 650, [boot(0), boot(1)])
    assert (choice.boot_id, choice.predicted_cached_tokens) == (1, 640)
    assert choice.seconds == 10 / 1000


def test_unless_the_work_ahead_there_costs_more() -> None:
    ledger = opened(10_000, 10_000)
    key = key_of([1] * 20)
    ledger.record(1, key, 650)
    # The bound is 1.25 x the least load, 0, and 4 x 0.65 s for the job on a cold boot: 2.6 s.
    assert ledger.choose(key, 650, [boot(0), boot(1, load_seconds=2.59)]).boot_id == 1
    assert ledger.choose(key, 650, [boot(0), boot(1, load_seconds=2.61)]).boot_id == 0
    # 3.85 s where the other is 1 s busy itself.
    assert ledger.choose(key, 650, [boot(0, load_seconds=1.0), boot(1, load_seconds=3.84)]).boot_id == 1
    assert ledger.choose(key, 650, [boot(0, load_seconds=1.0), boot(1, load_seconds=3.86)]).boot_id == 0
    # With 2 s of decoding the bound is 10.6 s.
    assert ledger.choose(key, 650, [boot(0), boot(1, load_seconds=10.5)], 1000).boot_id == 1
    assert ledger.choose(key, 650, [boot(0), boot(1, load_seconds=10.7)], 1000).boot_id == 0
    assert ledger.choose(key, 650, []) is None


def test_the_last_cold_boot_is_warmed_too() -> None:
    """However many are warm: a share of the mean load would let seven warm boots of eight run ever further ahead."""
    ledger = opened(*[10_000] * 8)
    key = key_of([1] * 20)
    for warm in range(7):
        ledger.record(warm, key, 650)
    assert ledger.choose(key, 650, [*(boot(warm, load_seconds=2.5) for warm in range(7)), boot(7)]).boot_id == 0
    assert ledger.choose(key, 650, [*(boot(warm, load_seconds=2.7) for warm in range(7)), boot(7)]).boot_id == 7


def test_within_that_bound_prefill_counts_thrice_and_work_once() -> None:
    ledger = opened(10_000, 10_000)
    key = key_of([1] * 20)
    ledger.record(0, key[:40], 320)
    ledger.record(1, key, 640)
    # 320 tokens of 1,120 at boot 0, 640 at boot 1: 0.8 s and 0.48 s of prefill, (0.8 / 0.48) ** 3 = 4.63; own work is
    # 0.48 s: as much work ahead at boot 1 as makes it (1.0 + 0.48) x 4.63 = 6.85 s.
    assert ledger.choose(key, 1120, [boot(0, load_seconds=1.0), boot(1, load_seconds=5.7)]).boot_id == 1
    near = [boot(0, load_seconds=0.4), boot(1, load_seconds=3.6)]  # (0.4 + 0.48) x 4.63 = 4.07 s
    assert ledger.choose(key, 1120, near).boot_id == 0
    assert ledger.choose(key, 1120, [boot(0, load_seconds=0.4), boot(1, load_seconds=3.5)]).boot_id == 1


def test_a_faster_boot_needs_less_in_its_cache() -> None:
    ledger = opened(10_000, 10_000)
    key = key_of([1] * 20)
    ledger.record(0, key, 640)
    fast = Rates(prefill_tokens_per_second=10_000, decode_tokens_per_second=500)
    assert ledger.choose(key, 1000, [boot(0), boot(1)]).boot_id == 0
    assert ledger.choose(key, 1000, [boot(0), boot(1, rates=fast)]).boot_id == 1


def test_of_equal_costs_the_first_is_taken() -> None:
    assert opened(100, 100).choose(b"", 10, [boot(1), boot(0)]).boot_id == 1


def test_a_boot_that_ends_takes_its_map_along() -> None:
    ledger = opened(10_000)
    key = key_of([1] * 4)
    ledger.record(0, key, 130)
    ledger.open(0, 10_000)
    assert ledger.predict(0, key, 130, 32) == 128
    ledger.forget(0)
    ledger.forget(0)
    ledger.record(0, key, 130)
    ledger.correct(0, key, 0, 130)
    assert ledger.predict(0, key, 130, 32) == ledger.held_tokens(0) == 0


def test_the_tail_of_the_least_recent_prompt_is_forgotten_first() -> None:
    ledger = opened(320)
    a, b = key_of([1] * 5), key_of([2] * 5)
    ledger.record(0, a, 160)
    ledger.record(0, b, 160)
    ledger.record(0, key_of([3]), 32)
    assert ledger.predict(0, a, 1000, 32) == 128
    assert ledger.predict(0, b, 1000, 32) == 160


def test_a_result_that_disagrees_is_believed() -> None:
    ledger = opened(100_000)
    common = [1] * 4
    left, right = key_of([*common, 5, 5]), key_of([*common, 6, 6])
    ledger.record(0, left, 200)
    ledger.record(0, right, 200)
    ledger.correct(0, right, 64, 200)
    assert ledger.predict(0, left, 1000, 32) == 128  # what right has put there since
    assert ledger.predict(0, right, 1000, 32) == 192


def test_a_prompt_beyond_the_capacity_leaves_no_trace() -> None:
    ledger = opened(100)
    ledger.record(0, key_of([1] * 4), 128)
    assert ledger.held_tokens(0) == 0


def test_an_answer_takes_room_but_nobody_shares_it() -> None:
    ledger = opened(320)
    a, b = key_of([1] * 5), key_of([2] * 4)
    ledger.record(0, a, 160)
    ledger.record(0, b, 128, 64)
    assert ledger.held_tokens(0) == 320
    assert ledger.predict(0, a, 1000, 32) == 128


def test_a_result_that_says_less_forgets_all_that_hung_below() -> None:
    ledger = opened(100_000)
    long, branch = key_of([1] * 6), key_of([1, 1, 1, 2])
    ledger.record(0, long, 192)
    ledger.record(0, branch, 128)
    ledger.correct(0, key_of([1, 3]), 32, 64)  # as much as the map held of it: nothing is wrong
    assert ledger.predict(0, long, 1000, 32) == 192
    ledger.correct(0, key_of([1, 1, 3]), 32, 96)
    ledger.check()
    assert ledger.predict(0, long, 1000, 32) == ledger.predict(0, branch, 1000, 32) == 64
    assert ledger.held_tokens(0) == 4 * 32  # 1, 1-1, 1-1-3 and 1-3


rungs = st.lists(st.integers(0, 1), max_size=5)
steps = st.lists(st.tuples(st.sampled_from(["record", "correct"]), rungs, st.integers(0, 31)), max_size=40)


@given(steps, st.integers(32, 400))
def test_the_map_is_that_of_a_plain_lru(events: list[tuple[str, list[int], int]], capacity: int) -> None:
    """Against a list of (prefix, tokens), oldest first, in which every prompt's prefixes go deepest first."""
    ledger, held = opened(capacity), []
    for number, (kind, path, rest) in enumerate(events):
        prompt = 32 * len(path) + rest
        prefixes = [tuple(path[:depth]) for depth in range(1, len(path) + 1)]
        if kind == "record":
            ledger.record(0, key_of(path), prompt)
        else:
            ledger.correct(0, key_of(path), 32, prompt)
            gone = tuple(path[:2])
            if len(gone) == 2:
                held = [(prefix, n) for prefix, n in held if prefix[:2] != gone]
        if prompt <= capacity:
            held = [(prefix, n) for prefix, n in held if prefix not in prefixes]
            held += [(("rest", number), rest)] if rest else []
            held += [(prefix, 32) for prefix in reversed(prefixes)]
            while sum(n for _, n in held) > capacity:
                held.pop(0)
        ledger.check()
        assert ledger.held_tokens(0) == sum(n for _, n in held) <= capacity
        known = {prefix for prefix, _ in held}
        depth = next((d for d, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
        assert ledger.predict(0, key_of(path), 10_000, 32) == 32 * depth
