"""`trunkline keys`: API keys of tenants. With no key at all, the API serves loopback without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import sqlalchemy as sa
import typer
from rich.console import Console
from rich.table import Table

from service.connections import find_connections
from service.errors import SettingError
from service.settings import read_settings
from service.store import tenants
from service.store.session import Database

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="Who the key belongs to; made when new.")] = tenants.DEFAULT_TENANT,
    label: Annotated[str, typer.Option("--label", help="What the list shows for it.")] = "",
) -> None:
    """Print a new key. It is shown this once: only its hash is kept."""
    with _transaction() as conn:
        is_first = not tenants.has_keys(conn)
        key = tenants.create_key(conn, tenant, label)
    typer.echo(key)
    if is_first:
        typer.echo("From now on every request needs a key.", err=True)


@keys.command("list")
def list_() -> None:
    """Every key, without the key itself."""
    with _transaction() as conn:
        found = tenants.list_keys(conn)
    table = Table("id", "tenant", "label", "created", "revoked")
    for key in found:
        revoked = f"{key.revoked_at:%Y-%m-%d %H:%M}" if key.revoked_at else ""
        table.add_row(str(key.id), key.tenant, key.label, f"{key.created_at:%Y-%m-%d %H:%M}", revoked)
    Console().print(table)


@keys.command("revoke")
def revoke(key_id: Annotated[int, typer.Argument(metavar="ID", help="The number that the list shows.")]) -> None:
    """From now on this key opens nothing."""
    with _transaction() as conn:
        if not tenants.revoke_key(conn, key_id):
            raise SettingError(f"There is no unrevoked key {key_id}; see `trunkline keys list`.")


@contextmanager
def _transaction() -> Iterator[sa.Connection]:
    database = Database(find_connections(read_settings()).database_url, pool_size=1, application_name="trunkline keys")
    try:
        database.check()
        with database.transaction() as conn:
            yield conn
    finally:
        database.close()
