"""Rows that integration tests start from: a tenant, a batch, jobs, a ready boot."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import func

from service.core.model import BatchStatus, Endpoint, Priority
from service.core.prefix import prefix_key, root_digest
from service.store import instances
from service.store.tables import batch, job, tenant

MODEL = "tiny"
QUEUE = "instance.one"


def add_tenant(conn: sa.Connection, name: str = "default") -> int:
    return conn.execute(sa.insert(tenant).values(name=name, salt=b"s" * 16).returning(tenant.c.id)).scalar_one()


def add_batch(conn: sa.Connection, tenant_id: int, batch_id: str = "batch_1", **values: object) -> str:
    row: dict[str, object] = {
        "id": batch_id,
        "tenant_id": tenant_id,
        "endpoint": Endpoint.CHAT,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": BatchStatus.IN_PROGRESS,
        "priority": Priority.NORMAL,
        "intake_done": True,
        "expires_at": func.now() + sa.text("interval '1 day'"),
    }
    conn.execute(sa.insert(batch).values(**{**row, **values}))
    return batch_id


def key_of(group: int, line: int, *, shared: int = 320, own: int = 64) -> tuple[bytes, int]:
    """The key and length of a made prompt: `shared` tokens of its group, then `own` tokens of its line."""
    tokens = [group * 1_000 + i for i in range(shared)] + [500_000 + line * 1_000 + i for i in range(own)]
    root = root_digest(model=MODEL, revision=None, adapter=None, salt=b"s" * 16)
    return prefix_key(tokens, root), len(tokens)


def add_jobs(conn: sa.Connection, tenant_id: int, batch_id: str | None, groups: Sequence[int]) -> list[int]:
    """One job per entry of `groups`, in file order; their ids."""
    ids = []
    for line, group in enumerate(groups, start=1):
        key, prompt_tokens = key_of(group, line)
        values = {
            "tenant_id": tenant_id,
            "batch_id": batch_id,
            "line_no": line if batch_id else None,
            "custom_id": f"line-{line}",
            "endpoint": Endpoint.CHAT,
            "model": MODEL,
            "body": b'{"model":"tiny","messages":[]}',
            "prefix_key": key,
            "prompt_tokens": prompt_tokens,
            "predicted_output_tokens": 8,
            "priority": None if batch_id else Priority.INTERACTIVE,
            "public_id": None if batch_id else f"job_{line}",
        }
        ids.append(conn.execute(sa.insert(job).values(**values).returning(job.c.id)).scalar_one())
    if batch_id:
        conn.execute(sa.update(batch).where(batch.c.id == batch_id).values(total=len(ids)))
    return ids


def add_boot(conn: sa.Connection, name: str = "one", *, pid: int = 1, ready: bool = True) -> int:
    """A boot of `instance.<name>` with a small simulated engine."""
    boot = instances.NewBoot(
        name=name,
        queue=f"instance.{name}",
        host="here",
        pid=pid,
        pid_started_at=1.0,
        engine="simulated",
        model=MODEL,
        devices=[],
        engine_arguments=[],
        adapters=[],
    )
    boot_id = instances.start_boot(conn, boot, stale_after_seconds=15, is_dead=lambda *_: False)
    if ready:
        assert instances.mark_ready(conn, boot_id, FACTS)
    return boot_id


FACTS = instances.BootFacts(
    engine_version=None,
    kv_capacity_tokens=4096,
    block_size=32,
    max_num_seqs=16,
    max_model_len=2048,
    honours_salt=True,
    honours_priority=True,
    reports_cached_tokens=True,
    key_agrees=True,
)
