"""Files: the rows that name blobs. The bytes are in the file store (blobs.py)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from service.core.ids import FILE_PREFIX
from service.store.blobs import Blob
from service.store.clock import new_id
from service.store.tables import file


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # uploaded by a producer
    BATCH_OUTPUT = "batch_output"  # written by export


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A row of `file`, and whether its time is over."""

    id: str
    tenant_id: int
    filename: str
    purpose: str
    size_bytes: int
    sha256: bytes
    store_path: str
    created_at: datetime
    expires_at: datetime | None
    is_expired: bool


_IS_EXPIRED = sa.func.coalesce(file.c.expires_at <= sa.func.now(), sa.false()).label("is_expired")


def _file(row: sa.Row[Any]) -> File:
    values: dict[str, Any] = dict(row._mapping)
    return File(size_bytes=values.pop("bytes"), **values)


def create_file(
    conn: sa.Connection,
    *,
    tenant_id: int,
    filename: str,
    purpose: str,
    blob: Blob,
    expires_after_seconds: int | None = None,
) -> File:
    """Insert the row of a blob that is already published."""
    expires_at = None
    if expires_after_seconds is not None:
        expires_at = sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, expires_after_seconds)
    statement = (
        sa.insert(file)
        .values(
            id=new_id(conn, FILE_PREFIX),
            tenant_id=tenant_id,
            filename=filename,
            purpose=purpose,
            bytes=blob.size_bytes,
            sha256=blob.sha256,
            store_path=blob.path,
            expires_at=expires_at,
        )
        .returning(file, _IS_EXPIRED)
    )
    return _file(conn.execute(statement).one())


def get_file(conn: sa.Connection, tenant_id: int, file_id: str, *, keep: bool = False) -> File | None:
    """None for an id that is not there, and for another tenant's. `keep`: not deleted until this transaction ends."""
    statement = sa.select(file, _IS_EXPIRED).where(file.c.id == file_id, file.c.tenant_id == tenant_id)
    if keep:
        statement = statement.with_for_update(key_share=True, read=True)
    row = conn.execute(statement).first()
    return None if row is None else _file(row)


def list_files(
    conn: sa.Connection, tenant_id: int, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
) -> list[File]:
    """By (created_at, id), which is the order of the ids; `after` need not exist any more."""
    statement = sa.select(file, _IS_EXPIRED).where(file.c.tenant_id == tenant_id)
    if purpose is not None:
        statement = statement.where(file.c.purpose == purpose)
    if after is not None:
        statement = statement.where(file.c.id < after if newest_first else file.c.id > after)
    order = file.c.id.desc() if newest_first else file.c.id.asc()
    return [_file(row) for row in conn.execute(statement.order_by(order).limit(limit))]


def lock_file(conn: sa.Connection, tenant_id: int, file_id: str) -> File | None:
    """The file, held so that no batch can be created over it until this transaction ends."""
    statement = (
        sa.select(file, _IS_EXPIRED).where(file.c.id == file_id, file.c.tenant_id == tenant_id).with_for_update()
    )
    row = conn.execute(statement).first()
    return None if row is None else _file(row)


def delete_file(conn: sa.Connection, file_id: str) -> None:
    """Remove the row. The caller removes the blob once this is committed."""
    conn.execute(sa.delete(file).where(file.c.id == file_id))
