"""What the commands print for people: tables on standard output, progress and notes on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trunkline.wire import Batch, Job, Wire

_SHOWN_ERRORS = 20


def note(text: str) -> None:
    """A remark for a person: never on standard output, which may be a pipe."""
    typer.echo(text, err=True)


def print_json(value: Wire | Iterable[Wire]) -> None:
    """One object as it came, or one a line for a list."""
    for item in [value] if isinstance(value, Wire) else value:
        typer.echo(json.dumps(item.as_dict()))


def percent(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.1%}"


def print_batch(batch: Batch) -> None:
    """One batch, a line for each fact that is there."""
    counts, queue, usage = batch.request_counts, batch.queue, batch.usage
    ended = [f"{counts.completed:,} completed", f"{counts.failed:,} failed"]
    ended += [f"{n:,} {word}" for n, word in ((queue.cancelled, "cancelled"), (queue.expired, "expired")) if n]
    facts = {
        "batch": batch.id,
        "status": f"{batch.status}, paused" if queue.paused else batch.status,
        "model": batch.model or "mixed or not known yet",
        "lines": f"{counts.total:,}: {', '.join(ended)}",
        "created": moment(batch.created_at),
        "expires": moment(batch.expires_at),
        "prefix groups": f"{queue.prefix_groups:,}" if queue.prefix_groups is not None else None,
        "tokens": f"{usage.input_tokens:,} in, {usage.output_tokens:,} out" if usage else None,
        "token hit rate": _hit_rate(batch),
        "time left": f"about {queue.eta_seconds:,.0f} s" if queue.eta_seconds is not None else None,
        "output file": batch.output_file_id,
        "error file": batch.error_file_id,
    }
    _print_facts(facts)
    for error in batch.line_errors[:_SHOWN_ERRORS]:
        typer.echo(f"  {printable(str(error))}")
    if len(batch.line_errors) > _SHOWN_ERRORS:
        typer.echo(f"  and {len(batch.line_errors) - _SHOWN_ERRORS} more; --json has them all")


def print_batches(rows: Iterable[Batch]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("batch", no_wrap=True, overflow="ignore")  # a cut id is no id
    for name in ("status", "lines", "hit rate", "created"):
        table.add_column(name, overflow="fold")
    for row in rows:
        lines = f"{row.lines_ended:,}/{row.request_counts.total:,}"
        cells = (row.id, row.status, lines, percent(row.queue.cache.hit_rate), moment(row.created_at))
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)


def print_job(job: Job) -> None:
    """One job, and its answer or its error."""
    tokens = None
    if job.usage:
        cached = "unknown" if job.cache.cached_tokens is None else f"{job.cache.cached_tokens:,}"
        tokens = f"{job.usage.prompt_tokens or 0:,} in ({cached} cached), {job.usage.completion_tokens or 0:,} out"
    facts = {
        "job": job.id,
        "status": job.status,
        "model": job.model,
        "instance": job.instance,
        "tokens": tokens,
        "error": job.failure.message if job.failure else None,
        "answer": job.text,
    }
    _print_facts(facts)


def moment(unix_seconds: int | None) -> str:
    """In the reader's own time zone."""
    if unix_seconds is None:
        return ""
    return datetime.fromtimestamp(unix_seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def batch_progress() -> Iterator[Callable[[Batch], None]]:
    """A progress bar on standard error; the value is called with every state of the batch."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TimeElapsedColumn(),
        TextColumn("hit rate {task.fields[hit_rate]}{task.fields[left]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("submitted", total=None, hit_rate="unknown", left="")

        def update(batch: Batch) -> None:
            left = batch.queue.eta_seconds
            progress.update(
                task,
                description=batch.status,
                total=batch.request_counts.total or None,
                completed=batch.lines_ended,
                hit_rate=percent(batch.queue.cache.hit_rate),
                left="" if left is None else f", {left:,.0f} s left",
            )

        yield update


def summary(batch: Batch) -> str:
    """One sentence on how a batch ended."""
    counts = batch.request_counts
    lines = f"{counts.completed:,} of {counts.total:,} lines succeeded"
    return f"Batch {batch.id} is {batch.status}: {lines}, token hit rate {percent(batch.queue.cache.hit_rate)}."


def _hit_rate(batch: Batch) -> str | None:
    cache = batch.queue.cache
    if cache.hit_rate is None:
        return None
    measured = f"{percent(cache.hit_rate)} ({cache.cached_tokens or 0:,} of {cache.prompt_tokens or 0:,} prompt tokens"
    predicted = f", {cache.predicted_cached_tokens:,} predicted" if cache.predicted_cached_tokens is not None else ""
    unknown = f", {cache.lines_unknown:,} lines unknown" if cache.lines_unknown else ""
    return f"{measured}{predicted}{unknown})"


def _print_facts(facts: dict[str, str | None]) -> None:
    width = max(len(name) for name, value in facts.items() if value)
    for name, value in facts.items():
        if value:
            typer.echo(f"{name.ljust(width)}  {printable(value)}")


def printable(text: str) -> str:
    """Text from a model or a file, without what would steer the terminal or cannot be encoded."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
