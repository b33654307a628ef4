"""Commands that act on a batch that is there: pause, resume, priority, window, retry, requests, delete."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.cli.batches import AsJson, BatchId, BatchPriority, Url
from trunkline.cli.show import print_json
from trunkline.client import Client
from trunkline.wire import Batch
from trunkline.wire_lines import BatchLine


class LineStatus(StrEnum):
    """Where a line may stand."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    for command in (pause, resume, priority, window, retry, requests, delete):
        app.command(name=command.__name__)(command)


def pause(batch: BatchId, url: Url = None, as_json: AsJson = False) -> None:
    """Hold a batch: what is out at an engine finishes, nothing more goes out. Its deadline still counts."""
    with Client(url) as client:
        found = client.update_batch(batch, paused=True)
    _show(found, f"Batch {found.id} is paused.", as_json)


def resume(batch: BatchId, url: Url = None, as_json: AsJson = False) -> None:
    """Go on with a batch that was paused."""
    with Client(url) as client:
        found = client.update_batch(batch, paused=False)
    _show(found, f"Batch {found.id} goes on.", as_json)


def priority(
    batch: BatchId,
    value: Annotated[BatchPriority, typer.Argument(metavar="CLASS", help="low, normal or high.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Change the class of a batch that has not ended."""
    with Client(url) as client:
        found = client.update_batch(batch, priority=value.value)
    _show(found, f"Batch {found.id} has priority {found.queue.priority}.", as_json)


def window(
    batch: BatchId,
    value: Annotated[str, typer.Argument(metavar="TIME", help="From its creation: 30m, 12h, 24h, 3d.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Change the time that a batch has, counted from its creation."""
    with Client(url) as client:
        found = client.update_batch(batch, completion_window=value)
    _show(found, f"Batch {found.id} has {found.completion_window} from its creation.", as_json)


def retry(batch: BatchId, url: Url = None, as_json: AsJson = False) -> None:
    """Make a new batch of the failed, cancelled and expired lines of one that has ended; prints its id."""
    with Client(url) as client:
        made = client.retry(batch)
    _show(made, made.id, as_json)


def requests(
    batch: BatchId,
    status: Annotated[LineStatus | None, typer.Option(help="Only lines that stand so.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, by line number.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the lines of a batch: where each stands, where it ran, what its cache gave."""
    with Client(url) as client:
        found = list(client.requests(batch, status=None if status is None else status.value, limit=limit))
    print_json(found) if as_json else _print_lines(found)


def delete(batch: BatchId, url: Url = None) -> None:
    """Delete a batch that has ended, with its results; its files stay until they are deleted."""
    with Client(url) as client:
        client.delete_batch(batch)
    typer.echo(f"Batch {batch} is deleted.")


def _show(batch: Batch, sentence: str, as_json: bool) -> None:
    print_json(batch) if as_json else typer.echo(sentence)


def _print_lines(found: list[BatchLine]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("line", "custom_id", "status", "tries", "instance", "prompt", "cached", "predicted", "miss", "run ms"):
        table.add_column(name, overflow="fold")
    for line in found:
        cells = (
            line.line, line.custom_id, line.status, line.attempts, line.instance, line.prompt_tokens,
            line.cached_tokens, line.predicted_cached_tokens, line.miss_cause, line.run_ms,
        )  # fmt: skip
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    Console().print(table)
