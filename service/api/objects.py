"""Rows as the contract's objects: null rather than absent, times in Unix seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from service.core.ids import line_id
from service.core.model import JobStatus, LineErrorCode
from service.core.resultline import error_envelope, parse_answer
from service.core.usage import Usage
from service.store.batches import Activity, Batch, Progress
from service.store.files import File
from service.store.outlook import Outlook
from service.store.singles import Single

_CLOCKS = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
_NO_OUTLOOK = Outlook()
# A job that ended unanswered says so in its own words, not a batch's.
_JOB_ERRORS: dict[str, tuple[str | None, str]] = {
    LineErrorCode.BATCH_CANCELLED: ("job_cancelled", "The job was cancelled before it was answered."),
    LineErrorCode.BATCH_EXPIRED: ("job_expired", "The job's deadline passed before it was answered."),
    LineErrorCode.REQUEST_TIMEOUT: ("request_timeout", "The engine did not answer in time."),
    LineErrorCode.ENGINE_CRASH: ("engine_crash", "The engine died each time it worked on this job."),
    LineErrorCode.WORKER_LOST: ("worker_lost", "The worker was lost each time it worked on this job."),
}


def unix(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())


def file_object(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": unix(file.created_at),
        "expires_at": unix(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(
    batch: Batch, progress: Progress, activity: Activity, outlook: Outlook = _NO_OUTLOOK
) -> dict[str, Any]:
    """Until a batch leaves `validating` its counts are 0, whatever intake has written by then."""
    counted = Progress() if batch.in_progress_at is None else progress
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None if not batch.errors else {"object": "list", "data": batch.errors},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: unix(getattr(batch, name)) for name in _CLOCKS},
        "request_counts": {"total": batch.total, "completed": counted.completed, "failed": counted.failed},
        "usage": _batch_usage(counted),
        "metadata": batch.metadata,
        "queue": _queue(batch, counted, activity, outlook),
    }


def _batch_usage(progress: Progress) -> dict[str, Any]:
    return {
        "input_tokens": progress.prompt_tokens,
        "input_tokens_details": {"cached_tokens": progress.cached_tokens},
        "output_tokens": progress.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": progress.reasoning_tokens},
        "total_tokens": progress.prompt_tokens + progress.completion_tokens,
    }


def _queue(batch: Batch, progress: Progress, activity: Activity, outlook: Outlook) -> dict[str, Any]:
    open_lines = 0 if batch.status.is_terminal else max(batch.total - progress.ended, 0)
    return {
        "priority": batch.priority.label,
        "paused": batch.paused,
        "retry_of": batch.retry_of,
        "prefix_groups": batch.prefix_groups,
        "queued": max(open_lines - activity.running - activity.retrying, 0),
        "running": activity.running,
        "retrying": activity.retrying,
        "cancelled": progress.cancelled,
        "expired": progress.expired,
        "skipped": progress.skipped,
        "eta_seconds": None if outlook.eta_seconds is None else round(outlook.eta_seconds, 1),
        "position": outlook.position,
        "cache": {
            "prompt_tokens": progress.measured_prompt_tokens,
            "cached_tokens": progress.cached_tokens,
            "predicted_cached_tokens": progress.predicted_cached_tokens,
            "bound_tokens": batch.bound_tokens,
            "lines_unknown": progress.lines_unknown,
        },
    }


def job_object(job: Single) -> dict[str, Any]:
    return {
        "id": job.public_id,
        "object": "job",
        "status": job.status.value,
        "endpoint": job.endpoint,
        "model": job.model,
        "priority": job.priority.label,
        "created_at": unix(job.created_at),
        "started_at": unix(job.started_at),
        "finished_at": unix(job.finished_at),
        "attempts": job.attempts,
        "instance": job.instance,
        "usage": _job_usage(job.usage),
        "cache": {
            "predicted_cached_tokens": job.predicted_cached_tokens,
            "cached_tokens": job.usage.cached_tokens,
            "miss_cause": job.miss_cause,
        },
        "response": _response(job),
        "error": job_error(job),
        "metadata": job.metadata,
    }


def _job_usage(usage: Usage) -> dict[str, Any] | None:
    """The engine's own shape, from what was recorded of it."""
    if usage.prompt_tokens is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + (usage.completion_tokens or 0),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _response(job: Single) -> dict[str, Any] | None:
    """As in a result line: what the engine answered, an error in the envelope."""
    if job.status_code is None or job.response is None:
        return None
    body = parse_answer(job.response)
    if body is None or not 200 <= job.status_code < 300:
        body = error_envelope(job.status_code, job.response)
    return {"status_code": job.status_code, "request_id": line_id(job.id), "body": body}


def job_error(job: Single) -> dict[str, Any] | None:
    """As in a result line: only of a job that no engine answered."""
    if job.status_code is not None or job.status in (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED):
        return None
    code, message = _JOB_ERRORS.get(job.error_code or "", (job.error_code, "The job failed."))
    return {"code": code, "message": job.error_message or message}
