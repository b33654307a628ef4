"""Commands on batches: submit, status, results, cancel, batches; and models, which a line must name one of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from trunkline._lines import CHAT, first_endpoint, open_input, rewindable
from trunkline.cli.show import batch_progress, note, print_batch, print_batches, print_json, summary
from trunkline.client import Client
from trunkline.errors import InputError
from trunkline.wire import Batch

NOT_ALL_SUCCEEDED = 3

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="The server, instead of TRUNKLINE_BASE_URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the object as the server sent it.")]
Seconds = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="Stop waiting after this long.")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The id of a batch.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the results here, instead of to the output."),
]


class BatchPriority(StrEnum):
    """What a batch may ask for."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    for command in (submit, status, results, cancel, batches, models):
        app.command(name=command.__name__)(command)


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSONL file of requests, or - for standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, then write the results.")] = False,
    output: Output = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="Default: the url of the first line, else chat completions.")
    ] = None,
    window: Annotated[str, typer.Option(metavar="TIME", help="Time to complete it in: 30m, 12h, 24h, 3d.")] = "24h",
    priority: Annotated[BatchPriority, typer.Option(help="Higher classes run first.")] = BatchPriority.NORMAL,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Run the valid lines, instead of failing on an invalid one.")
    ] = False,
    in_order: Annotated[bool, typer.Option("--in-order", help="Results in the order of the input.")] = False,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be repeated.")] = None,
    timeout: Seconds = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file and create a batch; prints its id.

    With --wait: waits, then writes the result lines to --output, or to standard output where that is a pipe or file.
    """
    if output is not None and not wait:
        raise InputError("--output needs --wait; `trunkline results` writes the results of a batch that has ended.")
    invalid, order = "skip" if skip_invalid else "fail", "input" if in_order else "any"
    with Client(url) as client:
        with _source(file) as stream:
            batch = client.batch(
                stream,
                endpoint=endpoint or first_endpoint(stream) or CHAT,
                completion_window=window,
                metadata=_pairs(metadata or []),
                queue={"priority": priority.value, "on_invalid_line": invalid, "order": order},
            )
        if not wait:
            print_json(batch) if as_json else typer.echo(batch.id)
            return
        note(f"Submitted {batch.id}.")
        ended = _wait(client, batch, timeout)
        _deliver(client, ended, output, as_json)


def status(
    batch: BatchId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end.")] = False,
    timeout: Seconds = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show where a batch stands."""
    with Client(url) as client:
        found = _wait(client, client.get_batch(batch), timeout) if wait else client.get_batch(batch)
    print_json(found) if as_json else print_batch(found)
    if wait:
        _exit_as(found)


def results(
    batch: BatchId,
    output: Output = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Of a running batch: wait for more until its end.")
    ] = False,
    url: Url = None,
) -> None:
    """Write the result lines of a batch, of a running one those that there are."""
    with Client(url) as client:
        written = _write_results(client, batch, output, follow=follow)
        found = client.get_batch(batch)
    if output is not None:
        note(f"Wrote {written:,} lines to {output}.")
    if not found.is_terminal:
        note(f"Batch {batch} is {found.status}: {found.lines_ended:,} of {found.request_counts.total:,} lines so far.")
        return
    _exit_as(found)


def cancel(batch: BatchId, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a batch; what has ended keeps its results."""
    with Client(url) as client:
        found = client.cancel(batch)
    print_json(found) if as_json else typer.echo(f"Batch {found.id} is {found.status}.")


def batches(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List batches."""
    with Client(url) as client:
        found = list(client.batches(limit))
    print_json(found) if as_json else print_batches(found)


def models(url: Url = None, as_json: AsJson = False) -> None:
    """List the names that a request may carry as its model."""
    with Client(url) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    for model in found:
        typer.echo(model.id)


def _wait(client: Client, batch: Batch, timeout: float | None) -> Batch:
    try:
        with batch_progress() as progress:
            return client.wait(batch, timeout=timeout, progress=progress)
    except KeyboardInterrupt:
        note(f"Stopped waiting; the batch goes on. See: trunkline status {batch.id}")
        raise


def _deliver(client: Client, ended: Batch, output: Path | None, as_json: bool) -> None:
    """After --wait: the results where they are wanted, a sentence for the person, the exit status for the script."""
    to_terminal = output is None and sys.stdout.isatty()
    if as_json:
        print_json(ended)
    if output is not None or not (to_terminal or as_json):
        _write_results(client, ended.id, output, follow=True)
    note(summary(ended))
    if output is not None:
        note(f"Results: {output}")
    elif to_terminal:
        note(f"Write the results with: trunkline results {ended.id} -o FILE")
    _exit_as(ended)


def _exit_as(batch: Batch) -> None:
    if batch.request_counts.completed != batch.request_counts.total or batch.status != "completed":
        raise typer.Exit(NOT_ALL_SUCCEEDED)


def _write_results(client: Client, batch_id: str, output: Path | None, *, follow: bool) -> int:
    """Result lines byte for byte as the server sent them; how many there were."""
    written = 0
    with _target(output) as target:
        for line in client.result_lines(batch_id, follow=follow):
            target.write(line + b"\n")
            written += 1
            if output is None and follow:
                target.flush()
    return written


@contextmanager
def _target(output: Path | None) -> Iterator[BinaryIO]:
    if output is None or str(output) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        file = output.open("wb")
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}.") from error
    with file:
        yield file


@contextmanager
def _source(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        with rewindable(sys.stdin.buffer) as stream:
            yield stream
        return
    with open_input(name) as (file, _):
        yield file


def _pairs(items: list[str]) -> dict[str, str] | None:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise InputError(f"--metadata {item}: KEY=VALUE was expected.")
        pairs[name] = value
    return pairs or None
