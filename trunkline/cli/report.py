"""The command report: what became of a batch's lines, what the caches did, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.cli.batches import AsJson, BatchId, Url
from trunkline.cli.show import moment, percent, print_json, printable
from trunkline.client import Client
from trunkline.wire_reports import Report

_SHOWN_CHARACTERS = 160  # of an error message; --json has it whole


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(name=report.__name__)(report)


def report(batch: BatchId, url: Url = None, as_json: AsJson = False) -> None:
    """Report on a batch, running or ended: cache, instances, the slowest lines, the commonest errors."""
    with Client(url) as client:
        found = client.report(batch)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    for part in _parts(found):
        console.print(part)


def _parts(found: Report) -> list[Table]:
    """What is printed, in order; a table without rows is left out."""
    misses = [
        (cause, f"{miss.jobs:,}", f"{miss.prompt_tokens:,}", f"{miss.computed_tokens:,}", f"{miss.short_tokens:,}")
        for cause, miss in sorted(found.misses.items(), key=lambda item: -item[1].computed_tokens)
    ]
    runs = [
        (run.name, f"{run.jobs:,}", f"{run.prompt_tokens:,}", percent(run.hit_rate), f"{run.run_seconds:,.1f}")
        for run in found.per_instance
    ]
    slowest = [
        (f"{row.line:,}", f"{row.run_ms / 1000:,.1f}", row.instance or "", row.custom_id) for row in found.slowest
    ]
    errors = [(f"{error.count:,}", error.code or "", error.message[:_SHOWN_CHARACTERS]) for error in found.top_errors]
    tables = [
        _table("Misses by cause", ["cause"], ["jobs", "prompt", "computed", "missing"], misses),
        _table("Instances", ["instance"], ["jobs", "prompt tokens", "hit rate", "run seconds"], runs),
        _table("Slowest lines", [], ["line", "seconds", "instance", "custom_id"], slowest),
        _table("Errors", [], ["lines", "code", "message"], errors),
    ]
    return [_facts(found), *(table for table in tables if table.row_count)]


def _facts(found: Report) -> Table:
    lines, tokens = found.lines, found.tokens
    ended = [f"{lines.completed:,} completed", f"{lines.failed:,} failed"]
    if lines.skipped:
        ended[-1] += f" ({lines.skipped:,} of them skipped)"
    others = (("cancelled", lines.cancelled), ("expired", lines.expired), ("unfinished", lines.unfinished))
    ended += [f"{count:,} {word}" for word, count in others if count]
    facts = {
        "lines": f"{lines.total:,}: {', '.join(ended)}",
        "started, finished": f"{moment(found.started_at) or 'not yet'}, {moment(found.finished_at) or 'not yet'}",
        "tokens": f"{tokens.get('prompt_tokens', 0):,} in, {tokens.get('completion_tokens', 0):,} out",
        "token hit rate": f"{percent(found.hit_rate)}, at most {percent(found.bound)}",
    }
    sheet = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        sheet.add_row(Text(name), Text(value, overflow="fold"))
    return sheet


def _table(title: str, names: list[str], numbers: list[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        is_text = name in ("instance", "custom_id", "code", "message")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
