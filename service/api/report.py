"""`GET /v1/batches/{id}/report`: what a batch's lines cost, what came from caches and what did not, and what failed."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.api.answers import json_answer
from service.api.auth import Caller
from service.api.context import context_of
from service.api.errors import not_found
from service.api.objects import unix
from service.core.errorcount import top_errors
from service.core.ids import BATCH_PREFIX, is_id
from service.store.batches import Progress
from service.store.report import BatchReport, InstanceRun, read_report
from service.store.stats import MissStats

router = APIRouter(prefix="/v1/batches")

_TOKENS = ("prompt_tokens", "cached_tokens", "predicted_cached_tokens", "completion_tokens", "reasoning_tokens")


@router.get("/{batch_id}/report")
def get_report(batch_id: str, request: Request, tenant: Caller) -> Response:
    if not is_id(BATCH_PREFIX, batch_id):
        raise not_found("batch_id")
    with context_of(request).database.transaction() as conn:
        found = read_report(conn, tenant.id, batch_id)
    if found is None:
        raise not_found("batch_id")
    return json_answer(report_object(found))


def report_object(report: BatchReport) -> dict[str, Any]:
    """Until a batch leaves `validating` everything is 0, as in the batch itself."""
    has_begun = report.batch.in_progress_at is not None
    progress = report.progress if has_begun else Progress()
    prompt_tokens = sum(run.prompt_tokens for run in report.instances)
    cached_tokens = sum(run.cached_tokens for run in report.instances)
    return {
        "object": "report",
        "lines": _lines(report, progress),
        "top_errors": [dataclasses.asdict(error) for error in top_errors(report.errors)] if has_begun else [],
        "tokens": {**{name: getattr(progress, name) for name in _TOKENS}, "lines_unknown": progress.lines_unknown},
        "hit_rate": _share(cached_tokens, prompt_tokens),
        "bound": _share(report.batch.bound_tokens, report.planned_prompt_tokens),
        "misses": {row.cause.value: _miss(row) for row in report.misses if row.cause is not None},
        "per_instance": [_instance(run) for run in report.instances],
        "started_at": _extreme(min, [run.started_at for run in report.instances]),
        "finished_at": _finished_at(report),
        "slowest": [
            {"line": row.line_no, "custom_id": row.custom_id, "run_ms": row.run_ms, "instance": row.instance}
            for row in report.slowest
        ],
    }


def _lines(report: BatchReport, progress: Progress) -> dict[str, int]:
    """`skipped` lines are part of `failed`; the others add up to `total`."""
    total = report.batch.total
    return {
        "total": total,
        "completed": progress.completed,
        "failed": progress.failed,
        "skipped": progress.skipped,
        "cancelled": progress.cancelled,
        "expired": progress.expired,
        "unfinished": total - progress.ended,
    }


def _miss(row: MissStats) -> dict[str, int]:
    """As `trunkline stats --misses`: `short_tokens` were predicted from the cache and computed all the same."""
    return {name: getattr(row, name) for name in ("jobs", "prompt_tokens", "computed_tokens", "short_tokens")}


def _instance(run: InstanceRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "jobs": run.jobs,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "hit_rate": run.hit_rate,
        "run_seconds": run.run_seconds,
    }


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _finished_at(report: BatchReport) -> int | None:
    """When the last line was answered; null while lines may still be."""
    if not report.batch.status.is_terminal:
        return None
    return _extreme(max, [run.finished_at for run in report.instances])


def _extreme(choose: Any, moments: list[datetime | None]) -> int | None:
    known = [moment for moment in moments if moment is not None]
    return unix(choose(known)) if known else None
