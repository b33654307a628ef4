"""The worker's one Celery task: a message names a cohort, the owner runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from celery import Celery

from service.broker import COHORT_TASK, MOST_DISPATCHES, MOST_ID

log = logging.getLogger(__name__)


def read_message(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[int, int] | None:
    """(cohort id, dispatch number); None for anything else, which no retry would mend."""
    if kwargs or len(args) != 2:
        return None
    cohort_id, dispatch_no = args
    if type(cohort_id) is not int or type(dispatch_no) is not int:
        return None
    if not (1 <= cohort_id < MOST_ID and 1 <= dispatch_no < MOST_DISPATCHES):
        return None
    return cohort_id, dispatch_no


def register(app: Celery, run_cohort: Callable[[int, int], None]) -> None:
    """Bind the task to its runner."""

    @app.task(name=COHORT_TASK)  # type: ignore[untyped-decorator]
    def cohort(*args: object, **kwargs: object) -> None:
        message = read_message(args, kwargs)
        if message is None:
            log.warning("malformed message dropped: %d arguments", len(args) + len(kwargs))
            return
        run_cohort(*message)
