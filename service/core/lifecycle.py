"""Which status may follow which, as data: the stores' guards and the tests both read it."""

from __future__ import annotations

from service.core.model import BatchStatus, CohortState

BATCH_ARROWS: dict[BatchStatus, frozenset[BatchStatus]] = {
    BatchStatus.VALIDATING: frozenset(
        {BatchStatus.IN_PROGRESS, BatchStatus.FAILED, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
    ),
    BatchStatus.IN_PROGRESS: frozenset(
        {BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED, BatchStatus.FAILED}
    ),
    BatchStatus.FINALIZING: frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED}),
    BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED, BatchStatus.FAILED}),
    BatchStatus.COMPLETED: frozenset(),
    BatchStatus.FAILED: frozenset(),
    BatchStatus.EXPIRED: frozenset(),
    BatchStatus.CANCELLED: frozenset(),
}

COHORT_ARROWS: dict[CohortState, frozenset[CohortState]] = {
    CohortState.READY: frozenset({CohortState.DISPATCHED, CohortState.DEAD, CohortState.DONE}),
    CohortState.DISPATCHED: frozenset({CohortState.RUNNING, CohortState.READY, CohortState.DISPATCHED}),
    CohortState.RUNNING: frozenset({CohortState.DONE, CohortState.READY}),
    CohortState.DONE: frozenset(),
    CohortState.DEAD: frozenset(),
}


def sources_of(target: BatchStatus) -> list[BatchStatus]:
    """The statuses from which a batch may become `target`, for the WHERE of its UPDATE."""
    return [source for source, targets in BATCH_ARROWS.items() if target in targets]
