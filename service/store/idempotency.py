"""Idempotency: which create a repeated create repeats."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from service.errors import TrunklineError
from service.store.control_tables import idempotency_key
from service.store.frozen import Frozen

KEPT = timedelta(hours=24)
RETRY_WINDOW = timedelta(minutes=15)

# What a create without a key is remembered under. No header can hold this character, so no client's key begins so.
_UNKEYED = "\x01"


class IdempotencyConflict(TrunklineError):
    """This Idempotency-Key was used for another request."""


def digest(path: str, body: dict[str, Any]) -> bytes:
    """Equal for bodies that are equal as parsed JSON, sent to the same path."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{path}\n{canonical}".encode()).digest()


def _take(is_stale: sa.ColumnElement[bool] | None) -> Frozen:
    fresh: dict[str, sa.ColumnElement[Any]] = {
        "body_sha256": sa.bindparam("body_sha256"),
        "created_id": sa.bindparam("created_id"),
    }
    return Frozen(
        insert(idempotency_key)
        .values(tenant_id=sa.bindparam("tenant_id"), key=sa.bindparam("key"), created_at=sa.func.now(), **fresh)
        .on_conflict_do_update(
            index_elements=["tenant_id", "key"], set_={**fresh, "created_at": sa.func.now()}, where=is_stale
        )
        .returning(idempotency_key.c.created_id)
    )


_TAKE = _take(None)
_TAKE_IF_STALE = _take(idempotency_key.c.created_at <= sa.func.now() - sa.bindparam("kept", type_=sa.Interval))


def claim_key(conn: sa.Connection, tenant_id: int, key: str, body_sha256: bytes, new_id: str) -> str:
    """`new_id`, where this is the first create under the key in 24 h; else the id that the first one made.

    In the transaction of the create: a second request with the key waits for the first to commit, and a create that
    is refused leaves no key. Raises IdempotencyConflict where the first had another body.
    """
    created_id, known_sha256 = _claim(conn, tenant_id, key, body_sha256, new_id, KEPT)
    if known_sha256 != body_sha256:
        raise IdempotencyConflict
    return created_id


def claim_unkeyed(conn: sa.Connection, tenant_id: int, body_sha256: bytes, new_id: str, *, is_retry: bool) -> str:
    """The same for a create that has no key, by its body: a retry within 15 minutes gets what the first one made.

    One that is no retry is always new, and is what a later retry repeats.
    """
    kept = RETRY_WINDOW if is_retry else None
    return _claim(conn, tenant_id, _UNKEYED + body_sha256.hex(), body_sha256, new_id, kept)[0]


def repoint(conn: sa.Connection, tenant_id: int, key: str | None, body_sha256: bytes, new_id: str) -> None:
    """A claimed create led to `new_id` instead: what it made before is of no use to whoever repeats it."""
    name = _UNKEYED + body_sha256.hex() if key is None else key
    conn.execute(
        sa.update(idempotency_key)
        .where(idempotency_key.c.tenant_id == tenant_id, idempotency_key.c.key == name)
        .values(created_id=new_id, created_at=sa.func.now())
    )


def _claim(
    conn: sa.Connection, tenant_id: int, key: str, body_sha256: bytes, new_id: str, kept: timedelta | None
) -> tuple[str, bytes]:
    """(created id, body hash) of the row as it stands: `new_id`'s, unless there is one younger than `kept`."""
    fresh = {"tenant_id": tenant_id, "key": key, "body_sha256": body_sha256, "created_id": new_id}
    taken = _TAKE.run(conn, **fresh) if kept is None else _TAKE_IF_STALE.run(conn, **fresh, kept=kept)
    if taken.first() is not None:
        return new_id, body_sha256
    row = conn.execute(
        sa.select(idempotency_key.c.created_id, idempotency_key.c.body_sha256).where(
            idempotency_key.c.tenant_id == tenant_id, idempotency_key.c.key == key
        )
    ).one()
    return row.created_id, row.body_sha256


def forget_old_keys(conn: sa.Connection) -> int:
    """Delete the keys whose 24 h are over; how many."""
    statement = sa.delete(idempotency_key).where(idempotency_key.c.created_at < sa.func.now() - KEPT)
    return conn.execute(statement).rowcount
