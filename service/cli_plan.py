"""`trunkline plan`: what a batch file or a trace would do on a fleet, before anything is spent. Needs no service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from service.core.plan import Limits
from service.core.policies import POLICIES
from service.core.scenario import EngineShape, FleetJobs
from service.core.simulate import DEFAULT_COST, CostModel
from service.errors import InputRefused
from service.forecast import BASELINES, PREFIX, ROUND_ROBIN, Fleet, held_tokens, make_forecast, make_plan, too_long
from service.plan_report import PlanReport, Progress, print_report
from service.planfile import InputKind, PlanInput, check_export, read_cost, read_input, write_plan
from service.settings import Settings, read_settings

# Beyond these nothing is learned, and arrays of instances x cohorts or of a block's tokens no longer fit in memory.
_MOST_INSTANCES = 1_000
_MOST_BLOCK_TOKENS = 65_536
_MOST = 10**12


def _whole(option: str, most: int = _MOST) -> Callable[[object], int | None]:
    """A parser of whole numbers from 1 to `most`, also written as 1e6 or 1_000_000; None stays."""

    def parse(text: object) -> int | None:
        if text is None:
            return None
        try:
            value = Decimal(str(text))
        except InvalidOperation:
            value = Decimal("nan")
        if not value.is_finite():
            raise InputRefused(f"{option} is {text}; a whole number was expected.")
        if not 1 <= value <= most:
            raise InputRefused(f"{option} is {text}; it must be from 1 to {most:,}.")
        if value != int(value):
            raise InputRefused(f"{option} is {text}; a whole number was expected.")
        return int(value)

    return parse


def _policy(text: object) -> str:
    if str(text) not in POLICIES:
        raise InputRefused(f"--policy is {text}; it must be one of {', '.join(POLICIES)}.")
    return str(text)


_FEW_SHARE = 0.05  # of a trace: more that the cache cannot hold are a sign of a wrong --kv-tokens

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="A batch file or a trace (JSONL), or - for standard input.")
]
Instances = Annotated[
    int,
    typer.Option(
        "--instances", metavar="K", parser=_whole("--instances", _MOST_INSTANCES), help="How many equal engines."
    ),
]
KvTokens = Annotated[
    int,
    typer.Option(
        "--kv-tokens", metavar="N", parser=_whole("--kv-tokens"), help="Tokens of KV cache of each engine, also 1e6."
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="B",
        parser=_whole("--block-size", _MOST_BLOCK_TOKENS),
        help="Tokens of a cache block. Default: 16, for a trace 512.",
    ),
]
IdTokens = Annotated[
    int | None,
    typer.Option(
        "--trace-block-size",
        metavar="B",
        parser=_whole("--trace-block-size", _MOST_BLOCK_TOKENS),
        help="Tokens that an id of the trace stands for, where it is not --block-size.",
    ),
]
PolicyName = Annotated[
    str, typer.Option("--policy", metavar="NAME", parser=_policy, help=f"One of {', '.join(POLICIES)}.")
]
Window = Annotated[
    int | None,
    typer.Option("--window", metavar="W", parser=_whole("--window"), help="Jobs planned at once. Default: all."),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Tokenise every line with this model of MODELS, whatever it names."),
]
Sequences = Annotated[
    int,
    typer.Option(
        "--max-num-seqs",
        metavar="N",
        parser=_whole("--max-num-seqs", 100_000),
        help="Sequences that an engine runs at once.",
    ),
]
StepTokens = Annotated[
    int,
    typer.Option(
        "--max-batched-tokens",
        metavar="N",
        parser=_whole("--max-batched-tokens", 10**9),
        help="Tokens of one engine step.",
    ),
]
CostFile = Annotated[
    Path | None,
    typer.Option("--cost", metavar="FILE", help="Constants of the engine, as `trunkline stats --fit --json` prints."),
]
SkipTooLong = Annotated[
    bool, typer.Option("--skip-too-long", help="Leave out the jobs that the cache cannot hold, and count them.")
]
NoBaselines = Annotated[
    bool, typer.Option("--no-baselines", help="Compare with round robin only: quicker for large inputs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]
Export = Annotated[
    Path | None, typer.Option("--export", metavar="OUT", help="Write where and when each job would run (JSONL).")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was called with."""

    source: str
    instances: int
    kv_tokens: int
    block_size: int | None
    policy: str
    window_jobs: int | None
    model: str | None
    trace_block_size: int | None
    max_num_seqs: int
    max_batched_tokens: int
    cost: Path | None
    skip_too_long: bool
    baselines: tuple[str, ...]
    export: Path | None

    def fleet(self, block_size: int, cost: CostModel, limits: Limits) -> Fleet:
        """The fleet that was asked for. Raises InputRefused where a cache would hold no block."""
        if self.kv_tokens < block_size:
            raise InputRefused(f"--kv-tokens is {self.kv_tokens:,}, less than one block of {block_size} tokens.")
        shape = EngineShape(
            block_size=block_size,
            kv_capacity_tokens=self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            cost=cost,
        )
        return Fleet(instances=self.instances, shape=shape, limits=limits, window_jobs=self.window_jobs)


def plan(
    source: Input,
    instances: Instances,
    kv_tokens: KvTokens,
    block_size: BlockSize = None,
    policy: PolicyName = PREFIX,
    window: Window = None,
    model: ModelName = None,
    trace_block_size: IdTokens = None,
    max_num_seqs: Sequences = 64,
    max_batched_tokens: StepTokens = 8192,
    cost: CostFile = None,
    skip_too_long: SkipTooLong = False,
    no_baselines: NoBaselines = False,
    as_json: AsJson = False,
    export: Export = None,
) -> None:
    """Plan a batch file or a trace without running it: hit rate and makespan beside the bound and other policies.

    All times and hit rates are simulated. A batch file is tokenised with its model of MODELS; no service is needed.
    """
    asked = Asked(
        source=source,
        instances=instances,
        kv_tokens=kv_tokens,
        block_size=block_size,
        policy=policy,
        window_jobs=window,
        model=model,
        trace_block_size=trace_block_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        cost=cost,
        skip_too_long=skip_too_long,
        baselines=(ROUND_ROBIN,) if no_baselines else BASELINES,
        export=export,
    )
    print_report(run_plan(asked, read_settings()), as_json=as_json)


def run_plan(asked: Asked, settings: Settings) -> PlanReport:
    """Read, plan, export, replay. Raises InputRefused, SettingError and ModelMissing with one sentence."""
    if asked.max_batched_tokens < asked.max_num_seqs:
        raise InputRefused("--max-batched-tokens must be at least --max-num-seqs: each sequence has a token in a step.")
    if asked.export is not None:
        check_export(asked.export, asked.source)
    cost = DEFAULT_COST if asked.cost is None else read_cost(asked.cost)
    with Progress() as progress:
        found = read_input(
            asked.source,
            settings,
            model=asked.model,
            block_size=asked.block_size,
            trace_block_size=asked.trace_block_size,
            on_progress=progress.reading,
        )
        fleet = asked.fleet(found.block_size, cost, Limits(cohort_jobs=settings.cohort_jobs))
        jobs = _fitting(found, fleet, is_skipping=asked.skip_too_long)
        progress.planning(len(jobs.jobs.job_ids))
        cohorts, seconds = make_plan(jobs, fleet, asked.policy)
        if asked.export is not None:
            write_plan(asked.export, cohorts)
        forecast = make_forecast(jobs, fleet, asked.policy, baselines=asked.baselines, on_progress=progress.replaying)
    return PlanReport(
        source=found,
        jobs=len(jobs.jobs.job_ids),
        output_tokens=int(jobs.output_tokens.sum()),
        fleet=fleet,
        cohorts=len(cohorts),
        plan_seconds=seconds,
        forecast=forecast,
        is_model_ignored=asked.model is not None and found.model is None,
        export=asked.export,
    )


def _fitting(found: PlanInput, fleet: Fleet, *, is_skipping: bool) -> FleetJobs:
    """The jobs that a cache can hold. Raises InputRefused where one does not, or, when skipping, where none does.

    Of a trace, which is there to be measured and not to be run, a few that are too long are left out without asking.
    """
    shape, jobs = fleet.shape, found.jobs
    long = too_long(jobs, shape)
    if not long.size:
        return jobs
    is_few = long.size <= _FEW_SHARE * len(jobs.jobs.job_ids)
    is_skipping = is_skipping or (found.kind is InputKind.TRACE and is_few)
    if is_skipping and long.size < len(jobs.jobs.job_ids):
        return jobs.take(np.setdiff1d(np.arange(len(jobs.jobs.job_ids)), long))
    largest = int(long[0])
    line, needed = int(jobs.jobs.job_ids[largest]) + 1, int(held_tokens(jobs)[largest])
    is_all = long.size == len(jobs.jobs.job_ids)
    who = "no job of" if is_all else f"{long.size:,} of {len(jobs.jobs.job_ids):,} jobs in"
    verb = "fits" if is_all else "do not fit"
    advice = "raise --kv-tokens" if is_all else "raise --kv-tokens, or leave them out with --skip-too-long"
    raise InputRefused(
        f"{who} {found.name} {verb} a cache of {shape.capacity_blocks * shape.block_size:,} tokens; the largest, "
        f"line {line}, needs {needed:,} ({int(jobs.jobs.prompt_tokens[largest]):,} of prompt): {advice}."
    )
