"""How tenants, deadlines and priorities fare, and what that costs in hit rate, on simulated engines.

`python -m bench.sharing [--trace FILE] [--quick] [--json]`. Flood: a tenant with 100 jobs beside one with 100,000
(10,000 with --quick), against the same 100 jobs alone on as many instances as its weight is due. Deadlines: batches in
one queue, against first come, first served. Priorities: a HIGH batch that comes in mid-run. Jobs are made up, trees of
prefixes from a seed; with --trace those of a trace share a fleet too. Everything is simulated. The last line with
--json is one object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.first_come import FirstCome
from bench.watched import Watched
from service.core.classes import PriorityClasses
from service.core.cut import FloatArray
from service.core.model import Priority
from service.core.plan import DEFAULT_LIMITS, Backlog, PlannedCohort
from service.core.prefix import IntArray
from service.core.replay import EngineShape, FleetJobs, FleetReplay, jobs_at_once, replay_fleet
from service.core.standing import StandingPlan
from service.core.trace import TRACE_BLOCK_TOKENS, read_trace

_KV_TOKENS = 400_000
_SMALL_JOBS, _FLOOD_JOBS, _QUICK_JOBS = 100, 100_000, 10_000
_SMALL, _FLOOD = 1, 0  # the tenants' numbers, and their owners'
_MID_FLOOD_SECONDS = 40.0  # every engine is full by then
_TOLD_TOKENS = 256  # what the service assumes of an answer without a limit
_BATCHES = 30  # with deadlines
# Of the time that first come, first served takes for a batch: deadlines are drawn evenly from between.
_TIGHTNESS = {"tight": (0.8, 2.0), "loose": (2.0, 6.0), "overloaded": (0.2, 1.0), "arriving": (0.8, 2.0)}
_ARRIVING_SHARE = 0.4  # of the time that first come, first served takes for all, in which batches arrive
_LONGEST_JOB_TOKENS = 100_000  # of a trace: longer ones fit few caches


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodFigures:
    """The small tenant beside the flood. Costs are None where the flood was not run to its end."""

    jobs: str  # "made up" or "trace"
    instances: int
    weight: float  # of the small tenant; the flood's is 1
    seed: int
    flood_jobs: int
    arrival_seconds: float  # of the small tenant
    p95_seconds: float  # of its finishes, from its arrival
    alone_instances: int
    alone_p95_seconds: float
    ratio: float
    hit_rate: float | None
    hit_rate_one_tenant: float | None
    makespan_seconds: float | None
    makespan_one_tenant_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineFigures:
    """Batches with deadlines, planned, against first come, first served, and against a plan that knows of none."""

    case: str
    known_lengths: bool
    instances: int
    seed: int
    jobs: int
    missed: int
    missed_first_come: int
    missed_without_deadlines: int
    missed_that_first_come_met: int
    worst_late_seconds: float  # of those
    cohort_seconds: float  # the longest from a cohort's being taken to its last finish
    limit_cohort_seconds: float
    hit_rate: float
    hit_rate_without_deadlines: float
    hit_rate_first_come: float
    makespan_seconds: float
    makespan_without_deadlines_seconds: float
    makespan_first_come_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityFigures:
    """A HIGH batch that comes in mid-run, against the same batch alone, and against all of one class."""

    instances: int
    seed: int
    high_jobs: int
    normal_jobs: int
    next_high_instances: int  # whose next cohort was of that batch
    lower_cohorts_ahead: int  # taken while some of it waited, for an instance that would end it sooner
    worst_wait_seconds: float  # from its arrival to the next cohort of an instance, the longest
    p95_seconds: float  # of its finishes, from its arrival
    alone_p95_seconds: float
    one_class_p95_seconds: float
    hit_rate: float
    hit_rate_one_class: float
    makespan_seconds: float
    makespan_one_class_seconds: float


def made(n: int, seed: int, n_groups: int, *, first_id: int = 0, salt: int = 0) -> Backlog:
    """n jobs below `n_groups` documents of 640 to 2,560 tokens, each with a question of its own; other salts share
    nothing. Answers take 200 tokens on average (gamma)."""
    rng = np.random.default_rng(seed)
    groups, depths = rng.integers(0, n_groups, n), rng.integers(20, 80, n_groups)
    documents = [
        ((group * 7919 + np.arange(depth) * 104_729 + salt * 15_485_863) % 2**32).astype(">u4").tobytes()
        for group, depth in enumerate(depths.tolist())
    ]
    own = rng.integers(2, 12, n)
    questions = rng.integers(0, 2**32, (n, 12), dtype=np.uint32).astype(">u4")
    keys = [
        documents[group] + questions[number, :rungs].tobytes()
        for number, (group, rungs) in enumerate(zip(groups.tolist(), own.tolist(), strict=True))
    ]
    tokens = (depths[groups] + own) * 32 + rng.integers(1, 32, n)
    return Backlog(
        job_ids=np.arange(first_id, first_id + n, dtype=np.int64),
        keys=keys,
        prompt_tokens=tokens,
        output_tokens=np.maximum(rng.gamma(2, 100, n).astype(np.int64), 1),
        body_bytes=tokens * 4,
    )


def joined(parts: Sequence[Backlog]) -> Backlog:
    """One backlog of several, ids from 0."""
    keys = [key for part in parts for key in part.keys]
    return Backlog(
        job_ids=np.arange(len(keys), dtype=np.int64),
        keys=keys,
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        body_bytes=np.concatenate([part.body_bytes for part in parts]),
    )


def of_trace(trace: Path, seed: int, n_flood: int) -> tuple[Backlog, Backlog]:
    """Flood and small tenant: some 100 neighbours of a trace, and as many of the others as wanted or there are. They
    share no prefix, as tenants do."""
    with trace.open("rb") as lines:
        jobs = read_trace(lines).jobs
    rng = np.random.default_rng(seed)
    fitting = np.flatnonzero(jobs.prompt_tokens + jobs.output_tokens < _LONGEST_JOB_TOKENS)
    start = int(rng.integers(0, len(fitting) - _SMALL_JOBS))
    mine = fitting[start : start + _SMALL_JOBS]
    others = np.setdiff1d(fitting, mine)
    others = np.sort(rng.permutation(others)[:n_flood])
    flood, small = (jobs_at_once(jobs).take(chosen).jobs for chosen in (others, mine))
    return flood, replace(small, keys=[b"\x01\x02\x03\x04" + key[4:] for key in small.keys])


def p95(seconds: FloatArray) -> float:
    return float(np.quantile(seconds, 0.95))


def flood(
    parts: tuple[Backlog, Backlog], shape: EngineShape, n: int, weight: float, arrival_seconds: float, is_whole: bool
) -> dict[str, Any]:
    """The figures of one case that come from replays; the flood is run to its end where `is_whole`."""
    big, small = parts
    flows = np.repeat([_FLOOD, _SMALL], [len(big.keys), len(small.keys)])
    together = replace(
        jobs_at_once(joined(parts)),
        flows=flows,
        owners=flows,
        arrival_seconds=np.where(flows == _SMALL, arrival_seconds, 0.0),
    )
    policy = Watched(StandingPlan(), drop_owner=None if is_whole else _FLOOD, small_jobs=len(small.keys))
    policy.set_weight(_SMALL, weight)
    shared = replay_fleet(together, policy, [shape] * n)
    finishes = shared.finish_seconds[flows == _SMALL]
    if not np.all(finishes <= policy.dropped_at):
        raise RuntimeError("the flood was cut off before the small tenant's last job ended")
    alone_instances = max(1, round(n * weight / (1 + weight)))
    alone = replay_fleet(jobs_at_once(joined([small])), StandingPlan(), [shape] * alone_instances)
    one = replay_fleet(replace(together, flows=np.zeros_like(flows)), StandingPlan(), [shape] * n) if is_whole else None
    mine, by_itself = p95(finishes - arrival_seconds), p95(alone.finish_seconds)
    return {
        "p95_seconds": mine,
        "alone_instances": alone_instances,
        "alone_p95_seconds": by_itself,
        "ratio": mine / by_itself,
        "hit_rate": shared.hit_rate if one else None,
        "hit_rate_one_tenant": one.hit_rate if one else None,
        "makespan_seconds": shared.makespan_seconds if one else None,
        "makespan_one_tenant_seconds": one.makespan_seconds if one else None,
    }


def floods(options: argparse.Namespace) -> Iterator[FloodFigures]:
    """Every case. The cost of sharing is measured with a trace, and where both are there at the start with equal
    weights, first seed."""
    n_flood = _QUICK_JOBS if options.quick else _FLOOD_JOBS
    for seed in options.seeds:
        made_up = made(n_flood, seed, 60), made(_SMALL_JOBS, seed + 50, 5, salt=77)
        sets = [("made up", made_up, 16)]
        if options.trace:
            sets.append(("trace", of_trace(options.trace, seed, n_flood), TRACE_BLOCK_TOKENS))
        for name, parts, block_size in sets:
            shape = EngineShape(block_size=block_size, kv_capacity_tokens=_KV_TOKENS)
            for n in options.instances:
                for weight, at in ((1.0, 0.0), (3.0, 0.0), (1 / 3, 0.0), (1.0, _MID_FLOOD_SECONDS)):
                    is_whole = name == "trace" or (seed == options.seeds[0] and weight == 1.0 and not at)
                    yield FloodFigures(
                        jobs=name,
                        instances=n,
                        weight=weight,
                        seed=seed,
                        flood_jobs=len(parts[0].keys),
                        arrival_seconds=at,
                        **flood(parts, shape, n, weight, at, is_whole),
                    )


def longest_cohort_seconds(taken: Sequence[tuple[float, PlannedCohort]], finish_seconds: FloatArray) -> float:
    """From a cohort's being taken to its last finish; ids are indices."""
    return max(float(finish_seconds[cohort.job_ids].max()) - at for at, cohort in taken)


def deadlines(options: argparse.Namespace) -> Iterator[DeadlineFigures]:
    """Every case."""
    per_batch = 60 if options.quick else 200
    for seed in options.seeds:
        parts = [made(per_batch, seed * 100 + number, 3, salt=number % 10) for number in range(_BATCHES)]
        batches: IntArray = np.repeat(np.arange(_BATCHES), per_batch)
        at_once = replace(jobs_at_once(joined(parts)), owners=batches)
        for n in options.instances:
            shapes = [EngineShape(block_size=16, kv_capacity_tokens=_KV_TOKENS // 2)] * n
            first = replay_fleet(at_once, FirstCome(), shapes)
            arrival_seconds = batches * (_ARRIVING_SHARE * first.makespan_seconds / _BATCHES)
            late = replace(at_once, arrival_seconds=np.asarray(arrival_seconds, dtype=np.float64))
            first_late = replay_fleet(late, FirstCome(), shapes)
            for is_known in (True, False):
                case = _DeadlineCase(shapes=shapes, seed=seed, is_known=is_known)
                for names, jobs, came_first in (
                    (("tight", "loose", "overloaded"), at_once, first),
                    (("arriving",), late, first_late),
                ):
                    yield from case.figures(names, jobs, came_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeadlineCase:
    shapes: Sequence[EngineShape]
    seed: int
    is_known: bool

    def figures(self, names: Sequence[str], jobs: FleetJobs, first: FleetReplay) -> Iterator[DeadlineFigures]:
        """For each tightness of deadlines put on `jobs`; `first` is how these fare first come, first served."""
        if not self.is_known:
            told = np.full(len(jobs.output_tokens), _TOLD_TOKENS, dtype=np.int64)
            jobs = replace(jobs, jobs=replace(jobs.jobs, output_tokens=told))
        without = replay_fleet(jobs, StandingPlan(), self.shapes)
        for name in names:
            due = due_seconds(jobs, first, _TIGHTNESS[name], self.seed)
            policy = Watched(StandingPlan())
            planned = replay_fleet(replace(jobs, deadlines=due), policy, self.shapes)
            late, met = planned.finish_seconds - due, first.finish_seconds <= due
            yield DeadlineFigures(
                case=name,
                known_lengths=self.is_known,
                instances=len(self.shapes),
                seed=self.seed,
                jobs=len(due),
                missed=int((late > 0).sum()),
                missed_first_come=int((~met).sum()),
                missed_without_deadlines=int((without.finish_seconds > due).sum()),
                missed_that_first_come_met=int(((late > 0) & met).sum()),
                worst_late_seconds=float(late[met].max(initial=0.0)),
                cohort_seconds=longest_cohort_seconds(policy.taken, planned.finish_seconds),
                limit_cohort_seconds=DEFAULT_LIMITS.cohort_seconds,
                hit_rate=planned.hit_rate,
                hit_rate_without_deadlines=without.hit_rate,
                hit_rate_first_come=first.hit_rate,
                makespan_seconds=planned.makespan_seconds,
                makespan_without_deadlines_seconds=without.makespan_seconds,
                makespan_first_come_seconds=first.makespan_seconds,
            )


def due_seconds(jobs: FleetJobs, first: FleetReplay, between: tuple[float, float], seed: int) -> FloatArray:
    """float64[n]: one deadline a batch, by the time that first come, first served takes from its arrival."""
    factors = np.random.default_rng(seed).uniform(*between, _BATCHES)
    last = np.zeros(_BATCHES)
    np.maximum.at(last, jobs.owners, first.finish_seconds - jobs.arrival_seconds)
    due: FloatArray = jobs.arrival_seconds + (last * factors)[jobs.owners]
    return due


def priorities(options: argparse.Namespace) -> Iterator[PriorityFigures]:
    """Every case."""
    n_normal = 2_000 if options.quick else 6_000
    n_high = n_normal // 10
    for seed in options.seeds:
        normal, high = made(n_normal, seed, 40), made(n_high, seed + 50, 5, salt=77)
        is_high = np.repeat([False, True], [n_normal, n_high])
        for n in options.instances:
            shapes = [EngineShape(block_size=16, kv_capacity_tokens=_KV_TOKENS)] * n
            at = replay_fleet(jobs_at_once(normal), StandingPlan(), shapes).makespan_seconds / 2
            jobs = replace(jobs_at_once(joined([normal, high])), arrival_seconds=np.where(is_high, at, 0.0))
            one = replay_fleet(jobs, StandingPlan(), shapes)
            alone = replay_fleet(jobs_at_once(joined([high])), StandingPlan(), shapes)
            classes = np.where(is_high, int(Priority.HIGH), int(Priority.NORMAL))
            policy = Watched(PriorityClasses(StandingPlan))
            found = replay_fleet(replace(jobs, priorities=classes), policy, shapes)
            next_high, lower_ahead, worst_wait = after_arrival(policy.taken, at)
            yield PriorityFigures(
                instances=n,
                seed=seed,
                high_jobs=n_high,
                normal_jobs=n_normal,
                next_high_instances=next_high,
                lower_cohorts_ahead=lower_ahead,
                worst_wait_seconds=worst_wait,
                p95_seconds=p95(found.finish_seconds[is_high] - at),
                alone_p95_seconds=p95(alone.finish_seconds),
                one_class_p95_seconds=p95(one.finish_seconds[is_high] - at),
                hit_rate=found.hit_rate,
                hit_rate_one_class=one.hit_rate,
                makespan_seconds=found.makespan_seconds,
                makespan_one_class_seconds=one.makespan_seconds,
            )


def after_arrival(taken: Sequence[tuple[float, PlannedCohort]], at_seconds: float) -> tuple[int, int, float]:
    """How many instances' next cohort was of the HIGH jobs that came at `at_seconds`; how many cohorts of a lower class
    were taken while some of these waited; and the longest that an instance took to its next cohort."""
    since = [(at, cohort) for at, cohort in taken if at >= at_seconds]
    last_high = max(place for place, (_, cohort) in enumerate(since) if cohort.priority == Priority.HIGH)
    lower = sum(cohort.priority != Priority.HIGH for _, cohort in since[:last_high])
    following: dict[int, tuple[float, PlannedCohort]] = {}
    for at, cohort in since:
        following.setdefault(cohort.instance, (at, cohort))
    next_high = sum(cohort.priority == Priority.HIGH for _, cohort in following.values())
    return next_high, lower, max(at for at, _ in following.values()) - at_seconds


def as_table(title: str, rows: Sequence[Any]) -> Table:
    """A row a case, a column a figure."""
    table = Table(title=title, title_justify="left")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    return table


_PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Any]]] = {
    "flood": floods,
    "deadlines": deadlines,
    "priorities": priorities,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace, see service/core/trace.py")
    parser.add_argument("--quick", action="store_true", help="a tenth of the flood, a third of the others")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(_PARTS), metavar="PART,...")
    parser.add_argument("--instances", type=_numbers, default=[4, 8], metavar="K,...")
    parser.add_argument("--seeds", type=_numbers, default=[1, 2, 3], metavar="SEED,...")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    progress, console = Console(stderr=True), Console(width=None if Console().is_terminal else 200)
    found: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        rows = []
        for row in _PARTS[part](options):
            rows.append(row)
            progress.print(f"{part}: {row}", highlight=False)
        console.print(as_table(f"{part} (simulated)", rows))
        found[part] = [asdict(row) for row in rows]
    if options.json:
        print(json.dumps({"simulated": True, **found}))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
