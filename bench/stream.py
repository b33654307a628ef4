"""Jobs that arrive one by one, without a backlog: the ledger's rule against online routers, on simulated engines.

`python -m bench.stream [--seeds 101-108] [--jobs-each N] [--trace FILE] [--cells WORD] [--json]` replays conversations
of several kinds on fleets of several sizes, once for each seed, and the difference between the ledger and `affinity` is
taken seed by seed: +- is its standard error. With --trace, pieces of a trace take the place of the seeds, by their
timestamps. The rule's constants were chosen on seeds 1 to 8: judge it on others. Everything is simulated. The last
line with --json is one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.talks import Talk, conversations_at_load, single_jobs
from service.core.cut import FloatArray
from service.core.policies import make_policy
from service.core.policy import Policy
from service.core.replay import FleetReplay, replay_fleet
from service.core.scenario import EngineShape, FleetJobs, mean_context_tokens
from service.core.trace import TRACE_BLOCK_TOKENS, Trace, read_trace

POLICIES = ("ledger", "affinity", "round_robin")
_ROUND_ROBIN_STREAMS = 2  # it is there to show what there is to gain
TALKS = {
    "chat": Talk(think_seconds=4),
    # An agent's turns follow each other at once and are short; its tools answer at length.
    "agents": Talk(apps=3, system_tokens=4000, turns=12, message_tokens=500, answer_tokens=80, think_seconds=1),
    # Few questions on a long text of one's own.
    "documents": Talk(apps=20, system_tokens=300, turns=3, message_tokens=3000, answer_tokens=300, think_seconds=8),
    # Nobody comes back; only the apps' instructions are shared.
    "questions": Talk(apps=30, system_tokens=3000, turns=1, message_tokens=150, answer_tokens=100),
    # One application, and short questions.
    "hot": Talk(apps=1, system_tokens=3000, turns=1, message_tokens=80, answer_tokens=60),
}
COMPARED = ("hit_rate", "imbalance", "latency_seconds", "latency_seconds_p95")  # of Figures
_BLOCK_TOKENS = 32
_TRACE_SCALES = (0.7, 1.0)  # of the time that the trace took
_PIECES, _PIECE_JOBS = 8, 750  # of a trace, spread evenly over it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A stream of some kind on a fleet."""

    stream: str
    instances: int
    kv_tokens: int  # of each instance
    load: float  # share of its time that the fleet would be busy if it computed nothing twice; traces: time scale


CELLS = tuple(
    Cell(stream=stream, instances=instances, kv_tokens=int(kv_tokens), load=load)
    for stream, instances, kv_tokens, load in (
        ("chat", 2, 1e5, 0.6),
        ("chat", 4, 3e5, 0.85),
        ("chat", 8, 1e6, 0.7),
        ("chat", 16, 1e5, 0.6),
        ("agents", 2, 3e5, 0.6),
        ("agents", 4, 1e5, 0.85),
        ("agents", 8, 1e6, 0.4),
        ("documents", 4, 3e5, 0.4),
        ("documents", 8, 1e5, 0.6),
        ("documents", 16, 1e6, 0.85),
        ("questions", 4, 1e5, 0.85),
        ("questions", 8, 3e5, 0.4),
        ("hot", 4, 1e5, 0.7),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of one replay. Latency is from arrival to finish."""

    hit_rate: float
    imbalance: float  # max/mean of what the instances computed
    latency_seconds: float
    latency_seconds_p95: float
    busy: float  # what was computed, of what the fleet could have until the last finish


def work_seconds(jobs: FleetJobs, result: FleetReplay, shape: EngineShape) -> FloatArray:
    """[instances]: what each computed. A stream ends everywhere at the same time, so makespans say nothing."""
    rates = shape.rates(mean_context_tokens(jobs.jobs.prompt_tokens, jobs.output_tokens))
    prefill = (jobs.jobs.prompt_tokens - result.cached_tokens) / rates.prefill_tokens_per_second
    seconds = prefill + jobs.output_tokens / rates.decode_tokens_per_second
    ran = result.instance >= 0
    work: FloatArray = np.bincount(result.instance[ran], weights=seconds[ran], minlength=len(result.instances)).astype(
        np.float64
    )
    return work


def replayed(policy: Policy, jobs: FleetJobs, shape: EngineShape, instances: int) -> Figures:
    """One replay; jobs that are too long for a cache are left out."""
    result = replay_fleet(jobs, policy, [shape] * instances)
    work = work_seconds(jobs, result, shape)
    latency = (result.finish_seconds - jobs.arrival_seconds)[result.instance >= 0]
    return Figures(
        hit_rate=result.hit_rate,
        imbalance=float(work.max() / work.mean()),
        latency_seconds=float(latency.mean()),
        latency_seconds_p95=float(np.quantile(latency, 0.95)),
        busy=float(work.mean()) / result.makespan_seconds,
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error (0 for a single value)."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)


def differences(ours: Sequence[Figures], theirs: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """Ours less theirs in each figure, pair by pair: mean and standard error.

    Both see the same stream, so that what is luck in the stream falls out; what is luck in the placements remains.
    """
    return {
        name: mean_and_error(
            [getattr(our, name) - getattr(their, name) for our, their in zip(ours, theirs, strict=True)]
        )
        for name in COMPARED
    }


def shortfalls(difference: dict[str, tuple[float, float]]) -> list[str]:
    """The figures in which ours are worse by more than two standard errors."""
    signs = {name: -1.0 if name == "hit_rate" else 1.0 for name in difference}
    return [name for name, (mean, error) in difference.items() if signs[name] * mean > 2 * error]


def pieces_of(trace: Trace, scale: float, n_pieces: int = _PIECES, piece_jobs: int = _PIECE_JOBS) -> list[FleetJobs]:
    """Pieces of the trace, spread evenly over it, by their timestamps at `scale` of the time that they took.

    Each begins at 0 with caches that are empty, as if it were a trace of its own. They may overlap in a short trace.
    """
    starts = np.linspace(0, max(len(trace.jobs.keys) - piece_jobs, 0), n_pieces, dtype=np.int64).tolist()
    return [_piece(trace, slice(start, start + piece_jobs), scale) for start in starts]


def _piece(trace: Trace, part: slice, scale: float) -> FleetJobs:
    seconds = trace.timestamp_seconds[part]
    return single_jobs(
        (seconds - seconds[0]) * scale,
        list(trace.jobs.keys[part]),
        trace.jobs.prompt_tokens[part],
        trace.jobs.output_tokens[part],
    )


def row_of(cell: Cell, streams: Sequence[FleetJobs], shape: EngineShape) -> dict[str, Any]:
    """Means over the streams for each policy, and the ledger's differences from affinity."""
    figures = {
        name: [
            replayed(make_policy(name), jobs, shape, cell.instances)
            for jobs in streams[: _ROUND_ROBIN_STREAMS if name == "round_robin" else None]
        ]
        for name in POLICIES
    }
    means = {
        name: {key: mean_and_error([asdict(one)[key] for one in every])[0] for key in asdict(every[0])}
        for name, every in figures.items()
    }
    difference = differences(figures["ledger"], figures["affinity"])
    return {
        **asdict(cell),
        "streams": len(streams),
        "jobs": int(np.mean([len(jobs.jobs.keys) for jobs in streams])),
        **means,
        "ledger_less_affinity": {key: {"mean": mean, "error": error} for key, (mean, error) in difference.items()},
        "short": shortfalls(difference),
    }


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every cell that was asked for."""
    if options.trace:
        yield from trace_rows(options.trace)
        return
    for cell in CELLS:
        if options.cells in cell.stream:
            shape = EngineShape(block_size=_BLOCK_TOKENS, kv_capacity_tokens=cell.kv_tokens)
            yield row_of(cell, [stream_of(cell, shape, options.jobs_each, seed) for seed in options.seeds], shape)


def stream_of(cell: Cell, shape: EngineShape, jobs_each: int, seed: int) -> FleetJobs:
    """One stream of a cell, `jobs_each` jobs long for each instance, or about so."""
    return conversations_at_load(
        TALKS[cell.stream],
        shape,
        instances=cell.instances,
        load=cell.load,
        n_jobs=jobs_each * cell.instances,
        seed=seed,
    )


def trace_rows(path: Path) -> Iterator[dict[str, Any]]:
    """8 engines, two sizes of cache, at each time scale. Raises TraceError for a line that cannot be read."""
    with path.open("rb") as lines:
        trace = read_trace(lines)
    if np.isnan(trace.timestamp_seconds).any():
        raise SystemExit(f"{path} has lines without a timestamp.")
    for scale in _TRACE_SCALES:
        for kv_tokens in (300_000, 1_000_000):
            cell = Cell(stream="trace", instances=8, kv_tokens=kv_tokens, load=scale)
            shape = EngineShape(block_size=TRACE_BLOCK_TOKENS, kv_capacity_tokens=kv_tokens)
            yield row_of(cell, pieces_of(trace, scale), shape)


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("hit_rate", "hit rate", ".4f"),
    ("imbalance", "max/mean", ".3f"),
    ("latency_seconds", "latency s", ".2f"),
    ("latency_seconds_p95", "p95 s", ".2f"),
)


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """For the eye."""
    table = Table(title="Single jobs on simulated engines", title_justify="left")
    for head in ("stream", "K", "KV", "load", "busy"):
        table.add_column(head, justify="left" if head == "stream" else "right")
    for _, head, _ in _COLUMNS:
        table.add_column(f"{head}\nledger", justify="right")
        table.add_column("\naffinity", justify="right")
        table.add_column("\ndifference", justify="right")
        table.add_column("\nr.robin", justify="right")
    for row in rows:
        cells = [row["stream"], str(row["instances"]), f"{row['kv_tokens']:.0e}", f"{row['load']:.2f}"]
        cells.append(f"{row['ledger']['busy']:.2f}")
        for name, _, form in _COLUMNS:
            difference = row["ledger_less_affinity"][name]
            mark = " short" if name in row["short"] else ""
            cells += [format(row["ledger"][name], form), format(row["affinity"][name], form)]
            cells.append(f"{difference['mean']:+{form}} +- {difference['error']:{form}}{mark}")
            cells.append(format(row["round_robin"][name], form))
        table.add_row(*cells)
    return table


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """A line to stderr as soon as a cell is done, then the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=_seeds("101-108"), help="FIRST-LAST")
    parser.add_argument("--jobs-each", type=int, default=200, help="for every instance, about")
    parser.add_argument("--cells", default="", help="only streams whose name has this in it")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for row in rows_of(options):
        rows.append(row)
        cell = " ".join(str(row[name]) for name in ("stream", "instances", "kv_tokens", "load"))
        print(f"{cell}: short in {', '.join(row['short']) or 'nothing'}", file=sys.stderr, flush=True)
    Console(width=240).print(as_table(rows))
    if options.json:
        print(json.dumps({"simulated": True, "rows": rows}))


if __name__ == "__main__":
    main()
