"""Cache statistics over job_result: per instance, per prefix group, per batch, and the misses by cause.

A row whose cached tokens are null counts in `jobs` and in no sum of tokens, so a hit rate is never mixed with
guesses: null is "the engine did not say", which is not 0. Where the job succeeded it counts in `unknown_jobs` too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy import func

from service.core.alarm import Mismatch
from service.core.model import BootState, MissCause, Outcome
from service.core.prefix import group_label, neighbour_shared_tokens, prefix_groups, sort_order
from service.store.tables import batch, instance_boot, job, job_result, line_error

SIMULATED = "simulated"
_SUMMED = ("prompt_tokens", "cached_tokens", "predicted_cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Token sums over the rows whose cached tokens are known."""

    jobs: int = 0  # every row, known or not
    unknown_jobs: int = 0  # of `jobs`: answered, and the engine did not say what came from its cache
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached / prompt tokens; None where nothing is known."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStats:
    """One instance under one kind of engine, over all its boots."""

    name: str
    engine: str
    model: str
    boots: int
    key_mismatch: bool  # in some boot our tokens were not the engine's
    alarm: Mismatch | None  # of the boot that lives
    tokens: TokenSums

    @property
    def is_simulated(self) -> bool:
        return self.engine == SIMULATED


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """The jobs of a batch that begin alike."""

    label: str
    jobs: int  # with and without a result
    shared_tokens: int  # what every one of them begins with, rounded down to a rung of the key
    tokens: TokenSums  # over the jobs that have a result


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """One batch: its lines by outcome, its tokens, and the most that any schedule could have served from cache."""

    batch_id: str
    status: str
    models: tuple[str, ...]
    total: int
    succeeded: int
    failed: int
    skipped: int  # lines that never became jobs
    cancelled: int
    expired: int
    tokens: TokenSums
    reasoning_tokens: int
    planned_prompt_tokens: int  # of every job of the batch, as tokenised at intake
    bound_tokens: int | None  # None until intake is done
    prefix_groups: int | None
    simulated_jobs: int  # answered by a simulated engine
    key_mismatch: bool

    @property
    def unfinished(self) -> int:
        return self.total - self.succeeded - self.failed - self.skipped - self.cancelled - self.expired

    @property
    def bound_rate(self) -> float | None:
        """bound_tokens / planned_prompt_tokens; None until intake is done."""
        if self.bound_tokens is None or not self.planned_prompt_tokens:
            return None
        return self.bound_tokens / self.planned_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MissStats:
    """Jobs with one miss cause, or all jobs. Tokens are those of rows whose cached tokens are known."""

    cause: MissCause | None  # None: whatever the cause, and without one
    jobs: int
    prompt_tokens: int
    computed_tokens: int  # prompt tokens that the engine had to compute
    short_tokens: int  # missing: predicted as cached and computed all the same


_KNOWN = job_result.c.cached_tokens.is_not(None)
_SUCCEEDED = job_result.c.outcome == Outcome.SUCCEEDED


def _known_sum(column: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return func.coalesce(func.sum(column).filter(_KNOWN), 0)


_TOKEN_COLUMNS = (
    func.count(job_result.c.job_id).label("jobs"),
    func.count(job_result.c.job_id).filter(~_KNOWN, _SUCCEEDED).label("unknown_jobs"),
    _known_sum(job_result.c.prompt_tokens).label("prompt_tokens"),
    _known_sum(job_result.c.cached_tokens).label("cached_tokens"),
    _known_sum(job_result.c.predicted_cached_tokens).label("predicted_cached_tokens"),
    _known_sum(job_result.c.completion_tokens).label("completion_tokens"),
)


def instance_stats(conn: sa.Connection, batch_id: str | None = None) -> list[InstanceStats]:
    """By name. With `batch_id`: only its jobs, and only instances that answered some; without: every instance."""
    joined = job_result.c.instance_boot_id == instance_boot.c.id
    if batch_id is not None:
        joined = sa.and_(joined, job_result.c.batch_id == batch_id)
    rows = conn.execute(
        sa.select(
            instance_boot.c.name,
            instance_boot.c.engine,
            instance_boot.c.model,
            func.count(sa.distinct(instance_boot.c.id)).label("boots"),
            _any_mismatch(),
            func.max(instance_boot.c.alarm).filter(instance_boot.c.state != BootState.GONE).label("alarm"),
            *_TOKEN_COLUMNS,
        )
        .select_from(instance_boot.join(job_result, joined, isouter=batch_id is None))
        .group_by(instance_boot.c.name, instance_boot.c.engine, instance_boot.c.model)
        .order_by(instance_boot.c.name, instance_boot.c.engine, instance_boot.c.model)
    )
    return [
        InstanceStats(
            name=row.name,
            engine=row.engine,
            model=row.model,
            boots=row.boots,
            key_mismatch=row.key_mismatch,
            alarm=Mismatch(row.alarm) if row.alarm else None,
            tokens=_tokens(row),
        )
        for row in rows
    ]


def group_stats(conn: sa.Connection, batch_id: str) -> list[GroupStats]:
    """Prefix groups of a batch in key order, over its jobs that have keys; results are counted as far as they are."""
    jobs = conn.execute(
        sa.select(
            job.c.prefix_key,
            job.c.prompt_tokens.label("planned_tokens"),
            job_result.c.outcome,
            *(job_result.c[name] for name in _SUMMED),
        )
        .select_from(job.outerjoin(job_result, job_result.c.job_id == job.c.id))
        .where(job.c.batch_id == batch_id)
        .order_by(job.c.id)
    ).all()
    lengths = np.array([row.planned_tokens for row in jobs], dtype=np.int64)
    order = sort_order([row.prefix_key for row in jobs], lengths)
    ordered = [jobs[place] for place in order.tolist()]
    keys = [row.prefix_key for row in ordered]
    numbers = prefix_groups(keys, lengths[order])
    shared = neighbour_shared_tokens(keys).tolist()
    members: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers.tolist()):
        members[number].append(place)
    return [_group(places, ordered, shared) for places in members.values()]


def batch_stats(conn: sa.Connection, batch_id: str) -> BatchStats | None:
    """One batch; None where there is none of this id."""
    head = conn.execute(sa.select(batch).where(batch.c.id == batch_id)).one_or_none()
    if head is None:
        return None
    results, planned = _results_of(conn, batch_id), _planned_of(conn, batch_id)
    return BatchStats(
        batch_id=batch_id,
        status=head.status,
        models=tuple(sorted(planned.models or ())),
        total=head.total,
        succeeded=results.succeeded,
        failed=results.failed,
        skipped=_skipped(conn, batch_id) if head.total else 0,
        cancelled=results.cancelled,
        expired=results.expired,
        tokens=_tokens(results),
        reasoning_tokens=int(results.reasoning_tokens),
        planned_prompt_tokens=int(planned.prompt_tokens),
        bound_tokens=head.bound_tokens,
        prefix_groups=head.prefix_groups,
        simulated_jobs=results.simulated_jobs,
        key_mismatch=results.key_mismatch,
    )


def planned_tokens(conn: sa.Connection, batch_id: str) -> int:
    """Prompt tokens of every job of a batch, as intake counted them: what its bound is a part of."""
    return int(_planned_of(conn, batch_id).prompt_tokens)


def recent_batches(conn: sa.Connection, limit: int = 20) -> list[str]:
    """Ids of the newest batches of all tenants, newest first."""
    newest = sa.select(batch.c.id).order_by(batch.c.created_at.desc(), batch.c.id.desc()).limit(limit)
    return list(conn.execute(newest).scalars())


def miss_stats(conn: sa.Connection, batch_id: str | None = None) -> list[MissStats]:
    """Jobs by miss cause, the cause with most computed tokens first. Rows without a cause are not here."""
    query = (
        sa.select(job_result.c.miss_cause, *_MISS_COLUMNS)
        .where(job_result.c.miss_cause.is_not(None))
        .group_by(job_result.c.miss_cause)
        .order_by(sa.desc("computed_tokens"), job_result.c.miss_cause)
    )
    if batch_id is not None:
        query = query.where(job_result.c.batch_id == batch_id)
    return [_misses(row, MissCause(row.miss_cause)) for row in conn.execute(query)]


def miss_totals(conn: sa.Connection, batch_id: str | None = None) -> MissStats:
    """Of all jobs that an engine answered, whatever the cause and without one: what the sums by cause are part of."""
    query = sa.select(*_MISS_COLUMNS).where(_SUCCEEDED)
    if batch_id is not None:
        query = query.where(job_result.c.batch_id == batch_id)
    return _misses(conn.execute(query).one(), None)


_MISS_COLUMNS = (
    func.count().label("jobs"),
    _known_sum(job_result.c.prompt_tokens).label("prompt_tokens"),
    _known_sum(job_result.c.prompt_tokens - job_result.c.cached_tokens).label("computed_tokens"),
    _known_sum(func.greatest(job_result.c.predicted_cached_tokens - job_result.c.cached_tokens, 0)).label(
        "short_tokens"
    ),
)


def _misses(row: Any, cause: MissCause | None) -> MissStats:
    return MissStats(
        cause=cause,
        jobs=row.jobs,
        prompt_tokens=int(row.prompt_tokens),
        computed_tokens=int(row.computed_tokens),
        short_tokens=int(row.short_tokens),
    )


def _any_mismatch() -> sa.ColumnElement[bool]:
    return func.coalesce(func.bool_or(instance_boot.c.key_agrees.is_(False)), False).label("key_mismatch")


def _tokens(row: Any) -> TokenSums:
    return TokenSums(
        jobs=row.jobs, unknown_jobs=row.unknown_jobs, **{name: int(getattr(row, name)) for name in _SUMMED}
    )


def _results_of(conn: sa.Connection, batch_id: str) -> Any:
    """Counts by outcome and token sums of one batch, as one row."""
    by_outcome = {outcome: func.count().filter(job_result.c.outcome == outcome) for outcome in Outcome}
    return conn.execute(
        sa.select(
            *(count.label(outcome) for outcome, count in by_outcome.items()),
            _known_sum(job_result.c.reasoning_tokens).label("reasoning_tokens"),
            func.count().filter(instance_boot.c.engine == SIMULATED).label("simulated_jobs"),
            _any_mismatch(),
            *_TOKEN_COLUMNS,
        )
        .select_from(job_result.outerjoin(instance_boot, instance_boot.c.id == job_result.c.instance_boot_id))
        .where(job_result.c.batch_id == batch_id)
    ).one()


def _planned_of(conn: sa.Connection, batch_id: str) -> Any:
    """What intake made of one batch: prompt_tokens in sum, and its models."""
    return conn.execute(
        sa.select(
            func.coalesce(func.sum(job.c.prompt_tokens), 0).label("prompt_tokens"),
            func.array_agg(sa.distinct(job.c.model)).label("models"),
        ).where(job.c.batch_id == batch_id)
    ).one()


def _skipped(conn: sa.Connection, batch_id: str) -> int:
    """Invalid lines of a batch that went on without them (a batch that failed validation has total 0)."""
    lines = sa.select(func.count()).select_from(line_error).where(line_error.c.batch_id == batch_id)
    return int(conn.execute(lines).scalar_one())


def _group(places: Sequence[int], ordered: Sequence[sa.Row[Any]], shared: Sequence[int]) -> GroupStats:
    """`places` are neighbours in key order, so the least that two of them share is what all of them share."""
    first = ordered[places[0]]
    depth = min((shared[place] for place in places[1:]), default=first.planned_tokens)
    ended = [ordered[place] for place in places if ordered[place].outcome is not None]
    known = [row for row in ended if row.cached_tokens is not None]
    return GroupStats(
        label=group_label(first.prefix_key, depth),
        jobs=len(places),
        shared_tokens=depth if len(places) > 1 else 0,
        tokens=TokenSums(
            jobs=len(ended),
            unknown_jobs=sum(row.cached_tokens is None and row.outcome == Outcome.SUCCEEDED for row in ended),
            **{name: sum(getattr(row, name) or 0 for row in known) for name in _SUMMED},
        ),
    )
