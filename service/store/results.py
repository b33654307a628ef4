"""Results of jobs, each recorded once: the primary key is the job, and every write is fenced by its attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import ARRAY, insert

from service.core.model import CohortState, LineErrorCode, MissCause, Outcome
from service.core.usage import Usage
from service.errors import FenceLost
from service.store import webhooks
from service.store.cohorts import Claim
from service.store.frozen import Frozen
from service.store.listen import notify
from service.store.tables import batch_progress, cohort, job, job_result
from service.store.webhooks import EndedJob

NO_COHORT = 0  # a job's cohort_id once it ended without having been planned


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """What a worker knows of a job that ended. Durations, never wall-clock times: the worker's clock is not trusted."""

    job_id: int
    outcome: Outcome
    status_code: int | None
    error_code: str | None
    error_message: str | None
    response: bytes | None
    usage: Usage
    predicted_cached_tokens: int | None
    miss_cause: MissCause | None
    queue_ms: int
    run_ms: int
    started_ms_ago: int


def record(conn: sa.Connection, claim: Claim, finished: Sequence[FinishedJob]) -> int:
    """Write results under the cohort's fence; returns how many rows were new.

    Raises FenceLost, and nothing is written, when this attempt no longer holds the cohort. A job that already has
    its result, or that left the cohort, is passed over: a late answer loses to the primary key.
    """
    if not finished:
        _lock_fence(conn, claim)
        return 0
    bound = {row.id: row for row in _BOUND.run(conn, ids=[item.job_id for item in finished], **_fence_of(claim))}
    if not bound:
        _lock_fence(conn, claim)  # it was not found out yet
        return 0
    # In id order, as `end_jobs` inserts them: two writers of the same rows wait for each other instead of deadlocking.
    ordered = sorted((item for item in finished if item.job_id in bound), key=lambda item: item.job_id)
    rows = [_row(claim, item, bound[item.job_id].batch_id) for item in ordered]
    if not rows:
        return 0
    # A single job's row goes the short way: its client waits.
    inserted = _INSERT_ONE.run(conn, **rows[0]) if len(rows) == 1 else conn.execute(_INSERT_ROWS, rows)
    new = set(inserted.scalars())
    add_progress(conn, [row for row in rows if row["job_id"] in new])
    _tell(conn, [(bound[item.job_id], item.outcome) for item in ordered if item.job_id in new])
    return len(new)


def end_jobs(
    conn: sa.Connection,
    batch_id: str,
    *,
    outcome: Outcome,
    error_code: LineErrorCode,
    only_idle: bool,
    limit: int = 5_000,
) -> int:
    """End up to `limit` jobs of a batch that have no result: with `only_idle`, those in no dispatched or running
    cohort. Returns how many ended; call again until 0."""
    pending = (
        sa.select(job.c.id)
        .where(job.c.batch_id == batch_id, ~sa.exists().where(job_result.c.job_id == job.c.id))
        .order_by(job.c.id)
        .limit(limit)
    )
    if only_idle:
        busy = sa.exists().where(
            cohort.c.id == job.c.cohort_id, cohort.c.state.in_((CohortState.DISPATCHED, CohortState.RUNNING))
        )
        pending = pending.where(~busy)
    ids = conn.execute(pending.with_for_update(of=job)).scalars().all()
    return _end(conn, ids, batch_id, outcome, error_code)


def end_single(conn: sa.Connection, job_id: int, outcome: Outcome, error_code: LineErrorCode) -> bool:
    """End a single job that does not run. False when it has its result already."""
    ended = _end(conn, [job_id], None, outcome, error_code) == 1
    if ended:
        _tell(conn, [(conn.execute(_ENDING_JOB.where(job.c.id == job_id)).one(), outcome)])
    return ended


def end_due_singles(conn: sa.Connection, limit: int = 1_000) -> int:
    """End single jobs that are cancelled or past their deadline and do not run. Returns how many."""
    ready = sa.select(cohort.c.id).where(cohort.c.state == CohortState.READY, cohort.c.n_jobs == 1)
    rows = [
        row
        for which in (job.c.cohort_id.is_(None), job.c.cohort_id.in_(ready))
        for row in conn.execute(
            _ending(which).order_by(job.c.id).limit(limit).with_for_update(of=job, skip_locked=True)
        )
    ]
    for row in rows:
        if row.cancel_requested_at is not None:
            end_single(conn, row.id, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED)
        else:
            end_single(conn, row.id, Outcome.EXPIRED, LineErrorCode.BATCH_EXPIRED)
    return len(rows)


def _ending(which: sa.ColumnElement[bool]) -> sa.Select[Any]:
    is_due = sa.or_(job.c.cancel_requested_at.is_not(None), job.c.deadline_at <= func.now())
    no_result = ~sa.exists().where(job_result.c.job_id == job.c.id)
    return sa.select(job.c.id, job.c.cancel_requested_at).where(job.c.batch_id.is_(None), is_due, no_result, which)


def add_progress(conn: sa.Connection, rows: Sequence[dict[str, object]]) -> None:
    """One batch_progress row per batch for result rows that were just inserted (and only those)."""
    totals: dict[str, Counter[str]] = {}
    for row in rows:
        if row["batch_id"] is not None:
            totals.setdefault(str(row["batch_id"]), Counter()).update(_counts(row))
    if totals:
        conn.execute(
            sa.insert(batch_progress),
            [{**_NO_PROGRESS, "batch_id": batch_id, **count} for batch_id, count in sorted(totals.items())],
        )


_ENDING_JOB: sa.Select[Any] = sa.select(job.c.id, job.c.batch_id, job.c.public_id, job.c.tenant_id, job.c.webhook_url)
_OUTCOME_COLUMN = {
    Outcome.SUCCEEDED: "completed",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
}
_TOKEN_COLUMNS = (
    "prompt_tokens",
    "cached_tokens",
    "predicted_cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
)
_NO_PROGRESS = dict.fromkeys((*_OUTCOME_COLUMN.values(), *_TOKEN_COLUMNS, "measured_prompt_tokens", "lines_unknown"), 0)
_INSERT_RESULT = insert(job_result).on_conflict_do_nothing(index_elements=["job_id"])
_STARTED_AT = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, sa.bindparam("started_seconds_ago", type_=sa.Double))
_INSERT_ROWS = _INSERT_RESULT.values(started_at=_STARTED_AT).returning(job_result.c.job_id)
_RESULT_COLUMNS = (
    *("job_id", "batch_id", "cohort_id", "attempt", "instance_boot_id", "outcome", "status_code", "error_code"),
    *("error_message", "response", *_TOKEN_COLUMNS, "miss_cause", "queue_ms", "run_ms"),
)
_INSERT_ONE = Frozen(_INSERT_ROWS.values({name: sa.bindparam(name) for name in _RESULT_COLUMNS}))
_HELD = (
    cohort.c.id == sa.bindparam("cohort_id"),
    cohort.c.attempt == sa.bindparam("attempt"),
    cohort.c.instance_boot_id == sa.bindparam("boot_id"),
    cohort.c.state == CohortState.RUNNING,
)
# The jobs and the fence at once: no row where it is lost.
_BOUND = Frozen(
    _ENDING_JOB.join(cohort, cohort.c.id == job.c.cohort_id)
    .where(*_HELD, job.c.id == func.any(sa.bindparam("ids", type_=ARRAY(sa.BigInteger))))
    .with_for_update(read=True, of=cohort)
)
_FENCE = Frozen(sa.select(cohort.c.id).where(*_HELD).with_for_update(read=True))


def _lock_fence(conn: sa.Connection, claim: Claim) -> None:
    held = _FENCE.run(conn, **_fence_of(claim)).one_or_none()
    if held is None:
        raise FenceLost(f"cohort={claim.cohort_id} attempt={claim.attempt}")


def _fence_of(claim: Claim) -> dict[str, int]:
    return {"cohort_id": claim.cohort_id, "attempt": claim.attempt, "boot_id": claim.boot_id}


def _row(claim: Claim, item: FinishedJob, batch_id: str | None) -> dict[str, object]:
    return {
        "job_id": item.job_id,
        "batch_id": batch_id,
        "cohort_id": claim.cohort_id,
        "attempt": claim.attempt,
        "instance_boot_id": claim.boot_id,
        "outcome": item.outcome.value,
        "status_code": item.status_code,
        "error_code": item.error_code,
        "error_message": item.error_message,
        "response": item.response,
        "prompt_tokens": item.usage.prompt_tokens,
        "cached_tokens": item.usage.cached_tokens,
        "predicted_cached_tokens": item.predicted_cached_tokens,
        "completion_tokens": item.usage.completion_tokens,
        "reasoning_tokens": item.usage.reasoning_tokens,
        "miss_cause": item.miss_cause.value if item.miss_cause else None,
        "queue_ms": item.queue_ms,
        "run_ms": item.run_ms,
        "started_seconds_ago": item.started_ms_ago / 1000,
    }


def _end(
    conn: sa.Connection, ids: Sequence[int], batch_id: str | None, outcome: Outcome, error_code: LineErrorCode
) -> int:
    if not ids:
        return 0
    rows: list[dict[str, object]] = [
        {"job_id": job_id, "batch_id": batch_id, "outcome": outcome.value, "error_code": error_code.value}
        for job_id in ids
    ]
    new = set(conn.execute(_INSERT_RESULT.returning(job_result.c.job_id), rows).scalars())
    # They leave the index of the backlog, which every pass of the dispatcher walks.
    conn.execute(sa.update(job).where(job.c.id.in_(ids), job.c.cohort_id.is_(None)).values(cohort_id=NO_COHORT))
    add_progress(conn, [row for row in rows if row["job_id"] in new])
    return len(new)


def _counts(row: dict[str, object]) -> dict[str, int]:
    counts = {_OUTCOME_COLUMN[Outcome(str(row["outcome"]))]: 1}
    for column in _TOKEN_COLUMNS:
        value = row.get(column)
        if isinstance(value, int):
            counts[column] = value
    if row.get("prompt_tokens") is None or row.get("cached_tokens") is None:
        counts["lines_unknown"] = 1
    else:
        counts["measured_prompt_tokens"] = counts["prompt_tokens"]
    return counts


def _tell(conn: sa.Connection, ended: Sequence[tuple[sa.Row[Any], Outcome]]) -> None:
    """Of the single jobs among these: wake those who wait for them, write the webhooks of those that want one."""
    webhooks.announce_jobs(
        conn,
        [
            EndedJob(tenant_id=row.tenant_id, public_id=row.public_id, url=row.webhook_url, outcome=outcome)
            for row, outcome in ended
            if row.public_id and row.webhook_url
        ],
    )
    _notify(conn, [row.public_id for row, _ in ended])


def _notify(conn: sa.Connection, public_ids: Sequence[str | None]) -> None:
    """Wake those who wait for single jobs: at most one NOTIFY per transaction, the ids joined."""
    singles = [public_id for public_id in public_ids if public_id]
    if singles:
        # NOTIFY carries at most 8,000 bytes; beyond that the waiters' own polling finds the rest.
        notify(conn, "job", ",".join(singles[:200]))
