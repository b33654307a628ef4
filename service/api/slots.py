"""Slots: how many of a costly kind of request a process works on at once, and one of each tenant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.api.errors import ApiError

_RETRY_SECONDS = 5


class Slots:
    """For the event loop: nothing here is locked. Nobody queues, or a tenant could fill the queue."""

    def __init__(self) -> None:
        self._tenants: set[int] = set()

    @contextmanager
    def taken(self, tenant_id: int, most: int) -> Iterator[None]:
        """Raises ApiError 429 where the tenant has one already, or all tenants together have `most`."""
        if tenant_id in self._tenants or len(self._tenants) >= most:
            headers = {"retry-after": str(_RETRY_SECONDS)}
            raise ApiError(429, "rate_limit_exceeded", "Too many of these at once; try again.", headers=headers)
        self._tenants.add(tenant_id)
        try:
            yield
        finally:
            self._tenants.discard(tenant_id)
