"""`trunkline tenants`: each tenant's weight, its quotas, and what is queued of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import sqlalchemy as sa
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from service.connections import find_connections
from service.errors import SettingError
from service.migrate import check_schema
from service.settings import Settings, read_settings
from service.store import quotas
from service.store.quotas import TenantQuota
from service.store.session import Database

DEFAULT = "default"  # said for a quota: as the settings have it

tenants = typer.Typer(no_args_is_help=True, help="List tenants; set their weights and quotas.")


@tenants.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a tenant.")] = False,
) -> None:
    """Every tenant: weight, quotas and what is queued now."""
    with _transaction() as (conn, settings):
        found = quotas.list_tenants(conn, quotas.default_quota(settings))
    if as_json:
        for item in found:
            typer.echo(json.dumps(dataclasses.asdict(item)))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tenant", "weight", "queued lines", "at most", "queued tokens", "at most"):
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for item in found:
        table.add_row(*_cells(item))
    Console().print(table)


@tenants.command("set")
def set_(
    tenant: Annotated[str, typer.Argument(help="Its name.")],
    weight: Annotated[int | None, typer.Option(min=1, help="Its share of the instances, beside the others'.")] = None,
    max_lines: Annotated[
        str | None, typer.Option(metavar="N", help="Unfinished lines it may have; 'default': as the settings say.")
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="The same for the prompt tokens of those lines.")
    ] = None,
) -> None:
    """Change what is named; it counts from the next create on."""
    values: dict[str, int | None] = {} if weight is None else {"weight": weight}
    for column, name, said in (
        ("max_queued_lines", "--max-lines", max_lines),
        ("max_queued_tokens", "--max-tokens", max_tokens),
    ):
        if said is not None:
            values[column] = _number(name, said)
    if not values:
        raise SettingError("Say what to set: --weight, --max-lines or --max-tokens.")
    with _transaction() as (conn, _):
        if not quotas.set_tenant(conn, tenant, values):
            raise SettingError(f"There is no tenant {tenant!r}; see `trunkline tenants list`.")


def _number(name: str, said: str) -> int | None:
    if said == DEFAULT:
        return None
    if not (said.isascii() and said.isdigit() and len(said) <= 18):
        raise SettingError(f"{name} {said!r}: a whole number or 'default' was expected.")
    return int(said)


def _cells(item: TenantQuota) -> tuple[str, ...]:
    lines, tokens = (
        f"{most:,}{'' if is_own else ' (default)'}"
        for most, is_own in ((item.max_lines, item.has_own_lines), (item.max_tokens, item.has_own_tokens))
    )
    return item.name, str(item.weight), f"{item.lines:,}", lines, f"{item.tokens:,}", tokens


@contextmanager
def _transaction() -> Iterator[tuple[sa.Connection, Settings]]:
    settings = read_settings()
    database = Database(find_connections(settings).database_url, pool_size=1, application_name="trunkline tenants")
    try:
        database.check()
        check_schema(database)
        with database.transaction() as conn:
            yield conn, settings
    finally:
        database.close()
