"""`trunkline doctor`: the findings of service.doctor as lines or as one JSON object, and an exit status."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from service.doctor import Diagnosis, State, diagnose
from service.settings import read_settings

_MARKS = {State.FINE: "ok", State.NOTE: "note", State.PROBLEM: "PROBLEM"}
_WORDS = {0: "fine", 1: "findings", 2: "cannot_look"}


def doctor(
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FOLDER", help="The state folder, in place of TRUNKLINE_STATE.")
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Hold every ended batch against its files, not just the newest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Look at servers, schema, instances, keys, queues and accounts. Status 0: fine, 1: findings, 2: cannot look."""
    settings = read_settings()
    if state is not None:
        settings = replace(settings, state_folder=state.expanduser().absolute())
    found = diagnose(settings, is_all=is_all)
    if as_json:
        typer.echo(json.dumps(as_json_object(found)))
    else:
        console = Console()
        console.print(table(found), highlight=False)
        for finding in found.findings:
            if finding.state is State.PROBLEM and finding.advice:
                console.print(f"{finding.part}: {finding.advice}", highlight=False, markup=False)
    if found.exit_status:
        raise typer.Exit(found.exit_status)


def as_json_object(found: Diagnosis) -> dict[str, object]:
    """status is fine, findings or cannot_look."""
    return {
        "status": _WORDS[found.exit_status],
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def table(found: Diagnosis) -> Table:
    """A line for each finding."""
    lines = Table.grid(padding=(0, 2))
    for finding in found.findings:
        lines.add_row(_MARKS[finding.state], finding.part, finding.said)
    return lines
