"""Tenants and their API keys. Only the SHA-256 of a key is kept."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from service.store.frozen import Frozen
from service.store.tables import api_key, tenant

DEFAULT_TENANT = "default"  # whose everything is while no key is configured
_SALT_BYTES = 16
_KEY_PREFIX = "tl-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who owns what. `salt` is secret: it keeps tenants apart in every engine's cache."""

    id: int
    name: str
    salt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What may be shown of a key."""

    id: int
    tenant: str
    label: str
    created_at: datetime
    revoked_at: datetime | None


_COLUMNS = (tenant.c.id, tenant.c.name, tenant.c.salt)
_OF_KEY = Frozen(
    sa.select(*_COLUMNS)
    .join(api_key, api_key.c.tenant_id == tenant.c.id)
    .where(api_key.c.hash == sa.bindparam("hash"), api_key.c.revoked_at.is_(None))
)
_KEYLESS = Frozen(sa.select(*_COLUMNS).where(tenant.c.name == DEFAULT_TENANT, ~sa.exists(sa.select(api_key.c.id))))


def ensure_tenant(conn: sa.Connection, name: str) -> Tenant:
    """The tenant of that name, made where there is none."""
    columns = (tenant.c.id, tenant.c.name, tenant.c.salt)
    row = conn.execute(sa.select(*columns).where(tenant.c.name == name)).first()
    if row is None:
        fresh = insert(tenant).values(name=name, salt=secrets.token_bytes(_SALT_BYTES))
        conn.execute(fresh.on_conflict_do_nothing(index_elements=["name"]))
        row = conn.execute(sa.select(*columns).where(tenant.c.name == name)).one()
    return Tenant(**row._mapping)


def find_tenant(conn: sa.Connection, name: str) -> Tenant | None:
    """The tenant of that name, where there is one."""
    row = conn.execute(sa.select(tenant.c.id, tenant.c.name, tenant.c.salt).where(tenant.c.name == name)).first()
    return None if row is None else Tenant(**row._mapping)


def load_tenant(conn: sa.Connection, tenant_id: int) -> Tenant:
    """The tenant of a row that names it."""
    columns = (tenant.c.id, tenant.c.name, tenant.c.salt)
    return Tenant(**conn.execute(sa.select(*columns).where(tenant.c.id == tenant_id)).one()._mapping)


def has_keys(conn: sa.Connection) -> bool:
    """Whether a key was ever made. Revoked ones count: revoking the last one must not open the door."""
    return bool(conn.execute(sa.select(sa.exists(sa.select(api_key.c.id)))).scalar_one())


def tenant_of_key(conn: sa.Connection, key: str) -> Tenant | None:
    """Whose key this is; None for a wrong or a revoked one."""
    row = _OF_KEY.run(conn, hash=_hash(key)).first()
    return None if row is None else Tenant(**row._mapping)


def keyless_tenant(conn: sa.Connection) -> Tenant | None:
    """The tenant whose everything is while no key was ever made; None once one was. One look in the common case."""
    row = _KEYLESS.run(conn).first()
    if row is not None:
        return Tenant(**row._mapping)
    return None if has_keys(conn) else ensure_tenant(conn, DEFAULT_TENANT)


def create_key(conn: sa.Connection, tenant_name: str, label: str) -> str:
    """A new key of that tenant, in plain text: it can be shown this once and never again."""
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    owner = ensure_tenant(conn, tenant_name)
    conn.execute(sa.insert(api_key).values(tenant_id=owner.id, label=label, hash=_hash(key)))
    return key


def list_keys(conn: sa.Connection) -> list[ApiKey]:
    """Every key, oldest first."""
    rows = conn.execute(
        sa.select(
            api_key.c.id, tenant.c.name.label("tenant"), api_key.c.label, api_key.c.created_at, api_key.c.revoked_at
        )
        .join(tenant, tenant.c.id == api_key.c.tenant_id)
        .order_by(api_key.c.id)
    )
    return [ApiKey(**row._mapping) for row in rows]


def revoke_key(conn: sa.Connection, key_id: int) -> bool:
    """From now on the key opens nothing. False where there is no such key, or it was revoked before."""
    statement = (
        sa.update(api_key)
        .where(api_key.c.id == key_id, api_key.c.revoked_at.is_(None))
        .values(revoked_at=sa.func.now())
    )
    return conn.execute(statement).rowcount == 1


def _hash(key: str) -> bytes:
    """A fast hash is enough: a key has 256 random bits, there is nothing to guess."""
    return hashlib.sha256(key.encode()).digest()
