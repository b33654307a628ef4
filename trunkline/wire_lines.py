"""The lines of a batch as the server shows them one by one; beside `wire`, which holds everything else."""

from __future__ import annotations

from trunkline.wire import Wire


class BatchLine(Wire):
    """Where a line of a batch stands. What was measured is None until it has its result, and where nobody knows it."""

    id: str
    line: int  # the physical line of the input file
    status: str  # queued, running, retrying, succeeded, failed, cancelled, expired or skipped
    custom_id: str | None = None
    attempts: int = 0
    instance: str | None = None
    cohort: int | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    miss_cause: str | None = None
    queue_ms: int | None = None
    run_ms: int | None = None
