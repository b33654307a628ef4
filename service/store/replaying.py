"""What the simulator needs of a finished batch to replay it under another policy."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from service.store.tables import job, job_result


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """One line: its key, and the tokens that it really had."""

    job_id: int
    prefix_key: bytes
    prompt_tokens: int
    completion_tokens: int


def replay_jobs(conn: sa.Connection, batch_id: str) -> list[ReplayJob]:
    """The answered lines of a batch in the order of its file."""
    rows = conn.execute(
        sa.select(
            job.c.id.label("job_id"),
            job.c.prefix_key,
            sa.func.coalesce(job_result.c.prompt_tokens, job.c.prompt_tokens).label("prompt_tokens"),
            sa.func.coalesce(job_result.c.completion_tokens, 0).label("completion_tokens"),
        )
        .join(job_result, job_result.c.job_id == job.c.id)
        .where(job.c.batch_id == batch_id)
        .order_by(job.c.line_no)
    )
    return [ReplayJob(**row._mapping) for row in rows]
