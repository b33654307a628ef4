"""What the plan is worth on recorded prompts: hit rate against the bound, makespan against the baselines, balance.

`python -m bench.traces --trace FILE [--bbh FOLDER] [--made-up SEED] [--instances 4,8,16] [--kv 100000,1000000]
[--scenarios known,unknown,window,late,late_mixed] [--baselines/--no-baselines] [--resume FILE] [--json]` replays every
set on simulated engines, a line a cell; the last line with --json is one object. Everything is simulated, with the cost
model of `service.core.simulate`. Sets: `conversation` is the trace, `bbh` as its files order it, the others are made up
from the seed; jobs that a cache cannot hold are left out and counted. Scenarios: what the planner is told and when.
With --resume, cells in FILE are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.prompt_sets import MADE_UP, read_bbh
from service.core.plan import Backlog
from service.core.policies import POLICIES, make_policy
from service.core.replay import EngineShape, FleetJobs, ReplayError, jobs_at_once, replay_fleet
from service.core.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace
from service.forecast import too_long

ONLINE = tuple(name for name in POLICIES if name not in ("prefix", "shared_queue"))  # place a job when it comes
SCENARIOS = ("known", "unknown", "window", "late", "late_mixed")
_TOLD_TOKENS = 256  # what the service assumes of an answer without a limit
_WINDOW_JOBS = 8000
_LATE_SHARE = 0.1
_LATE_SEED = 20
_BBH_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay."""

    prompts: str
    instances: int
    kv_tokens: int
    scenario: str
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of it. Shares are of prompt tokens."""

    jobs: int
    too_long: int
    hit_rate: float
    bound: float
    makespan_seconds: float
    max_over_mean: float
    replicated_tokens: int
    took_seconds: float  # by this machine, for the replay

    @property
    def eta(self) -> float:
        """Hit rate / bound."""
        return self.hit_rate / self.bound if self.bound else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A backlog with true output lengths, and the block size it is measured at."""

    jobs: Backlog
    block_size: int


def shape_of(prompts: PromptSet, kv_tokens: int) -> EngineShape:
    """An engine of the fleet: 64 sequences, 8192 tokens a step."""
    return EngineShape(block_size=prompts.block_size, kv_capacity_tokens=kv_tokens)


def fitting(jobs: Backlog, shape: EngineShape) -> tuple[Backlog, int]:
    """The jobs that the cache of an engine can hold, and how many it cannot: nobody is told of those, as in
    `trunkline plan`."""
    fleet = jobs_at_once(jobs)
    left_out = too_long(fleet, shape)
    return fleet.take(np.setdiff1d(np.arange(len(jobs.keys)), left_out)).jobs, len(left_out)


def as_scenario(scenario: str, jobs: Backlog, makespan_seconds: Callable[[], float]) -> FleetJobs:
    """What arrives when, and what the planner is told of it.

    `makespan_seconds` gives that of the same policy with everything known: late jobs arrive evenly over it, the last
    of the set in its own order, or any of them, mixed: then half of their groups have been run when they come.
    """
    fleet = jobs_at_once(jobs)
    if scenario == "unknown":
        told = replace(jobs, output_tokens=np.full(len(jobs.keys), _TOLD_TOKENS, dtype=np.int64))
        return jobs_at_once(told, output_tokens=jobs.output_tokens)
    if scenario.startswith("late"):
        n, n_late = len(jobs.keys), int(_LATE_SHARE * len(jobs.keys))
        late = np.arange(n - n_late, n)
        if scenario == "late_mixed":
            late = np.random.default_rng(_LATE_SEED).permutation(n)[:n_late]
        arrival_seconds = np.zeros(n)
        arrival_seconds[late] = np.linspace(0, makespan_seconds(), n_late)
        return replace(fleet, arrival_seconds=arrival_seconds)
    return fleet


class Bench:
    """Cells by what they are; each is run once."""

    def __init__(self, sets: dict[str, Callable[[], PromptSet]], resume: Path | None) -> None:
        self._sets = sets
        self._loaded: dict[str, PromptSet] = {}
        self._resume = resume
        self._found: dict[Cell, Figures] = {}
        if resume is not None and resume.exists():
            for line in resume.read_text(encoding="utf-8").splitlines():
                kept = json.loads(line)
                self._found[Cell(**kept["cell"])] = Figures(**kept["figures"])

    def figures(self, cell: Cell) -> Figures:
        """Run, or found where it was kept."""
        if cell not in self._found:
            self._found[cell] = self._run(cell)
            if self._resume is not None:
                kept = {"cell": asdict(cell), "figures": asdict(self._found[cell])}
                with self._resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(kept) + "\n")
        return self._found[cell]

    def _run(self, cell: Cell) -> Figures:
        if cell.prompts not in self._loaded:
            self._loaded[cell.prompts] = self._sets[cell.prompts]()
        prompts = self._loaded[cell.prompts]
        known = replace(cell, scenario="known")
        shape = shape_of(prompts, cell.kv_tokens)
        left, n_left_out = fitting(prompts.jobs, shape)
        if not left.keys:
            raise ReplayError(f"no job of {cell.prompts} fits a cache of {cell.kv_tokens:,} tokens")
        jobs = as_scenario(cell.scenario, left, lambda: self.figures(known).makespan_seconds)
        window = _WINDOW_JOBS if cell.scenario == "window" else None
        began = time.monotonic()
        result = replay_fleet(jobs, make_policy(cell.policy, window_jobs=window), [shape] * cell.instances)
        return Figures(
            jobs=len(left.keys),
            too_long=n_left_out,
            hit_rate=result.hit_rate,
            bound=result.bound,
            makespan_seconds=result.makespan_seconds,
            max_over_mean=result.max_over_mean,
            replicated_tokens=result.replicated_tokens,
            took_seconds=time.monotonic() - began,
        )


def row_of(bench: Bench, cell: Cell, baselines: bool) -> dict[str, Any]:
    """The planner's figures of one cell, and what they are against the baselines and against everything known."""
    figures = bench.figures(cell)
    known = bench.figures(replace(cell, scenario="known"))
    row: dict[str, Any] = {
        **asdict(cell),
        **asdict(figures),
        "eta": figures.eta,
        "hits_of_known": figures.hit_rate / known.hit_rate if known.hit_rate else 1.0,
        "makespan_of_known": figures.makespan_seconds / known.makespan_seconds,
        "baselines": {},
    }
    if not baselines or cell.scenario not in ("known", "unknown"):
        return row
    for name in (*ONLINE, "shared_queue"):
        # Nothing but the plan looks at lengths in another way when they are unknown: baselines are told them.
        other = bench.figures(replace(cell, policy=name, scenario="known"))
        gain = other.makespan_seconds / figures.makespan_seconds
        row["baselines"][name] = {"eta": other.eta, "max_over_mean": other.max_over_mean, "makespan_gain": gain}
    gains = {name: row["baselines"][name]["makespan_gain"] for name in ONLINE}
    row["makespan_gain_over_round_robin"] = gains["round_robin"]
    row["best_online"] = min(gains, key=lambda name: gains[name])
    row["makespan_gain_over_best_online"] = min(gains.values())
    return row


def cells_of(options: argparse.Namespace, names: Sequence[str]) -> Iterator[Cell]:
    """Every cell of the planner that was asked for."""
    for name in names:
        for kv_tokens in options.kv:
            for instances in options.instances:
                for scenario in options.scenarios:
                    yield Cell(
                        prompts=name, instances=instances, kv_tokens=kv_tokens, scenario=scenario, policy="prefix"
                    )


def measured(bench: Bench, options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every cell; on standard error, which are done."""
    rows = []
    for cell in cells_of(options, names):
        rows.append(row_of(bench, cell, options.baselines))
        Console(stderr=True).print(f"{cell.prompts} K={cell.instances} KV={cell.kv_tokens} {cell.scenario}: done")
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """For the eye."""
    table = Table(title="The plan on simulated engines", title_justify="left")
    for head in (
        "set",
        "K",
        "KV",
        "too long",
        "told",
        "hit",
        "/bound",
        "makespan",
        "x r.robin",
        "x best online",
        "max/mean",
    ):
        table.add_column(head, justify="left" if head in ("set", "told") else "right")
    for row in rows:
        online = row.get("makespan_gain_over_best_online")
        table.add_row(
            row["prompts"],
            str(row["instances"]),
            f"{row['kv_tokens']:.0e}",
            str(row["too_long"]),
            row["scenario"],
            f"{row['hit_rate']:.4f}",
            f"{row['eta']:.4f}",
            f"{row['makespan_seconds']:.1f} ({row['makespan_of_known']:.3f})",
            f"{row['makespan_gain_over_round_robin']:.3f}" if online else "",
            f"{online:.3f} {row['best_online']}" if online else "",
            f"{row['max_over_mean']:.3f}",
        )
    return table


def prompt_sets(options: argparse.Namespace) -> dict[str, Callable[[], PromptSet]]:
    """How each set that was asked for is read or made."""
    sets: dict[str, Callable[[], PromptSet]] = {}
    if options.trace:
        sets["conversation"] = lambda: read_conversation(options.trace)
    if options.bbh:
        sets["bbh"] = lambda: PromptSet(jobs=read_bbh(options.bbh), block_size=_BBH_BLOCK)
    for seed in options.made_up:
        for name, (make, block_size) in MADE_UP.items():
            sets[f"{name} {seed}"] = _made_up(make, seed, block_size)
    return sets


def read_conversation(trace: Path) -> PromptSet:
    """The trace, known at the start."""
    with trace.open("rb") as lines:
        return PromptSet(jobs=read_trace(lines).jobs, block_size=TRACE_BLOCK_TOKENS)


def _made_up(make: Callable[[int], Backlog], seed: int, block_size: int) -> Callable[[], PromptSet]:
    return lambda: PromptSet(jobs=make(seed), block_size=block_size)


def _whole(least: int) -> Callable[[str], list[int]]:
    """A parser of whole numbers with commas between them, also written as 1e6."""

    def parse(text: str) -> list[int]:
        try:
            values = [float(part) for part in text.split(",")]
            if all(value >= least and value.is_integer() for value in values):
                return [int(value) for value in values]
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text} is not a list of whole numbers from {least} on, as in 4,8,16.")

    return parse


def _scenarios(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SCENARIOS:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(SCENARIOS)}.")
    return names


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser_of() -> argparse.ArgumentParser:
    """The options."""
    parser = _Parser(prog="python -m bench.traces", description="The plan on recorded prompts. Simulated.")
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="a trace, see service/core/trace.py")
    add("--bbh", type=Path, metavar="FOLDER", help="folder with bbh/ and cot-prompts/")
    add("--made-up", type=_whole(0), default=[], metavar="SEED,...", help="made-up sets of these seeds (default: none)")
    add("--instances", type=_whole(1), default=[4, 8, 16], metavar="K,...", help="engines (default: 4,8,16)")
    add("--kv", type=_whole(512), default=[10**5, 10**6], metavar="TOKENS,...", help="of each (default: 1e5,1e6)")
    names = ",".join(SCENARIOS)
    add("--scenarios", type=_scenarios, default=list(SCENARIOS), metavar="NAME,...", help=f"(default: {names})")
    add("--baselines", action=argparse.BooleanOptionalAction, default=True, help="replay them too (default: yes)")
    add("--resume", type=Path, metavar="FILE", help="cells that were run are kept there (default: nowhere)")
    add("--json", action="store_true", help="one object as the last line (default: the table alone)")
    return parser


def main() -> None:
    parser = parser_of()
    options = parser.parse_args()
    sets = prompt_sets(options)
    if not sets:
        parser.error("give a --trace, a --bbh folder, or seeds for --made-up sets.")
    try:
        rows = measured(Bench(sets, options.resume), options, list(sets))
    except OSError as error:
        parser.error(f"{error.filename} cannot be read: {error.strerror}." if error.filename else f"{error}.")
    except TraceError as error:
        parser.error(f"{options.trace}: {error}")
    except ReplayError as error:
        parser.error(f"{error}.")
    Console(width=None if Console().is_terminal else 130).print(as_table(rows))
    if options.json:
        print(json.dumps({"simulated": True, "cells": rows}))


if __name__ == "__main__":
    main()
