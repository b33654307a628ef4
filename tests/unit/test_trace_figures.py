"""What the plan is worth, on the recorded prompts where they are there and on made-up ones: the promises of the README.

A few cells of `python -m bench.traces`; all of them take minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import trace_folder

from bench.prompt_sets import MADE_UP, MODEL_FOLDER, read_bbh
from bench.traces import ONLINE, Bench, Cell, PromptSet, main, read_conversation
from workers.models import is_prepared

KV = (100_000, 1_000_000)


@pytest.fixture(scope="module")
def recorded() -> Bench:
    folder = trace_folder()
    return Bench(
        {
            "conversation": lambda: read_conversation(folder / "conversation_trace.jsonl"),
            "bbh": lambda: PromptSet(jobs=read_bbh(folder / "bbh"), block_size=16),
        },
        resume=None,
    )


def cell(prompts: str, kv_tokens: int, *, scenario: str = "known", policy: str = "prefix", instances: int = 8) -> Cell:
    return Cell(prompts=prompts, instances=instances, kv_tokens=kv_tokens, scenario=scenario, policy=policy)


@pytest.mark.parametrize(
    ("kv_tokens", "gain", "too_long", "online"),
    [(100_000, 1.35, 68, ("round_robin", "affinity")), (1_000_000, 1.30, 0, ONLINE)],
)
def test_conversation_is_near_the_bound_and_ahead_of_every_baseline(
    recorded: Bench, kv_tokens: int, gain: float, too_long: int, online: tuple[str, ...]
) -> None:
    ours = recorded.figures(cell("conversation", kv_tokens))
    assert ours.too_long == too_long
    assert ours.eta >= 0.98
    assert ours.max_over_mean <= 1.05
    makespans = {
        name: recorded.figures(cell("conversation", kv_tokens, policy=name)).makespan_seconds for name in online
    }
    assert makespans["round_robin"] / ours.makespan_seconds >= gain
    assert min(makespans.values()) / ours.makespan_seconds >= 1.15
    shared_queue = recorded.figures(cell("conversation", kv_tokens, policy="shared_queue"))
    assert shared_queue.makespan_seconds > ours.makespan_seconds
    assert shared_queue.eta < ours.eta


@pytest.mark.parametrize("kv_tokens", KV)
def test_conversation_with_lengths_unknown_a_window_or_late_arrivals(recorded: Bench, kv_tokens: int) -> None:
    known = recorded.figures(cell("conversation", kv_tokens))
    unknown = recorded.figures(cell("conversation", kv_tokens, scenario="unknown"))
    assert unknown.makespan_seconds <= 1.05 * known.makespan_seconds
    assert unknown.eta >= 0.98
    window = recorded.figures(cell("conversation", kv_tokens, scenario="window"))
    assert window.makespan_seconds <= 1.03 * known.makespan_seconds
    assert window.hit_rate >= 0.95 * known.hit_rate
    late = recorded.figures(cell("conversation", kv_tokens, scenario="late"))
    assert late.makespan_seconds <= 1.05 * known.makespan_seconds
    assert late.eta >= 0.95


def test_bbh_keeps_its_hits_and_loses_no_time(recorded: Bench) -> None:
    if not is_prepared(MODEL_FOLDER):
        pytest.skip("no tokenizer: the engine tests prepare it")
    for kv_tokens in KV:
        ours = recorded.figures(cell("bbh", kv_tokens))
        assert ours.eta >= 0.97
        assert ours.max_over_mean <= 1.05
        round_robin = recorded.figures(cell("bbh", kv_tokens, policy="round_robin"))
        assert round_robin.makespan_seconds / ours.makespan_seconds >= 0.98


@pytest.mark.parametrize("name", sorted(MADE_UP))
def test_made_up_prompts_do_as_well(name: str) -> None:
    make, block_size = MADE_UP[name]
    bench = Bench({name: lambda: PromptSet(jobs=make(7, 4000), block_size=block_size)}, resume=None)
    for kv_tokens in KV:
        ours = bench.figures(cell(name, kv_tokens))
        assert ours.eta >= 0.97
        assert ours.max_over_mean <= 1.05
        others = [bench.figures(cell(name, kv_tokens, policy=other)) for other in ("round_robin", "affinity")]
        assert min(other.makespan_seconds for other in others) >= 0.98 * ours.makespan_seconds


def test_cells_that_were_run_are_not_run_again(tmp_path: Path) -> None:
    make, block_size = MADE_UP["questions"]
    loads: list[int] = []

    def load() -> PromptSet:
        loads.append(1)
        return PromptSet(jobs=make(3, 200), block_size=block_size)

    kept = tmp_path / "cells.jsonl"
    wanted = cell("questions", 100_000, instances=2)
    first = Bench({"questions": load}, kept).figures(wanted)
    assert Bench({"questions": load}, kept).figures(wanted) == first
    assert loads == [1]


def test_jobs_that_the_cache_cannot_hold_are_left_out_and_counted() -> None:
    make, block_size = MADE_UP["questions"]
    jobs = make(3, 200)
    bench = Bench({"questions": lambda: PromptSet(jobs=jobs, block_size=block_size)}, resume=None)
    longest = int((jobs.prompt_tokens + jobs.output_tokens).max())
    kv_tokens = -(-(longest - 2) // block_size) * block_size - block_size  # a block less than the longest needs
    figures = bench.figures(cell("questions", kv_tokens, instances=2))
    n = int((jobs.prompt_tokens + jobs.output_tokens - 1 > kv_tokens).sum())
    assert (figures.too_long, figures.jobs) == (n, 200 - n)
    assert n > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "/nope"], "/nope cannot be read: No such file or directory."),
        (["--bbh", "/nope"], "/nope holds no bbh/*.json."),
        (["--scenarios", "known,foo"], "foo is not one of known, unknown, window, late, late_mixed."),
        (["--instances", "0"], "0 is not a list of whole numbers from 1 on, as in 4,8,16."),
        (["--kv", "nan"], "nan is not a list of whole numbers from 512 on, as in 4,8,16."),
        (["--made-up", "1", "--kv", "512"], "fits a cache of 512 tokens."),
        ([], "give a --trace, a --bbh folder, or seeds for --made-up sets."),
    ],
)
def test_a_wrong_call_is_one_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.traces", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.rstrip().endswith(said)
    assert error.count("\n") == 1
