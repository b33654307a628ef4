"""From how a submission ended to the result row: outcome, error, and why fewer tokens came from cache."""

from __future__ import annotations

import time

from service.core.model import LineErrorCode, Outcome
from service.core.usage import UNKNOWN
from service.store.cohorts import Claim, ClaimedJob
from service.store.results import FinishedJob
from workers.engines.base import EngineReply
from workers.feeder import Aborted, Crashed, Ended, TimedOut
from workers.life import Life

MAX_CRASHES = 3  # a job in flight at that many engine deaths is ended, not run

_MESSAGES = {
    LineErrorCode.BATCH_CANCELLED: "The request was cancelled before it was answered.",
    LineErrorCode.BATCH_EXPIRED: "The request's time was up before it was answered.",
    LineErrorCode.REQUEST_TIMEOUT: "The engine did not answer in time.",
    LineErrorCode.ENGINE_CRASH: f"The engine died {MAX_CRASHES} times with this request in flight.",
    LineErrorCode.WORKER_LOST: "The connection to the engine failed on every try.",
}


def finished_job(item: Ended, claim: Claim, life: Life, *, leads: bool) -> FinishedJob:
    """The result of a submission that ended for good. `leads`: no job of its cohort was to run here before it."""
    if not (isinstance(item.ending, EngineReply) and 200 <= item.ending.status_code < 300):
        life.watch.leave([item.job])
    run_ms = round(item.run_seconds * 1000)
    since_start_ms = max(0, round((time.monotonic() - item.ended_at) * 1000)) + run_ms
    if not isinstance(item.ending, EngineReply):
        code = _error_code(item)
        is_broken_off = item.relayed and code in (LineErrorCode.ENGINE_CRASH, LineErrorCode.WORKER_LOST)
        message = _BROKEN_OFF if is_broken_off else _MESSAGES[code]
        return _unanswered(item.job, code, message, run_ms=run_ms, started_ms_ago=since_start_ms)
    reply = item.ending
    is_success = 200 <= reply.status_code < 300
    cause = life.watch.finish(item, claim, reply.usage, leads=leads) if is_success else None
    return FinishedJob(
        job_id=item.job.job_id,
        outcome=Outcome.SUCCEEDED if is_success else Outcome.FAILED,
        status_code=reply.status_code,
        error_code=None,
        error_message=None,
        response=reply.body,
        usage=reply.usage,
        predicted_cached_tokens=item.job.predicted_cached_tokens,
        miss_cause=cause,
        queue_ms=item.job.queued_ms,
        run_ms=run_ms,
        started_ms_ago=since_start_ms,
    )


def given_up(job: ClaimedJob, code: LineErrorCode) -> FinishedJob:
    """The result of a job that is not run at all."""
    return _unanswered(job, code, _MESSAGES[code], run_ms=0, started_ms_ago=0)


_BROKEN_OFF = "The engine failed in the middle of an answer that was being streamed, so it was not tried again."


def _error_code(item: Ended) -> LineErrorCode:
    if isinstance(item.ending, Aborted):
        is_cancelled = item.ending.outcome is Outcome.CANCELLED
        return LineErrorCode.BATCH_CANCELLED if is_cancelled else LineErrorCode.BATCH_EXPIRED
    if isinstance(item.ending, TimedOut):
        return LineErrorCode.REQUEST_TIMEOUT
    return LineErrorCode.ENGINE_CRASH if isinstance(item.ending, Crashed) else LineErrorCode.WORKER_LOST


_OUTCOMES = {LineErrorCode.BATCH_CANCELLED: Outcome.CANCELLED, LineErrorCode.BATCH_EXPIRED: Outcome.EXPIRED}


def _unanswered(job: ClaimedJob, code: LineErrorCode, message: str, *, run_ms: int, started_ms_ago: int) -> FinishedJob:
    return FinishedJob(
        job_id=job.job_id,
        outcome=_OUTCOMES.get(code, Outcome.FAILED),
        status_code=None,
        error_code=code.value,
        error_message=message,
        response=None,
        usage=UNKNOWN,
        predicted_cached_tokens=job.predicted_cached_tokens,
        miss_cause=None,
        queue_ms=job.queued_ms,
        run_ms=run_ms,
        started_ms_ago=started_ms_ago,
    )
