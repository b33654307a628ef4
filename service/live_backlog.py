"""The bulk backlog in memory, one policy for each model, kept in step with the tables.

The tables are the truth and this is a reading of them: jobs are read once, in file order, and forgotten when they are
bound to a cohort or their batch stops. Whatever is missed on the way (a job that could not be bound because its batch
was paused at that moment) is read again. A dispatcher that takes over starts with nothing and reads it all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import sqlalchemy as sa

from service.core.classes import PriorityClasses
from service.core.policy import Arrivals, Policy
from service.planner_input import backlog_arrays
from service.store import backlog
from service.store.backlog import OpenBatch, RetryPosition, WaitingJob
from service.store.output_lengths import output_scale
from service.store.session import Database

_CHUNK_JOBS = 10_000  # read in one transaction
_LEAST_LINES = 8_000  # that intake has taken in, before a batch is planned without the rest
_PASS_JOBS = 50_000  # of a tenant and model, read in one pass: then instances are fed before more is read
_RETRIES = 1_000  # read in one transaction
_RETRY_OVERLAP = timedelta(seconds=30)  # longer than a session may be idle in a transaction


@dataclass(slots=True, kw_only=True)
class _Source:
    """What was read of one batch's jobs for one model."""

    batch: OpenBatch
    owner: int  # its number in the policy
    after_id: int = 0
    is_read: bool = False  # to the end, as far as intake had come
    is_cut_short: bool = False  # by the window
    waiting: int = 0  # read, and not bound
    retried: set[int] = field(default_factory=set)  # ids of those that were tried before


class LiveBacklog:
    """Not safe for threads. `window_jobs`: how many jobs of a tenant and model are kept here at most; where that is
    less than its backlog, more are read when half of them are gone."""

    def __init__(self, make_policy: Callable[[], Policy], window_jobs: int) -> None:
        self._make_policy = make_policy
        self._window_jobs = window_jobs
        self._policies: dict[str, PriorityClasses] = {}  # by model
        self._sources: dict[tuple[str, str], _Source] = {}  # by batch id and model
        self._retried_to: dict[str, RetryPosition] = {}  # by model
        self._owners = 0

    def policy(self, model: str) -> PriorityClasses:
        """The policy of a model; made where there is none."""
        if model not in self._policies:
            self._policies[model] = PriorityClasses(self._make_policy)
        return self._policies[model]

    def sync(self, database: Database, models: Iterable[str], now_seconds: float) -> bool:
        """Read what is new for these models, and forget the batches that stopped. True: there is more to read now."""
        open_batches = database.run(lambda conn: backlog.open_batches(conn, min(_LEAST_LINES, self._window_jobs)))
        self._forget_stopped({found.id: found for found in open_batches})
        has_more = False
        for model in models:
            policy = self.policy(model)
            for found in open_batches:
                policy.set_weight(found.tenant_id, float(max(found.weight, 1)))
            for sources in self._by_tenant(model, open_batches).values():
                has_more |= self._read(database, model, sources, now_seconds)
            self._read_retries(database, model, now_seconds)
        return has_more

    def settle(self, database: Database, model: str, job_ids: Sequence[int]) -> None:
        """These jobs were taken from the policy, and what could be bound is bound."""
        for batch_id, taken, missed in database.run(lambda conn: backlog.jobs_by_batch(conn, job_ids)):
            source = self._sources.get((batch_id, model))
            if source is None:
                continue
            source.waiting = max(source.waiting - taken, 0)
            source.retried.difference_update(job_ids)
            if missed:  # paused in between, perhaps: they are in no cohort, and no longer here
                self._forget(batch_id, model)

    def _forget_stopped(self, open_batches: dict[str, OpenBatch]) -> None:
        for (batch_id, model), source in list(self._sources.items()):
            found = open_batches.get(batch_id)
            if found is None or found.order != source.batch.order:
                self._forget(batch_id, model)

    def forget_batches(self, batch_ids: Collection[str]) -> None:
        """Jobs of theirs that were bound are not bound any more (a pause): the next pass reads these batches anew."""
        for batch_id, model in [key for key in self._sources if key[0] in batch_ids]:
            self._forget(batch_id, model)

    def _forget(self, batch_id: str, model: str) -> None:
        """The next pass reads the batch from its beginning, if it is open then."""
        self.policy(model).drop(self._sources.pop((batch_id, model)).owner)
        self._retried_to.pop(model, None)

    def reset(self, model: str) -> None:
        """Forget all of a model: planning it failed. The next pass reads it anew."""
        self._policies.pop(model, None)
        self._sources = {key: source for key, source in self._sources.items() if key[1] != model}
        self._retried_to.pop(model, None)

    def _by_tenant(self, model: str, open_batches: Sequence[OpenBatch]) -> dict[tuple[int, int], list[_Source]]:
        """(tenant, class) -> sources of a model, the earliest deadline first, each told how far intake has come."""
        found: dict[tuple[int, int], list[_Source]] = defaultdict(list)
        for of_batch in open_batches:
            key = (of_batch.id, model)
            if key not in self._sources:
                self._owners += 1
                self._sources[key] = _Source(batch=of_batch, owner=self._owners)
                self._retried_to.pop(model, None)  # it may have jobs whose time came while it was paused
            source = self._sources[key]
            if source.batch.intake_line != of_batch.intake_line:
                source.is_read = False
            source.batch = of_batch
            found[of_batch.tenant_id, of_batch.priority].append(source)
        return found

    def _read(self, database: Database, model: str, sources: Sequence[_Source], now_seconds: float) -> bool:
        """Some chunks of a tenant's batches of a class. True where there is room for more of them."""
        waiting = sum(source.waiting for source in sources)
        if any(source.is_cut_short for source in sources) and waiting > self._window_jobs // 2:
            return False
        end = min(waiting + _PASS_JOBS, self._window_jobs)
        for source in sources:
            while not source.is_read and waiting < end:
                waiting += self._read_chunk(database, model, source, self._window_jobs - waiting, now_seconds)
            source.is_cut_short = not source.is_read and waiting >= self._window_jobs
        return end <= waiting < self._window_jobs

    def _read_chunk(self, database: Database, model: str, source: _Source, room: int, now_seconds: float) -> int:
        limit = min(room, _CHUNK_JOBS)
        batch_id = source.batch.id

        def read(conn: sa.Connection) -> tuple[list[WaitingJob], float]:
            jobs = backlog.jobs_after(conn, batch_id, model, source.after_id, limit)
            return jobs, output_scale(conn, [batch_id])[batch_id]

        jobs, scale = database.run(read)
        if jobs:
            source.after_id = jobs[-1].job_id
            self._add(model, source, jobs, now_seconds, scale)
        source.is_read = len(jobs) < limit
        return len(jobs)

    def _read_retries(self, database: Database, model: str, now_seconds: float) -> None:
        """Those whose time came since a little before the last look: what commits late is not missed."""
        position = self._retried_to.get(model, RetryPosition())
        latest, is_read = position.not_before, False
        if position != RetryPosition():
            position = RetryPosition(not_before=position.not_before - _RETRY_OVERLAP)
        while not is_read:
            found = database.run(partial(backlog.jobs_to_retry, model=model, after=position, limit=_RETRIES))
            is_read = len(found) < _RETRIES
            for item in found:
                position, latest = item.position, max(latest, item.position.not_before)
                source = self._sources.get((item.batch_id, model))
                if source is not None and item.job.job_id not in source.retried:
                    source.retried.add(item.job.job_id)
                    self._add(model, source, [item.job], now_seconds)
        self._retried_to[model] = RetryPosition(not_before=latest)

    def _add(
        self, model: str, source: _Source, jobs: Sequence[WaitingJob], now_seconds: float, scale: float = 1.0
    ) -> None:
        n = len(jobs)
        arrivals = Arrivals(
            jobs=backlog_arrays(jobs, scale),
            owners=np.full(n, source.owner, dtype=np.int64),
            flows=np.full(n, source.batch.tenant_id, dtype=np.int64),
            deadlines=np.full(n, now_seconds + source.batch.seconds_left),
            priorities=np.full(n, source.batch.priority, dtype=np.int64),
        )
        self.policy(model).add(arrivals, now_seconds)
        source.waiting += n
