"""`trunkline stats --fit`: how fast each engine is, by its results; with --json what `trunkline plan --cost` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from service.core.fit import MIN_JOBS, Fit, fit
from service.errors import TrunklineError
from service.store import rates
from service.store.rates import RatedBoot
from service.store.stats import SIMULATED

_RESULTS = 10_000  # newest of an instance
_HALF = 0.5  # a constant that its results say less of is marked


class NothingToFit(TrunklineError):
    """There is nothing to fit yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFit:
    """One instance as it is set up now, over its newest boots."""

    boots: Sequence[RatedBoot]
    results: int  # that were read
    found: Fit | None  # None: too few of them are of use

    @property
    def name(self) -> str:
        return self.boots[0].name

    @property
    def is_simulated(self) -> bool:
        return self.boots[0].engine == SIMULATED


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What one call prints. The fleet's fit takes all instances for engines of one kind."""

    fleet: Fit | None
    instances: list[InstanceFit]


def show_fit(conn: sa.Connection, *, as_json: bool) -> None:
    """Print the report on stdout. Raises NothingToFit."""
    report = read_fit(conn)
    if report.fleet is None:
        results = sum(item.results for item in report.instances)
        raise NothingToFit(
            f"{results:,} results; {MIN_JOBS} that say their prompt, cached and output tokens are needed."
        )
    if as_json:
        typer.echo(json.dumps(as_json_object(report)))
        return
    for table in tables(report):
        Console().print(table)
    Console(stderr=True).print("\n".join(notes(report)), highlight=False)


def read_fit(conn: sa.Connection) -> FitReport:
    """Fit every instance that has results, and all of them together."""
    found, runs = [], []
    for boots in rates.boots_with_results(conn):
        of_instance = rates.read_runs(conn, boots, _RESULTS)
        runs += of_instance
        found.append(InstanceFit(boots=boots, results=sum(map(len, of_instance)), found=fit(of_instance)))
    return FitReport(fleet=fit(runs), instances=found)


def as_json_object(report: FitReport) -> dict[str, Any]:
    """`cost` holds the fields of CostModel, which is what `trunkline plan --cost` reads; null where there is no fit."""
    return {
        **_flat(report.fleet),
        "simulated": any(item.is_simulated for item in report.instances if item.found),
        "instances": [
            {
                "name": item.name,
                "engine": item.boots[0].engine,
                "model": item.boots[0].model,
                "simulated": item.is_simulated,
                "boots": len(item.boots),
                "results": item.results,
                **_flat(item.found),
            }
            for item in report.instances
        ],
    }


def tables(report: FitReport) -> list[Table]:
    """The rates, and the constants behind them."""
    speeds = _table("Speed", ["jobs", "busy s", "prefill tok/s", "decode tok/s", "error"])
    constants = _table("Seconds of an engine step", ["step", "prompt token", "sequence", "context token"])
    rows = [(item.name, item.found) for item in report.instances]
    for name, found in [*rows, ("(all)", report.fleet)] if len(rows) > 1 else rows:
        if found is None:
            speeds.add_row(name, *["too few"] * 5)
            continue
        speeds.add_row(
            name,
            f"{found.jobs:,}",
            f"{found.busy_seconds:,.1f}",
            f"{found.rates.prefill_tokens_per_second:,.0f}",
            f"{found.rates.decode_tokens_per_second:,.0f}",
            "unknown" if found.median_error is None else f"{found.median_error:.1%}",
        )
        sure = dataclasses.asdict(found.from_data)
        cells = [f"{value:.3g}{'' if sure[key] >= _HALF else ' ?'}" for key, value in _cost(found).items()]
        constants.add_row(name, *cells)
    return [speeds, constants]


def notes(report: FitReport) -> list[str]:
    """What a reader must know before trusting the tables."""
    said = [
        "error: the median of |predicted / measured - 1| of the busy time in bins that the fit did not see.",
        "?: the results hardly tell this constant from the others; it follows the default's proportions.",
    ]
    simulated = sorted(item.name for item in report.instances if item.is_simulated)
    if simulated:
        said.append(f"Simulated, computed by no model: {', '.join(simulated)}.")
    return said


def _flat(found: Fit | None) -> dict[str, Any]:
    if found is None:
        return {"cost": None}
    record = dataclasses.asdict(found)
    return {"cost": record.pop("cost"), **record.pop("rates"), **record}


def _cost(found: Fit) -> dict[str, float]:
    return dataclasses.asdict(found.cost)


def _table(title: str, numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("instance", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table
