"""Commands on single jobs: job submit, job get, job cancel."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trunkline._lines import CHAT
from trunkline.cli.batches import AsJson, Seconds, Url
from trunkline.cli.show import print_job, print_json
from trunkline.client import Client
from trunkline.errors import InputError

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The id of a job.")]


class JobPriority(StrEnum):
    """What a single job may ask for."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    INTERACTIVE = "interactive"


def register(app: typer.Typer) -> None:
    """Add the group `job` to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Submit and poll single requests.")
    for command in (submit, get, cancel):
        group.command(name=command.__name__)(command)
    app.add_typer(group, name="job")


def submit(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; or give --body.")] = None,
    body: Annotated[
        str | None, typer.Option(metavar="FILE", help="A JSON file with the whole body, or - for standard input.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Needed where the body names none.")] = None,
    endpoint: Annotated[str, typer.Option(metavar="PATH", help="The endpoint that the body is for.")] = CHAT,
    priority: Annotated[JobPriority | None, typer.Option(help="Default: the server's.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer and show it.")] = False,
    timeout: Seconds = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit one request; prints the job's id."""
    if (prompt is None) == (body is None):
        raise InputError("Give either a prompt or --body.")
    content = prompt if body is None else _read_body(body)
    with Client(url) as client:
        job = client.submit(content or "", endpoint=endpoint, model=model, priority=priority and priority.value)
        if wait:
            job = client.result(job, timeout)
    if as_json:
        print_json(job)
    elif wait:
        print_job(job)
    else:
        typer.echo(job.id)


def get(
    job: JobId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end.")] = False,
    timeout: Seconds = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show a job, with its answer once there is one."""
    with Client(url) as client:
        found = client.result(job, timeout) if wait else client.get_job(job)
    print_json(found) if as_json else print_job(found)


def cancel(job: JobId, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a job that has not ended."""
    with Client(url) as client:
        found = client.cancel_job(job)
    print_json(found) if as_json else typer.echo(f"Job {found.id} is {found.status}.")


def _read_body(name: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InputError(f"{name} is no JSON object.")
    return body
