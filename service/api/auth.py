"""Bearer key -> tenant. With no key configured and a loopback bind, everybody is the tenant `default`."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends
from starlette.requests import Request

from service.api.context import context_of
from service.api.errors import ApiError
from service.errors import SettingError
from service.settings import Settings
from service.store.session import Database
from service.store.tenants import Tenant, has_keys, keyless_tenant, tenant_of_key


def authenticated(request: Request) -> Tenant:
    """The tenant that this request acts for. Runs in a thread, before any body is read."""
    context = context_of(request)
    key = _bearer(request)
    with context.database.transaction() as conn:
        tenant = None if key is None else tenant_of_key(conn, key)
        tenant = tenant or _keyless(conn, request, context.settings)
    if tenant is None:
        said = "No API key: send `Authorization: Bearer ...`." if key is None else "The API key is wrong or revoked."
        raise ApiError(401, "invalid_api_key", said, headers={"www-authenticate": "Bearer"})
    return tenant


Caller = Annotated[Tenant, Depends(authenticated)]


def check_reachable_with_key(settings: Settings, database: Database) -> None:
    """Refuse to serve others with no key configured. Raises SettingError."""
    if settings.is_loopback:
        return
    with database.transaction() as conn:
        if not has_keys(conn):
            raise SettingError(
                f"TRUNKLINE_HOST is {settings.host}, which others can reach, and no API key is configured: "
                "make one with `trunkline keys create`, or bind 127.0.0.1."
            )


def _bearer(request: Request) -> str | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _keyless(conn: sa.Connection, request: Request, settings: Settings) -> Tenant | None:
    if not settings.is_loopback or not _came_over_loopback(request):
        return None
    return keyless_tenant(conn)


def _came_over_loopback(request: Request) -> bool:
    """The socket that took the connection, and the Host it was asked for: a web page that has its own name resolve
    to 127.0.0.1 would else reach what no key guards."""
    server = request.scope.get("server")
    return server is not None and _is_loopback(server[0]) and _is_loopback(request.url.hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
