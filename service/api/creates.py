"""A create that repeats an earlier one: by its Idempotency-Key, or as the SDK repeats what it got no answer to."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from starlette.requests import Request

from service.api.inputs import JsonObject, idempotency_key_of
from service.store.idempotency import claim_key, claim_unkeyed, digest, repoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What a request says of being a repeat."""

    path: str
    key: str | None
    retry_count: int | None  # None: not from the SDK

    def claim(self, conn: sa.Connection, tenant_id: int, body: JsonObject, new_id: str) -> str:
        """`new_id` where this create is to be carried out, else the id of what was created before."""
        if self.key is None and self.retry_count is None:
            return new_id
        body_sha256 = digest(self.path, body)
        if self.key is not None:
            return claim_key(conn, tenant_id, self.key, body_sha256, new_id)
        return claim_unkeyed(conn, tenant_id, body_sha256, new_id, is_retry=bool(self.retry_count))

    def point_to(self, conn: sa.Connection, tenant_id: int, body: JsonObject, new_id: str) -> None:
        """After `claim`, in its transaction: from now on this create led to `new_id`."""
        repoint(conn, tenant_id, self.key, digest(self.path, body), new_id)


def repeats_of(request: Request) -> Repeats:
    count = request.headers.get("x-stainless-retry-count", "")
    return Repeats(
        path=request.url.path,
        key=idempotency_key_of(request),
        retry_count=int(count) if count.isascii() and count.isdigit() and len(count) < 10 else None,
    )
