"""`trunkline stats`: the cache statistics of service.store.stats as tables, or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from service.cli_fit import show_fit
from service.connections import find_connections
from service.core.alarm import ADVICE, Mismatch
from service.core.model import MissCause
from service.errors import NoSuchBatch
from service.fleet import load_models
from service.migrate import check_schema
from service.settings import Settings, read_settings
from service.store import stats as store
from service.store.session import Database

_RECENT_BATCHES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one call prints."""

    batch_id: str | None
    instances: list[store.InstanceStats]
    batches: list[store.BatchStats]
    groups: list[store.GroupStats]
    misses: list[store.MissStats]
    miss_totals: store.MissStats | None  # of all jobs; None where misses were not asked for
    byte_key_models: frozenset[str]  # served without a tokenizer: their keys are made of bytes


def stats(
    batch: Annotated[str | None, typer.Option(metavar="BATCH", help="Only this batch, with its prefix groups.")] = None,
    misses: Annotated[bool, typer.Option("--misses", help="Also the misses by cause.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Instead: how fast each engine is, fitted from results.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Hit rate per instance, per prefix group and per batch, measured beside predicted."""
    settings = read_settings()
    database = Database(find_connections(settings).database_url, pool_size=1, application_name="trunkline-stats")
    try:
        database.check()
        check_schema(database)
        with database.transaction() as conn:
            if fit:
                show_fit(conn, as_json=as_json)
                return
            report = read_report(conn, settings, batch, misses=misses)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(as_json_object(report)))
        return
    console = Console()
    for part in tables(report):
        console.print(part)
    for note in notes(report):
        Console(stderr=True).print(note, style="bold red", highlight=False)


def read_report(conn: sa.Connection, settings: Settings, batch_id: str | None, *, misses: bool) -> Report:
    """Raises NoSuchBatch."""
    ids = [batch_id] if batch_id else store.recent_batches(conn, _RECENT_BATCHES)
    batches = [found for item in ids if (found := store.batch_stats(conn, item)) is not None]
    if batch_id and not batches:
        raise NoSuchBatch(batch_id)
    models = load_models(settings.models_path).by_name if settings.models_path.exists() else {}
    return Report(
        batch_id=batch_id,
        instances=store.instance_stats(conn, batch_id),
        batches=batches,
        groups=store.group_stats(conn, batch_id) if batch_id else [],
        misses=store.miss_stats(conn, batch_id) if misses else [],
        miss_totals=store.miss_totals(conn, batch_id) if misses else None,
        byte_key_models=frozenset(name for name, model in models.items() if model.tokenizer is None),
    )


def as_json_object(report: Report) -> dict[str, Any]:
    """The report with its rates: the token sums of each row stand beside its other fields."""
    return {
        "instances": [{**_flat(row), "simulated": row.is_simulated} for row in report.instances],
        "batches": [
            {**_flat(row), "unfinished": row.unfinished, "bound_rate": row.bound_rate} for row in report.batches
        ],
        "groups": [_flat(row) for row in report.groups],
        "misses": [dataclasses.asdict(row) for row in report.misses],
        "miss_totals": _total_object(report),
        "byte_key_models": sorted(report.byte_key_models),
    }


def tables(report: Report) -> list[Table]:
    """What is printed, in order; a part without rows is left out."""
    one = report.batch_id is not None
    batches = [batch_sheet(row) for row in report.batches] if one else [batch_table(report.batches)]
    parts = [*batches, instance_table(report.instances)]
    if report.groups:
        parts.append(group_table(report.groups))
    if report.miss_totals is not None:
        parts.append(miss_table(report.misses, report.miss_totals))
    return parts


def instance_table(rows: Sequence[store.InstanceStats]) -> Table:
    """Hit rate per instance; a simulated engine says so in its own column."""
    table = _table("Instances", ["instance", "engine"], ["boots", *_TOKEN_HEADS])
    for row in rows:
        engine = f"{row.engine}, KEY MISMATCH" if row.key_mismatch else row.engine
        table.add_row(row.name, engine, f"{row.boots:,}", *_token_cells(row.tokens))
    return table


def group_table(rows: Sequence[store.GroupStats]) -> Table:
    """Hit rate per prefix group; groups of one are summed in the last row."""
    table = _table("Prefix groups", ["group"], ["jobs", "shared tokens", "answered", *_TOKEN_HEADS[1:]])
    for row in rows:
        if row.jobs > 1:
            table.add_row(row.label, f"{row.jobs:,}", f"{row.shared_tokens:,}", *_token_cells(row.tokens))
    alone = [row.tokens for row in rows if row.jobs == 1]
    if alone:
        table.add_row("(alone)", f"{len(alone):,}", "0", *_token_cells(_sum(alone)))
    return table


def batch_table(rows: Sequence[store.BatchStats]) -> Table:
    """The hit rate of each batch beside its bound; narrow, as an id is long. `batch_sheet` has the rest."""
    table = _table("Batches", ["batch", "status"], ["lines ended", "hit rate", "bound"])
    for row in rows:
        status = f"{row.status}, simulated" if row.simulated_jobs else row.status
        ended = f"{row.total - row.unfinished:,}/{row.total:,}"
        table.add_row(row.batch_id, status, ended, percent(row.tokens.hit_rate), percent(row.bound_rate))
    return table


def batch_sheet(row: store.BatchStats) -> Table:
    """One batch, a line for each fact."""
    sheet = Table.grid(padding=(0, 2))
    skipped = f" ({row.skipped:,} of them invalid and skipped)" if row.skipped else ""
    facts = {
        "batch": row.batch_id,
        "status": f"{row.status}, simulated" if row.simulated_jobs else row.status,
        "models": ", ".join(row.models) or "none yet",
        "lines": f"{row.total:,}",
        "succeeded": f"{row.succeeded:,}",
        "failed": f"{row.failed + row.skipped:,}{skipped}",
        "cancelled, expired": f"{row.cancelled:,}, {row.expired:,}",
        "unfinished": f"{row.unfinished:,}",
        "prompt tokens": f"{row.tokens.prompt_tokens:,} ({row.planned_prompt_tokens:,} as planned)",
        "cached, predicted": f"{row.tokens.cached_tokens:,}, {row.tokens.predicted_cached_tokens:,}",
        "completion tokens": f"{row.tokens.completion_tokens:,} ({row.reasoning_tokens:,} of them reasoning)",
        "hit rate, bound": f"{percent(row.tokens.hit_rate)}, {percent(row.bound_rate)}",
        "jobs, unknown cache": f"{row.tokens.jobs:,}, {row.tokens.unknown_jobs:,}",
    }
    for name, value in facts.items():
        sheet.add_row(name, value)
    return sheet


def miss_table(rows: Sequence[store.MissStats], totals: store.MissStats) -> Table:
    """Why prompt tokens were computed, and which of these the plan had counted on."""
    table = _table("Misses by cause", ["cause"], ["jobs", "prompt", "computed", "missing"])
    for row in rows:
        table.add_row(row.cause or "", *_miss_cells(row))
    without = {name: getattr(totals, name) - sum(getattr(row, name) for row in rows) for name in _MISS_NUMBERS}
    if without["jobs"]:
        table.add_row("(no miss)", *(f"{number:,}" for number in without.values()))
    table.add_section()
    table.add_row("all", *_miss_cells(totals))
    return table


_MISS_NUMBERS = ("jobs", "prompt_tokens", "computed_tokens", "short_tokens")


def _miss_cells(row: store.MissStats) -> list[str]:
    return [f"{getattr(row, name):,}" for name in _MISS_NUMBERS]


def _total_object(report: Report) -> dict[str, Any] | None:
    """The sums of all jobs, and the share of the missing tokens whose cause is known; null where none is missing."""
    totals = report.miss_totals
    if totals is None:
        return None
    unknown = sum(row.short_tokens for row in report.misses if row.cause is MissCause.UNKNOWN)
    share = 1 - unknown / totals.short_tokens if totals.short_tokens else None
    return {**{name: getattr(totals, name) for name in _MISS_NUMBERS}, "explained_share": share}


def notes(report: Report) -> list[str]:
    """What a reader must know before trusting the tables."""
    said = []
    for alarm in Mismatch:
        alarmed = sorted({row.name for row in report.instances if row.alarm is alarm})
        if alarmed:
            said.append(f"KEY MISMATCH on {', '.join(alarmed)}: {ADVICE[alarm]}.")
    earlier = sorted({row.name for row in report.instances if row.key_mismatch and row.alarm is None})
    if earlier:
        said.append(
            f"KEY MISMATCH on {', '.join(earlier)} in a boot that counts here: predictions for it were wrong. "
            "Its log says what was."
        )
    simulated = sorted({row.name for row in report.instances if row.is_simulated})
    if simulated:
        said.append(f"Simulated, computed by no model: {', '.join(simulated)}.")
    used = {row.model for row in report.instances} | {name for row in report.batches for name in row.models}
    by_bytes = sorted(used & report.byte_key_models)
    if by_bytes:
        said.append(f"No tokenizer for {', '.join(by_bytes)}: keys are made of bytes, predictions are estimates.")
    unknown = sum(row.tokens.unknown_jobs for row in report.instances)
    if unknown:
        said.append(f"{unknown:,} answered jobs do not say their cached tokens; they are in no token sum.")
    return said


def percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.1%}"


_TOKEN_HEADS = ["jobs", "unknown", "prompt", "cached", "predicted", "hit rate"]


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(names[0], no_wrap=True, overflow="ignore")  # a cut id is no id
    for name in names[1:]:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _token_cells(sums: store.TokenSums) -> list[str]:
    numbers = (sums.jobs, sums.unknown_jobs, sums.prompt_tokens, sums.cached_tokens, sums.predicted_cached_tokens)
    return [*(f"{number:,}" for number in numbers), percent(sums.hit_rate)]


def _sum(parts: Sequence[store.TokenSums]) -> store.TokenSums:
    names = [spec.name for spec in dataclasses.fields(store.TokenSums)]
    return store.TokenSums(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _flat(row: store.InstanceStats | store.GroupStats | store.BatchStats) -> dict[str, Any]:
    record = dataclasses.asdict(row)
    sums = record.pop("tokens")
    answered = {"results": sums.pop("jobs")}
    return {**record, **answered, **sums, "hit_rate": row.tokens.hit_rate}
