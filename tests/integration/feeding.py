"""Claims and jobs for tests of the feeder: no row behind them."""

from __future__ import annotations

from collections.abc import Callable

from service.core.model import Priority
from service.store.cohorts import Claim, ClaimedJob
from workers.feeder import Ended, Waiting


def make_claim(cohort_id: int = 1, *, sequence: int = 1, priority: int = Priority.NORMAL, alone: bool = False) -> Claim:
    return Claim(
        cohort_id=cohort_id,
        attempt=1,
        boot_id=1,
        priority=priority,
        sequence=sequence,
        alone=alone,
        model="tiny",
        moved=False,
    )


def make_job(job_id: int, *, prompt: int = 100, cached: int = 0, output: int = 10) -> ClaimedJob:
    return ClaimedJob(
        job_id=job_id,
        batch_id="batch_1",
        endpoint="/v1/chat/completions",
        body=b"{}",
        salt="aa",
        prefix_key=b"",
        prompt_tokens=prompt,
        predicted_output_tokens=output,
        predicted_cached_tokens=cached,
        first_of_group=False,
        tries=0,
        crashes=0,
        queued_ms=0,
    )


def waiting(
    claim: Claim, job: ClaimedJob, position: int = 0, sink: Callable[[Ended], None] = lambda ended: None
) -> Waiting:
    return Waiting(claim=claim, job=job, position=position, sink=sink)
