"""Webhooks: a tenant's receiver and secret, and the events, each written with its task in the transaction of an end.

An event is open until it is delivered or given up. Its task is control work like any other; the row here holds what a
person wants to know: how often it was tried, and what came of it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from service.core.ids import EVENT_PREFIX, RANDOM_BYTES, make_id
from service.core.model import BatchStatus, Outcome, TaskKind, TaskState
from service.core.webhook import SECRET_BYTES, batch_event, job_event
from service.store import control
from service.store.clock import now_ms
from service.store.control_tables import control_task, webhook_event
from service.store.tables import batch, tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """Where a tenant is told of its batches, and what its webhooks are signed with; None where there is none yet."""

    url: str | None
    secret: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A single job that wants a webhook, in the transaction that ends it."""

    tenant_id: int
    public_id: str
    url: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """An open event and what a try needs; times are the database's, in Unix seconds."""

    id: str
    tenant_id: int
    type: str
    subject: str
    url: str
    tries: int  # that ended so far
    created_at: int
    sent_at: int  # of this try
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What may be shown of an event."""

    id: str
    type: str
    subject: str
    url: str
    tries: int
    last_error: str | None
    created_at: datetime
    delivered_at: datetime | None
    given_up_at: datetime | None

    @property
    def state(self) -> str:
        """pending (waits for its next try, too), delivered or given_up."""
        if self.delivered_at is not None:
            return "delivered"
        return "pending" if self.given_up_at is None else "given_up"


# Events: written where something ends


def announce_batch(conn: sa.Connection, batch_id: str, status: BatchStatus) -> None:
    """The event of a batch that has just ended, where its tenant has a receiver."""
    receiver = conn.execute(
        sa.select(tenant.c.id, tenant.c.webhook_url)
        .join(batch, batch.c.tenant_id == tenant.c.id)
        .where(batch.c.id == batch_id, tenant.c.webhook_url.is_not(None))
    ).first()
    if receiver is not None:
        _add(conn, [_row(now_ms(conn), receiver.id, batch_event(status), batch_id, receiver.webhook_url)])


def announce_jobs(conn: sa.Connection, ended: Sequence[EndedJob]) -> None:
    """The events of single jobs whose results were just recorded."""
    if ended:
        at = now_ms(conn)
        _add(conn, [_row(at, item.tenant_id, job_event(item.outcome), item.public_id, item.url) for item in ended])


def add_test_event(conn: sa.Connection, tenant_id: int, event_type: str, url: str) -> str:
    """An event without a task: whoever adds it sends it, once. Returns its id, which is also its subject."""
    row = _row(now_ms(conn), tenant_id, event_type, "", url)
    conn.execute(sa.insert(webhook_event).values({**row, "subject": row["id"]}))
    return str(row["id"])


def _row(unix_ms: int, tenant_id: int, event_type: str, subject: str, url: str) -> dict[str, object]:
    event_id = make_id(EVENT_PREFIX, unix_ms, os.urandom(RANDOM_BYTES))
    return {"id": event_id, "tenant_id": tenant_id, "type": event_type, "subject": subject, "url": url}


def _add(conn: sa.Connection, rows: list[dict[str, object]]) -> None:
    conn.execute(sa.insert(webhook_event), rows)
    # Their ids are new, so there is no open task to run into. The sweeper publishes them after the commit.
    tasks = [{"kind": TaskKind.WEBHOOK, "subject": row["id"], "state": TaskState.READY} for row in rows]
    conn.execute(sa.insert(control_task), tasks)


# Events: delivery


def open_event(conn: sa.Connection, event_id: str) -> Sending | None:
    """The event as it is to be sent now; None where it is delivered, given up or gone. Makes the secret if need be."""
    row = conn.execute(
        sa.select(
            webhook_event.c.id,
            webhook_event.c.tenant_id,
            webhook_event.c.type,
            webhook_event.c.subject,
            webhook_event.c.url,
            webhook_event.c.tries,
            _unix(webhook_event.c.created_at).label("created_at"),
            _unix(sa.func.clock_timestamp()).label("sent_at"),
        ).where(webhook_event.c.id == event_id, *_OPEN)
    ).first()
    if row is None:
        return None
    return Sending(**row._mapping, secret=ensure_secret(conn, row.tenant_id))


def record_try(conn: sa.Connection, event_id: str, error: str | None, *, is_last: bool) -> None:
    """How a try ended: delivered where `error` is None, given up where it was the last."""
    values: dict[str, object] = {"last_error": error, "tries": webhook_event.c.tries + 1}
    if error is None:
        values["delivered_at"] = sa.func.now()
    elif is_last:
        values["given_up_at"] = sa.func.now()
    conn.execute(sa.update(webhook_event).where(webhook_event.c.id == event_id, *_OPEN).values(values))


def give_up(conn: sa.Connection, event_id: str, error: str) -> None:
    """Its task died: nobody tries any more."""
    values = {"given_up_at": sa.func.now(), "last_error": error}
    conn.execute(sa.update(webhook_event).where(webhook_event.c.id == event_id, *_OPEN).values(values))


def due_webhooks(conn: sa.Connection, older_than_seconds: float, per_tenant: int = 100, limit: int = 400) -> list[int]:
    """Ids of tasks of events whose hint is due, the longest due first and not more than `per_tenant` of one tenant.

    A tenant whose receiver hangs may have any number of open events: they must not stand before those of the others.
    """
    due = (
        sa.select(
            control_task.c.id,
            control_task.c.not_before,
            sa.func.row_number()
            .over(partition_by=webhook_event.c.tenant_id, order_by=(control_task.c.not_before, control_task.c.id))
            .label("place"),
        )
        .join(webhook_event, webhook_event.c.id == control_task.c.subject)
        .where(control_task.c.kind == TaskKind.WEBHOOK, control.hint_is_due(older_than_seconds))
        .subquery()
    )
    statement = sa.select(due.c.id).where(due.c.place <= per_tenant).order_by(due.c.not_before, due.c.id).limit(limit)
    return list(conn.scalars(statement))


def _unix(at: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.cast(sa.func.floor(sa.extract("epoch", at)), sa.BigInteger)


_OPEN = (webhook_event.c.delivered_at.is_(None), webhook_event.c.given_up_at.is_(None))


# What a tenant says of its webhooks


def get_receiver(conn: sa.Connection, tenant_id: int) -> Receiver:
    row = conn.execute(
        sa.select(tenant.c.webhook_url.label("url"), tenant.c.webhook_secret.label("secret")).where(
            tenant.c.id == tenant_id
        )
    ).one()
    return Receiver(**row._mapping)


def ensure_secret(conn: sa.Connection, tenant_id: int) -> bytes:
    """The tenant's secret, made where there is none."""
    found = get_receiver(conn, tenant_id).secret
    if found is not None:
        return found
    fresh = sa.func.coalesce(tenant.c.webhook_secret, secrets.token_bytes(SECRET_BYTES))
    statement = sa.update(tenant).where(tenant.c.id == tenant_id).values(webhook_secret=fresh)
    return bytes(conn.execute(statement.returning(tenant.c.webhook_secret)).scalar_one())


def rotate_secret(conn: sa.Connection, tenant_id: int) -> bytes:
    """A new secret, which signs every try from now on."""
    fresh = secrets.token_bytes(SECRET_BYTES)
    conn.execute(sa.update(tenant).where(tenant.c.id == tenant_id).values(webhook_secret=fresh))
    return fresh


def set_url(conn: sa.Connection, tenant_id: int, url: str) -> None:
    """From now on the tenant is told of its batches there; of those, too, whose event waits to be sent."""
    conn.execute(sa.update(tenant).where(tenant.c.id == tenant_id).values(webhook_url=url))
    conn.execute(_open_batch_events(tenant_id).values(url=url))


def remove_url(conn: sa.Connection, tenant_id: int) -> int:
    """Nobody is told any more, of single jobs excepted. Returns how many events that waited are given up."""
    conn.execute(sa.update(tenant).where(tenant.c.id == tenant_id).values(webhook_url=None))
    given_up = _open_batch_events(tenant_id).values(given_up_at=sa.func.now(), last_error="removed")
    return conn.execute(given_up).rowcount


def list_events(conn: sa.Connection, tenant_id: int, limit: int) -> list[Event]:
    """The newest first."""
    columns = (webhook_event.c[name] for name in Event.__dataclass_fields__)
    rows = conn.execute(
        sa.select(*columns)
        .where(webhook_event.c.tenant_id == tenant_id)
        .order_by(webhook_event.c.id.desc())
        .limit(limit)
    )
    return [Event(**row._mapping) for row in rows]


def _open_batch_events(tenant_id: int) -> sa.Update:
    is_of_batch = webhook_event.c.type.like("batch.%")
    return sa.update(webhook_event).where(webhook_event.c.tenant_id == tenant_id, is_of_batch, *_OPEN)
