"""What `trunkline plan` prints: the forecast as tables or as one JSON object, notes and progress on standard error."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.core.strictjson import printable
from service.forecast import ROUND_ROBIN, Figures, Fleet, Forecast
from service.planfile import InputKind, PlanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What one call prints."""

    source: PlanInput
    jobs: int  # planned
    output_tokens: int  # of them
    fleet: Fleet
    cohorts: int
    plan_seconds: float  # from keys to plan, on this machine
    forecast: Forecast
    is_model_ignored: bool  # --model with a trace
    export: Path | None  # where the plan was written

    @property
    def too_long(self) -> int:
        """Jobs left out."""
        return len(self.source.jobs.jobs.job_ids) - self.jobs


def print_report(report: PlanReport, *, as_json: bool) -> None:
    """To standard output; what a reader must know before trusting it, to standard error."""
    for note in notes(report):
        typer.echo(note, err=True)
    if as_json:
        typer.echo(json.dumps(as_json_object(report)))
        return
    console = Console(highlight=False)
    console.print(fact_sheet(report))
    console.print(policy_table(report.forecast))


def notes(report: PlanReport) -> list[str]:
    """One sentence each."""
    said = []
    if report.too_long:
        said.append(
            f"Left out, as longer than the cache: {report.too_long:,} of {report.jobs + report.too_long:,} jobs."
        )
    if report.source.byte_keyed_jobs:
        said.append(
            f"{report.source.byte_keyed_jobs:,} prompts have no tokenizer, or their chat template refuses them: "
            "their tokens are estimated from bytes."
        )
    if report.source.is_over_batch_limit:
        said.append("The file has more lines than TRUNKLINE_MAX_LINES lets into one batch: submit it in parts.")
    if report.export is not None:
        said.append(f"Wrote the plan of {report.jobs:,} jobs to {report.export}.")
    if report.is_model_ignored:
        said.append("A trace holds no text, so --model changes nothing.")
    return said


def as_json_object(report: PlanReport) -> dict[str, Any]:
    """Every figure under a stable name; shares are of the prompt tokens, from 0 to 1."""
    forecast, fleet, sharing = report.forecast, report.fleet, report.forecast.sharing
    return {
        "simulated": True,
        "input": report.source.name,
        "kind": report.source.kind.value,
        "model": report.source.model,
        "instances": fleet.instances,
        "kv_tokens": fleet.shape.kv_capacity_tokens,
        "block_size": fleet.shape.block_size,
        "max_num_seqs": fleet.shape.max_num_seqs,
        "max_batched_tokens": fleet.shape.max_batched_tokens,
        "window": fleet.window_jobs,
        "cost": dataclasses.asdict(fleet.shape.cost),
        "jobs": report.jobs,
        "too_long": report.too_long,
        "byte_keyed_jobs": report.source.byte_keyed_jobs,
        "prompt_tokens": sharing.prompt_tokens,
        "output_tokens": report.output_tokens,
        "prefix_groups": sharing.prefix_groups,
        "shared_share": sharing.shared_share,
        "bound": sharing.bound,
        "cohorts": report.cohorts,
        "plan_seconds": report.plan_seconds,
        **_figures(forecast, forecast.chosen),
        "baselines": {name: _figures(forecast, figures) for name, figures in forecast.baselines.items()},
    }


def _figures(forecast: Forecast, figures: Figures) -> dict[str, Any]:
    return {**dataclasses.asdict(figures), "makespan_gain_over_round_robin": forecast.gain(figures)}


def fact_sheet(report: PlanReport) -> Table:
    """The input, the fleet and the plan, a line for each fact."""
    sharing, fleet = report.forecast.sharing, report.fleet
    left_out = f" ({report.too_long:,} too long, left out)" if report.too_long else ""
    cohorts = f"{report.cohorts:,} cohort{'s' if report.cohorts != 1 else ''}"
    windows = "" if fleet.window_jobs is None else f", {fleet.window_jobs:,} jobs at a time"
    kind = "trace" if report.source.kind is InputKind.TRACE else f"batch for {report.source.model}"
    facts = {
        "input": f"{printable(report.source.name)}, a {kind}",
        "fleet": f"{fleet.instances:,} x {fleet.shape.kv_capacity_tokens:,} tokens of KV, blocks of "
        f"{fleet.shape.block_size}, {fleet.shape.max_num_seqs} sequences",
        "jobs": f"{report.jobs:,}{left_out}",
        "prompt tokens": f"{sharing.prompt_tokens:,}",
        "prefix groups": f"{sharing.prefix_groups:,}",
        "shared share": percent(sharing.shared_share),
        "bound": f"{percent(sharing.bound)} of the prompt tokens, the most any schedule gets from cache",
        "plan": f"{cohorts}{windows}, made in {report.plan_seconds:,.3f} s",
    }
    sheet = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        sheet.add_row(Text(name), Text(value, overflow="fold"))
    return sheet


def policy_table(forecast: Forecast) -> Table:
    """The chosen policy first, then the baselines."""
    table = Table(
        title="\nSimulated: nothing was run",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", overflow="fold")
    for name in ("hit rate", "of bound", "makespan", "vs round robin", "max/mean", "replicated"):
        table.add_column(name, justify="right", overflow="fold")
    others = [figures for name, figures in forecast.baselines.items() if name != forecast.chosen.policy]
    for figures in [forecast.chosen, *others]:
        is_base = figures.policy == ROUND_ROBIN
        table.add_row(
            figures.policy.replace("_", " "),
            percent(figures.hit_rate),
            f"{figures.eta:.3f}",
            duration(figures.makespan_seconds),
            "" if is_base else f"{forecast.gain(figures):.2f} x",
            f"{figures.max_over_mean:.3f}",
            f"{figures.replicated_tokens:,}",
            style="bold" if figures is forecast.chosen else None,
        )
    return table


def percent(share: float) -> str:
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 100 else f"{seconds:.2f} s"


class Progress:
    """What is being done, on standard error where that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("reading", total=None)
        self._jobs = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def reading(self, lines: int) -> None:
        self._bar.update(self._task, completed=lines)

    def planning(self, jobs: int) -> None:
        self._jobs = jobs
        self._bar.update(self._task, description="planning", completed=0, total=jobs)

    def replaying(self, policy: str, finished: int) -> None:
        self._bar.update(self._task, description=f"replaying {policy}", completed=finished, total=self._jobs)
