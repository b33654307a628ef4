"""The commands that come with the server: up, demo, keys, webhooks, plan, stats, doctor, migrate, servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from service.cli_doctor import doctor
from service.cli_keys import keys
from service.cli_plan import plan
from service.cli_stats import stats
from service.cli_tenants import tenants
from service.cli_webhooks import webhooks
from service.connections import find_connections
from service.logs import set_up_logging
from service.settings import Settings, read_settings

StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="FOLDER", help="The state folder, in place of TRUNKLINE_STATE."),
]


def register(app: typer.Typer) -> None:
    """Called by trunkline/cli with its app."""
    app.command("up")(up)
    app.command("demo")(demo)
    app.command("plan")(plan)
    app.command("stats")(stats)
    app.command("doctor")(doctor)
    app.command("migrate")(migrate)
    app.command("servers")(servers)
    app.add_typer(keys, name="keys")
    app.add_typer(tenants, name="tenants")
    app.add_typer(webhooks, name="webhooks")


def up(state: StateOption = None) -> None:
    """Run everything on this machine until Ctrl-C: embedded servers where no URL is set, API, engines, Flower."""
    from service.up import run_up

    run_up(_settings(state))


def demo(
    state: StateOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Go on running afterwards, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers as one JSON object on stdout.")] = False,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="JSONL", help="Another input file for the model smollm2.")
    ] = None,
) -> None:
    """Two real engines on this machine's CPU answer examples/support.jsonl; ends with the table that proves it."""
    from service.demo import run_demo

    run_demo(_settings(state), keep=keep, as_json=as_json, file=file)


def migrate() -> None:
    """Bring the database schema to this version."""
    from service.migrate import upgrade

    upgrade(find_connections(_settings(None)).database_url)


def servers(state: StateOption = None) -> None:
    """Run only the embedded Postgres and Valkey, migrated, until Ctrl-C."""
    from service.servers import run_servers

    run_servers(_settings(state))


def _settings(state: Path | None) -> Settings:
    settings = read_settings()
    if state is not None:
        settings = replace(settings, state_folder=state.expanduser().absolute())
    set_up_logging(settings)
    return settings
