"""`trunkline webhooks`: where a tenant is told that its batches ended, the secret, and what became of each event."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import sqlalchemy as sa
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from service.connections import find_connections
from service.core.webhook import TEST_EVENT, URL_RULE, parse_url, secret_text
from service.courier import Answer, Courier
from service.errors import SettingError, WebhookFailed
from service.settings import Settings, read_settings
from service.store import tenants
from service.store import webhooks as store
from service.store.session import Database
from service.store.tenants import Tenant
from service.store.webhooks import Event
from service.webhooks import send

webhooks = typer.Typer(no_args_is_help=True, help="Tell a server of yours when batches and jobs end.")

TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose webhooks.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@webhooks.command("set")
def set_(
    url: Annotated[str, typer.Argument(metavar="URL", help="Gets a POST whenever a batch of the tenant ends.")],
    tenant: TenantOption = tenants.DEFAULT_TENANT,
) -> None:
    """Print the secret that the receiver verifies with. It stays the same until `rotate`."""
    if parse_url(url) is None:
        raise SettingError(f"A webhook's address is {URL_RULE}.")
    with _opened() as (_, database), database.transaction() as conn:
        owner = _tenant(conn, tenant)
        store.set_url(conn, owner.id, url)
        secret = store.ensure_secret(conn, owner.id)
    typer.echo(secret_text(secret))


@webhooks.command("show")
def show(tenant: TenantOption = tenants.DEFAULT_TENANT, as_json: JsonOption = False) -> None:
    """Address and secret."""
    with _opened() as (_, database), database.transaction() as conn:
        receiver = store.get_receiver(conn, _tenant(conn, tenant).id)
    secret = None if receiver.secret is None else secret_text(receiver.secret)
    if as_json:
        typer.echo(json.dumps({"tenant": tenant, "url": receiver.url, "secret": secret}))
        return
    typer.echo(f"url: {receiver.url or 'none; only jobs that name one of their own have a webhook'}")
    typer.echo(f"secret: {secret or 'none yet; `trunkline webhooks rotate` makes one'}")


@webhooks.command("rotate")
def rotate(tenant: TenantOption = tenants.DEFAULT_TENANT) -> None:
    """Print a new secret. Everything that is sent from now on is signed with it, and the old one is of no use."""
    with _opened() as (_, database), database.transaction() as conn:
        secret = store.rotate_secret(conn, _tenant(conn, tenant).id)
    typer.echo(secret_text(secret))


@webhooks.command("remove")
def remove(tenant: TenantOption = tenants.DEFAULT_TENANT) -> None:
    """Nobody is told of batches any more; events that wait are given up. Jobs with a webhook of their own keep it."""
    with _opened() as (_, database), database.transaction() as conn:
        given_up = store.remove_url(conn, _tenant(conn, tenant).id)
    if given_up:
        typer.echo(f"{given_up} events that were not delivered yet are given up.", err=True)


@webhooks.command("test")
def try_(tenant: TenantOption = tenants.DEFAULT_TENANT, as_json: JsonOption = False) -> None:
    """Send one event of the type webhook.test now, from this machine; exit status 1 when it is not delivered."""
    with _opened() as (settings, database):
        event_id, answer = _send_test(settings, database, tenant)
    said = {"id": event_id, "status_code": answer.status_code, "error": answer.error}
    typer.echo(json.dumps(said) if as_json else f"{event_id}: {answer.error or answer.status_code}")
    if answer.error is not None:
        raise WebhookFailed(f"({answer.error})")


def _send_test(settings: Settings, database: Database, tenant: str) -> tuple[str, Answer]:
    with database.transaction() as conn:
        owner = _tenant(conn, tenant)
        url = store.get_receiver(conn, owner.id).url
        if url is None:
            raise SettingError(f"The tenant {tenant} has no webhook; see `trunkline webhooks set`.")
        event_id = store.add_test_event(conn, owner.id, TEST_EVENT, url)
        sending = store.open_event(conn, event_id)
    assert sending is not None
    answer = send(settings, Courier(), sending)
    database.run(lambda conn: store.record_try(conn, event_id, answer.error, is_last=True))
    return event_id, answer


@webhooks.command("list")
def list_(
    tenant: TenantOption = tenants.DEFAULT_TENANT,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many, the newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Recent events: what they are about, how often they were tried, and what came of it."""
    with _opened() as (_, database), database.transaction() as conn:
        events = store.list_events(conn, _tenant(conn, tenant).id, limit)
    if as_json:
        typer.echo(json.dumps({"tenant": tenant, "events": [_record(event) for event in events]}))
        return
    table = Table("event", "type", "of", "host", "tries", "state", "last error", box=box.SIMPLE_HEAD, pad_edge=False)
    for event in events:
        cells = (event.id, event.type, event.subject, _host(event.url), str(event.tries), event.state)
        table.add_row(*cells, event.last_error or "")
    Console().print(table)


def _record(event: Event) -> dict[str, Any]:
    """The event as JSON: its host only, since the rest of the URL may hold somebody's key."""
    record = dataclasses.asdict(event)
    record["host"] = _host(record.pop("url"))
    for name in ("created_at", "delivered_at", "given_up_at"):
        record[name] = None if record[name] is None else int(record[name].timestamp())
    return {**record, "state": event.state}


def _host(url: str) -> str:
    target = parse_url(url)
    return target.host if target else ""


def _tenant(conn: sa.Connection, name: str) -> Tenant:
    """Only the default one is made here: a tenant that nobody has a key of is a slip of the pen."""
    if name == tenants.DEFAULT_TENANT:
        return tenants.ensure_tenant(conn, name)
    found = tenants.find_tenant(conn, name)
    if found is None:
        raise SettingError(f"There is no tenant {name}; `trunkline keys create {name}` makes one.")
    return found


@contextmanager
def _opened() -> Iterator[tuple[Settings, Database]]:
    settings = read_settings()
    database = Database(find_connections(settings).database_url, pool_size=1, application_name="trunkline webhooks")
    try:
        database.check()
        yield settings, database
    finally:
        database.close()
