"""Quotas: how much of a tenant's is queued, and how much may be. Cheap to ask: no job of a batch is looked at.

Lines and prompt tokens of open batches that have not ended, and single jobs that no instance has yet. A batch's tokens
are estimated when it begins and counted when intake has read it all; of those that are left, the batch's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import TERMINAL_BATCH_STATUSES, BatchStatus
from service.settings import Settings
from service.store.frozen import Frozen
from service.store.tables import batch, batch_progress, job, tenant

_TENANT = sa.bindparam("tenant", type_=sa.BigInteger)
_OPEN = [status for status in BatchStatus if status not in TERMINAL_BATCH_STATUSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that may be queued of a tenant."""

    lines: int
    tokens: int


def default_quota(settings: Settings) -> Quota:
    """Of a tenant that has none of its own."""
    return Quota(lines=settings.max_queued_lines, tokens=settings.max_queued_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is queued of a tenant beside what may be."""

    lines: int
    tokens: int
    quota: Quota

    @property
    def is_full(self) -> bool:
        return self.lines >= self.quota.lines or self.tokens >= self.quota.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """A tenant as `trunkline tenants list` shows it."""

    name: str
    weight: int
    lines: int  # queued
    max_lines: int
    has_own_lines: bool  # else the setting's
    tokens: int
    max_tokens: int
    has_own_tokens: bool


def standing(conn: sa.Connection, tenant_id: int, default: Quota) -> Standing:
    """`default` is for what the tenant's row leaves open."""
    row = _STANDING.run(conn, tenant=tenant_id, default_lines=default.lines, default_tokens=default.tokens).one()
    quota = Quota(lines=int(row.most_lines), tokens=int(row.most_tokens))
    return Standing(lines=int(row.lines), tokens=int(row.tokens), quota=quota)


def list_tenants(conn: sa.Connection, default: Quota) -> list[TenantQuota]:
    """Every tenant, by name."""
    rows = conn.execute(
        sa.select(
            tenant.c.id, tenant.c.name, tenant.c.weight, tenant.c.max_queued_lines, tenant.c.max_queued_tokens
        ).order_by(tenant.c.name)
    ).all()
    found = []
    for row in rows:
        has = standing(conn, row.id, default)
        found.append(
            TenantQuota(
                name=row.name,
                weight=row.weight,
                lines=has.lines,
                max_lines=has.quota.lines,
                has_own_lines=row.max_queued_lines is not None,
                tokens=has.tokens,
                max_tokens=has.quota.tokens,
                has_own_tokens=row.max_queued_tokens is not None,
            )
        )
    return found


def set_tenant(conn: sa.Connection, name: str, values: Mapping[str, int | None]) -> bool:
    """Weight, max_queued_lines and max_queued_tokens of a tenant; None: as the settings say. False: there is none."""
    return conn.execute(sa.update(tenant).where(tenant.c.name == name).values(values)).rowcount == 1


def lock_tenant(conn: sa.Connection, tenant_id: int) -> None:
    """Until this transaction ends nobody else lets a batch of this tenant begin: two at once cannot both fit alone."""
    conn.execute(sa.select(tenant.c.id).where(tenant.c.id == tenant_id).with_for_update(key_share=True))


def _batches() -> sa.Select[int, int]:
    ended_lines = (
        batch_progress.c.completed + batch_progress.c.failed + batch_progress.c.cancelled + batch_progress.c.expired
    )
    progress = (
        sa.select(func.sum(ended_lines).label("ended"), func.sum(batch_progress.c.skipped).label("skipped"))
        .where(batch_progress.c.batch_id == batch.c.id)
        .lateral()
    )
    open_batches = (
        sa.select(
            batch.c.prompt_tokens,
            (batch.c.total - func.coalesce(progress.c.ended, 0)).label("left"),
            (batch.c.total - func.coalesce(progress.c.skipped, 0)).label("valid"),
        )
        .join(progress, sa.true())
        .where(batch.c.tenant_id == _TENANT, sa.or_(*(batch.c.status == status for status in _OPEN)), batch.c.total > 0)
        .subquery()
    )
    mean_tokens = func.coalesce(open_batches.c.prompt_tokens, 0) / func.nullif(open_batches.c.valid, 0)
    tokens = open_batches.c.left * mean_tokens
    return sa.select(
        sa.cast(func.coalesce(func.sum(open_batches.c.left), 0), sa.BigInteger).label("lines"),
        sa.cast(func.coalesce(func.sum(tokens), 0), sa.BigInteger).label("tokens"),
    )


def _singles() -> sa.Select[int, int]:
    """An index holds those that wait, and those alone: a job that ended or is out has a cohort."""
    is_waiting = sa.and_(job.c.batch_id.is_(None), job.c.cohort_id.is_(None), job.c.tenant_id == _TENANT)
    return sa.select(
        func.count().label("lines"),
        sa.cast(func.coalesce(func.sum(job.c.prompt_tokens), 0), sa.BigInteger).label("tokens"),
    ).where(is_waiting)


def _standing() -> sa.Select[int, int, int, int]:
    batches, singles = _batches().subquery(), _singles().subquery()
    most_lines, most_tokens = (sa.bindparam(f"default_{what}", type_=sa.BigInteger) for what in ("lines", "tokens"))
    return (
        sa.select(
            (batches.c.lines + singles.c.lines).label("lines"),
            (batches.c.tokens + singles.c.tokens).label("tokens"),
            func.coalesce(tenant.c.max_queued_lines, most_lines).label("most_lines"),
            func.coalesce(tenant.c.max_queued_tokens, most_tokens).label("most_tokens"),
        )
        .select_from(tenant)
        .join(batches, sa.true())
        .join(singles, sa.true())
        .where(tenant.c.id == _TENANT)
    )


_STANDING = Frozen(_standing())  # asked on the way of every single job
