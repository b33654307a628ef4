"""From how a submission ended to the result row: outcome, error, and why fewer tokens came from cache."""

from __future__ import annotations

import time

from service.core.model import LineErrorCode, MissCause, Outcome
from service.core.usage import UNKNOWN, Usage, classify_miss
from service.store.cohorts import Claim, ClaimedJob
from service.store.results import FinishedJob
from workers.engines.base import EngineReply
from workers.feeder import Aborted, Ended, TimedOut
from workers.life import Life

MAX_CRASHES = 3  # a job in flight at that many engine deaths is ended, not run

_MESSAGES = {
    LineErrorCode.BATCH_CANCELLED: "The request was cancelled before it was answered.",
    LineErrorCode.BATCH_EXPIRED: "The request's time was up before it was answered.",
    LineErrorCode.REQUEST_TIMEOUT: "The engine did not answer in time.",
    LineErrorCode.ENGINE_CRASH: f"The engine died {MAX_CRASHES} times with this request in flight.",
    LineErrorCode.WORKER_LOST: "The connection to the engine failed on every try.",
}


def finished_job(item: Ended, claim: Claim, life: Life) -> FinishedJob:
    """The result of a submission that ended for good."""
    run_ms = round(item.run_seconds * 1000)
    since_start_ms = max(0, round((time.monotonic() - item.ended_at) * 1000)) + run_ms
    if not isinstance(item.ending, EngineReply):
        return _unanswered(item.job, _error_code(item), run_ms=run_ms, started_ms_ago=since_start_ms)
    reply = item.ending
    is_success = 200 <= reply.status_code < 300
    return FinishedJob(
        job_id=item.job.job_id,
        outcome=Outcome.SUCCEEDED if is_success else Outcome.FAILED,
        status_code=reply.status_code,
        error_code=None,
        error_message=None,
        response=reply.body,
        usage=reply.usage,
        predicted_cached_tokens=item.job.predicted_cached_tokens,
        miss_cause=miss_cause(item.job, reply.usage, claim, life) if is_success else None,
        queue_ms=item.job.queued_ms,
        run_ms=run_ms,
        started_ms_ago=since_start_ms,
    )


def given_up(job: ClaimedJob, code: LineErrorCode) -> FinishedJob:
    """The result of a job that is not run at all."""
    return _unanswered(job, code, run_ms=0, started_ms_ago=0)


def miss_cause(job: ClaimedJob, usage: Usage, claim: Claim, life: Life) -> MissCause | None:
    """Why the cache served less than it might have, from what this boot knows."""
    ran_here = life.memory.holds(job.prefix_key, job.predicted_cached_tokens)
    return classify_miss(
        predicted_cached_tokens=job.predicted_cached_tokens,
        cached_tokens=usage.cached_tokens,
        prompt_tokens=usage.prompt_tokens or job.prompt_tokens,
        block_size=life.facts.block_size or 1,
        first_of_group=job.first_of_group,
        neighbour_ran_here=ran_here,
        # A first attempt of a cohort that moved was stolen or re-planned; a later one follows a restart or a drain.
        other_instance=claim.moved and claim.attempt == 1 and not (ran_here and job.predicted_cached_tokens),
        restarted=claim.attempt > 1 and not ran_here,
        cache_bypassed=b'"prompt_logprobs"' in job.body,
        key_mismatch=life.key_agrees is False,
    )


def _error_code(item: Ended) -> LineErrorCode:
    if isinstance(item.ending, Aborted):
        is_cancelled = item.ending.outcome is Outcome.CANCELLED
        return LineErrorCode.BATCH_CANCELLED if is_cancelled else LineErrorCode.BATCH_EXPIRED
    return LineErrorCode.REQUEST_TIMEOUT if isinstance(item.ending, TimedOut) else LineErrorCode.WORKER_LOST


_OUTCOMES = {LineErrorCode.BATCH_CANCELLED: Outcome.CANCELLED, LineErrorCode.BATCH_EXPIRED: Outcome.EXPIRED}


def _unanswered(job: ClaimedJob, code: LineErrorCode, *, run_ms: int, started_ms_ago: int) -> FinishedJob:
    return FinishedJob(
        job_id=job.job_id,
        outcome=_OUTCOMES.get(code, Outcome.FAILED),
        status_code=None,
        error_code=code.value,
        error_message=_MESSAGES[code],
        response=None,
        usage=UNKNOWN,
        predicted_cached_tokens=job.predicted_cached_tokens,
        miss_cause=None,
        queue_ms=job.queued_ms,
        run_ms=run_ms,
        started_ms_ago=started_ms_ago,
    )
