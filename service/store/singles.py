"""Single jobs: submit, read with whatever is known of them, page, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from psycopg.types.json import Jsonb
from sqlalchemy.dialects.postgresql import ARRAY

from service.core.model import CohortState, JobStatus, LineErrorCode, MissCause, Outcome, Priority
from service.core.usage import Usage
from service.store import webhooks
from service.store.backlog import SINGLES_CHANNEL
from service.store.clock import RELAXED
from service.store.frozen import Frozen
from service.store.listen import notified
from service.store.results import end_single
from service.store.tables import cohort, instance_boot, job, job_result

STATUS_OF_OUTCOME = {
    Outcome.SUCCEEDED: JobStatus.SUCCEEDED,
    Outcome.FAILED: JobStatus.FAILED,
    Outcome.CANCELLED: JobStatus.CANCELLED,
    Outcome.EXPIRED: JobStatus.EXPIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSingle:
    """A job as accepted: `model` is the served name, `body` the bytes for the engine."""

    endpoint: str
    model: str
    body: bytes
    prefix_key: bytes
    prompt_tokens: int
    predicted_output_tokens: int
    priority: Priority = Priority.INTERACTIVE
    deadline_seconds: float | None = None
    metadata: dict[str, str] | None = None
    webhook_url: str | None = None
    stream_to: str | None = None  # the queue of the API process that relays the answer
    # Its client waits on an open connection, and knows of no job before it has the answer: the disk need not be waited
    # for. Should a crash of Postgres take it back, the client is told to ask again.
    is_waited_for: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """A single job with its result, where it has one."""

    id: int
    public_id: str
    endpoint: str
    model: str
    priority: Priority
    metadata: dict[str, str] | None
    status: JobStatus
    attempts: int
    instance: str | None
    predicted_cached_tokens: int | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    status_code: int | None
    error_code: str | None
    error_message: str | None
    response: bytes | None
    usage: Usage
    miss_cause: MissCause | None

    @property
    def is_terminal(self) -> bool:
        return self.status in STATUS_OF_OUTCOME.values()


def create_single(conn: sa.Connection, tenant_id: int, public_id: str, new: NewSingle) -> None:
    """Insert the job, and tell the lane of single jobs when this transaction commits."""
    if new.webhook_url is not None:
        webhooks.ensure_secret(conn, tenant_id)
    insertion = _INSERT_WAITED_FOR if new.is_waited_for else _INSERT
    insertion.run(
        conn,
        public_id=public_id,
        tenant_id=tenant_id,
        endpoint=new.endpoint,
        model=new.model,
        body=new.body,
        prefix_key=new.prefix_key,
        prompt_tokens=new.prompt_tokens,
        predicted_output_tokens=new.predicted_output_tokens,
        priority=int(new.priority),
        deadline_seconds=new.deadline_seconds,
        metadata=None if new.metadata is None else Jsonb(new.metadata),
        webhook_url=new.webhook_url,
        stream_to=new.stream_to,
    )


def _insertion(*also: sa.ColumnElement[Any]) -> Frozen:
    names = (
        *("public_id", "tenant_id", "endpoint", "model", "body", "prefix_key", "prompt_tokens"),
        *("predicted_output_tokens", "priority", "metadata", "webhook_url", "stream_to"),
    )
    # An interval times null is null, and so the deadline of a job that has none.
    deadline_at = sa.func.now() + sa.bindparam("deadline_seconds", type_=sa.Double) * timedelta(seconds=1)
    values = sa.insert(job).values(**{name: sa.bindparam(name) for name in names}, deadline_at=deadline_at)
    return Frozen(values.returning(notified(SINGLES_CHANNEL), *also))


_INSERT = _insertion()
_INSERT_WAITED_FOR = _insertion(RELAXED)


def get_single(conn: sa.Connection, tenant_id: int, public_id: str) -> Single | None:
    """None for an id that is not there, and for another tenant's."""
    row = _ONE.run(conn, tenant_id=tenant_id, public_id=public_id).first()
    return None if row is None else _single(row)


def list_singles(conn: sa.Connection, tenant_id: int, *, after: str | None, limit: int) -> list[Single]:
    """Newest first; ids sort by time, so a cursor still works when its job is gone."""
    statement = _SINGLE.where(job.c.tenant_id == tenant_id, job.c.public_id.is_not(None))
    if after is not None:
        statement = statement.where(job.c.public_id < after)
    rows = conn.execute(statement.order_by(job.c.public_id.desc()).limit(limit))
    return [_single(row) for row in rows]


def ended_among(conn: sa.Connection, public_ids: Sequence[str]) -> list[str]:
    """Those of these jobs that have their result, or are no longer known: one question for every long poll of a
    process."""
    asked = sa.func.unnest(sa.cast(list(public_ids), ARRAY(sa.Text))).table_valued("id").render_derived(name="asked")
    statement = (
        sa.select(asked.c.id)
        .outerjoin(job, job.c.public_id == asked.c.id)
        .outerjoin(job_result, job_result.c.job_id == job.c.id)
        .where(sa.or_(job.c.id.is_(None), job_result.c.job_id.is_not(None)))
    )
    return [str(public_id) for public_id in conn.execute(statement).scalars()]


def may_answer(conn: sa.Connection, tenant_id: int, public_id: str) -> bool:
    """Whether a job has an answer, or will. False: it was cancelled, or is no longer known."""
    row = conn.execute(
        sa.select(job.c.cancel_requested_at, job_result.c.outcome)
        .outerjoin(job_result, job_result.c.job_id == job.c.id)
        .where(job.c.tenant_id == tenant_id, job.c.public_id == public_id)
    ).first()
    if row is None or row.outcome == Outcome.CANCELLED:
        return False
    return row.outcome is not None or row.cancel_requested_at is None


def request_cancel(conn: sa.Connection, single: Single) -> bool:
    """Ask that the job end as cancelled. False: it had ended before.

    One that no engine has is ended here and now; a worker finds the mark on one that runs with its next heartbeat.
    """
    conn.execute(
        sa.update(job)
        .where(job.c.id == single.id, job.c.cancel_requested_at.is_(None))
        .values(cancel_requested_at=sa.func.now())
    )
    on_engine = sa.exists().where(
        cohort.c.id == job.c.cohort_id, cohort.c.state.in_((CohortState.DISPATCHED, CohortState.RUNNING))
    )
    if conn.execute(sa.select(on_engine).where(job.c.id == single.id)).scalar_one():
        ended = sa.exists().where(job_result.c.job_id == single.id)
        return not conn.execute(sa.select(ended)).scalar_one()
    return end_single(conn, single.id, Outcome.CANCELLED, LineErrorCode.BATCH_CANCELLED)


_SINGLE: sa.Select[Any] = (
    sa.select(
        job.c.id,
        job.c.public_id,
        job.c.endpoint,
        job.c.model,
        job.c.priority,
        job.c.metadata.label("job_metadata"),
        job.c.tries,
        job.c.predicted_cached_tokens,
        job.c.created_at,
        cohort.c.state,
        sa.func.coalesce(job_result.c.attempt, cohort.c.attempt, 0).label("attempt"),
        sa.func.coalesce(job_result.c.started_at, cohort.c.started_at).label("started_at"),
        instance_boot.c.name.label("instance"),
        job_result.c.outcome,
        job_result.c.status_code,
        job_result.c.error_code,
        job_result.c.error_message,
        job_result.c.response,
        job_result.c.prompt_tokens,
        job_result.c.cached_tokens,
        job_result.c.predicted_cached_tokens.label("result_predicted_cached_tokens"),
        job_result.c.completion_tokens,
        job_result.c.reasoning_tokens,
        job_result.c.miss_cause,
        job_result.c.finished_at,
    )
    .outerjoin(job_result, job_result.c.job_id == job.c.id)
    .outerjoin(cohort, cohort.c.id == job.c.cohort_id)
    .outerjoin(
        instance_boot,
        instance_boot.c.id == sa.func.coalesce(job_result.c.instance_boot_id, cohort.c.instance_boot_id),
    )
)


_ONE = Frozen(_SINGLE.where(job.c.tenant_id == sa.bindparam("tenant_id"), job.c.public_id == sa.bindparam("public_id")))


def _single(row: sa.Row[Any]) -> Single:
    status = _status(row)
    predicted = row.result_predicted_cached_tokens if row.outcome else row.predicted_cached_tokens
    has_started = status is not JobStatus.QUEUED
    return Single(
        id=row.id,
        public_id=row.public_id,
        endpoint=row.endpoint,
        model=row.model,
        priority=Priority(row.priority),
        metadata=row.job_metadata,
        status=status,
        attempts=row.attempt + row.tries,
        instance=row.instance,
        predicted_cached_tokens=predicted,
        created_at=row.created_at,
        started_at=row.started_at if has_started else None,
        finished_at=row.finished_at,
        status_code=row.status_code,
        error_code=row.error_code,
        error_message=row.error_message,
        response=row.response,
        usage=Usage(
            prompt_tokens=row.prompt_tokens,
            cached_tokens=row.cached_tokens,
            completion_tokens=row.completion_tokens,
            reasoning_tokens=row.reasoning_tokens,
        ),
        miss_cause=MissCause(row.miss_cause) if row.miss_cause else None,
    )


def _status(row: sa.Row[Any]) -> JobStatus:
    if row.outcome is not None:
        return STATUS_OF_OUTCOME[Outcome(row.outcome)]
    return JobStatus.RUNNING if row.state == CohortState.RUNNING else JobStatus.QUEUED
