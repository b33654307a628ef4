"""The tables of control work: tasks, keys of repeated creates, webhooks. Beside `tables`, in the same metadata."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    func,
    text,
)

from service.store.tables import at, id_column, metadata

__all__ = ["control_task", "idempotency_key", "metadata", "webhook_event"]

control_task = Table(
    "control_task",
    metadata,
    id_column(),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),  # the fencing number
    Column("failures", SmallInteger, nullable=False, server_default="0"),  # errors and lost leases; not re-schedulings
    Column("last_error", Text),
    at("created_at", default_now=True),
    Column("not_before", DateTime(timezone=True), nullable=False, server_default=func.now()),
    at("published_at"),
    at("lease_expires_at"),
    at("finished_at"),
    Index(
        "uq_control_task_open",
        "kind",
        "subject",
        unique=True,
        postgresql_where=text("state in ('ready', 'running')"),
    ),
    Index("ix_control_task_open", "state", "id", postgresql_where=text("state in ('ready', 'running')")),
)

idempotency_key = Table(
    "idempotency_key",
    metadata,
    Column("tenant_id", BigInteger, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),  # of the canonical parsed body and the path
    Column("created_id", Text, nullable=False),  # the batch or job that the first call made
    at("created_at", default_now=True),
)

webhook_event = Table(
    "webhook_event",
    metadata,
    Column("id", Text, primary_key=True),  # "evt_" + time-sortable hex; the same on every try
    Column("tenant_id", ForeignKey("tenant.id"), nullable=False),
    Column("type", Text, nullable=False),  # batch.completed, job.failed ...
    Column("subject", Text, nullable=False),  # the batch's or job's public id
    Column("url", Text, nullable=False),
    Column("tries", SmallInteger, nullable=False, server_default="0"),
    Column("last_error", Text),
    at("created_at", default_now=True),
    at("delivered_at"),
    at("given_up_at"),
    Index("ix_webhook_event_tenant_id_id", "tenant_id", "id"),
)
