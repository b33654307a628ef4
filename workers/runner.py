"""One cohort, from the claim to its end: runs in a Celery thread, talks to the feeder and to Postgres."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from service.core.model import LineErrorCode, Priority
from service.core.retry import Retry, RetryLimits, TransportError, decide
from service.errors import FenceLost
from service.store import cohorts, results
from service.store.cohorts import Claim, ClaimedJob
from service.store.results import FinishedJob
from service.store.session import DATABASE_AWAY, Database, first_line
from workers.engines.base import EngineReply
from workers.feeder import Crashed, Disconnected, Ended, TimedOut, Unfed, Waiting
from workers.life import Life
from workers.outcomes import MAX_CRASHES, finished_job, given_up

log = logging.getLogger(__name__)
T = TypeVar("T")

_FLUSH_JOBS = 64
_FLUSH_SECONDS = 0.15
# A retry that waits longer goes back to the backlog, so that it keeps no cohort open.
_LONGEST_WAIT_HERE_SECONDS = 5.0
_DATABASE_WAIT_SECONDS = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    """Put into the queue when the fence is lost: the runner wakes, writes nothing and leaves."""


class CohortRun:
    """A claimed cohort while it runs. `lose` may be called from any thread; the rest is the runner's own."""

    def __init__(
        self, database: Database, life: Life, claim: Claim, jobs: Sequence[ClaimedJob] = (), *, job_tries: int
    ) -> None:
        """`jobs` are those of the claimed cohort that have no result, in planned order."""
        self.claim = claim
        self._jobs = jobs
        self._database = database
        self._life = life
        self._limits = RetryLimits(attempts=job_tries)
        self._inbox: queue.SimpleQueue[Ended | _Lost] = queue.SimpleQueue()
        self._is_lost = threading.Event()
        self._open: dict[int, Waiting] = {}  # by job id: not ended yet
        self._leader: int | None = None  # id of the first job
        self._tries: dict[int, int] = {}
        self._crashed: list[int] = []
        self._unfed = 0

    @property
    def is_lost(self) -> bool:
        return self._is_lost.is_set()

    def lose(self, reason: str = "lease lost") -> None:
        """The fence is lost, or is left to expire: drop everything of this cohort. Idempotent."""
        if not self._is_lost.is_set():
            self._is_lost.set()
            log.warning("%s: cohort=%d attempt=%d", reason, self.claim.cohort_id, self.claim.attempt)
            self._life.call(self._life.feeder.drop, self.claim)
            self._inbox.put(_Lost())

    def feed(self) -> None:
        """Hand the jobs to the feeder."""
        with self._dropped_on_failure():
            jobs, self._jobs = self._jobs, ()  # their bodies are kept no longer than they wait
            self._feed(jobs)

    def run(self) -> None:
        """Record every result, then end the cohort or give the rest back."""
        with self._dropped_on_failure(), self._withdrawn_at_the_end():
            if self._is_lost.is_set():
                return
            while self._open:
                self._settle(self._collect())
            self._end()

    @contextmanager
    def _withdrawn_at_the_end(self) -> Iterator[None]:
        """What has not ended by then does not run here."""
        try:
            yield
        finally:
            self._life.watch.leave(item.job for item in self._open.values())

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        """Whatever ends this run early, its jobs leave the feeder: nobody would read how they end."""
        try:
            yield
        except FenceLost:
            self.lose()
        except BaseException as error:
            self.lose(f"dropped after {type(error).__name__}, its lease will expire")
            raise

    def _feed(self, jobs: Sequence[ClaimedJob]) -> None:
        unrun = {job.job_id: code for job in jobs if (code := _reason_not_to_run(job)) is not None}
        self._record([given_up(job, unrun[job.job_id]) for job in jobs if job.job_id in unrun])
        items = [
            Waiting(claim=self.claim, job=job, position=position, sink=self._inbox.put)
            for position, job in enumerate(jobs)
            if job.job_id not in unrun
        ]
        self._open = {item.job.job_id: item for item in items}
        self._leader = items[0].job.job_id if items else None
        self._life.watch.expect(item.job for item in items)
        self._tries = {job.job_id: job.tries for job in jobs}
        self._life.call(self._life.feeder.add, items)

    def _collect(self) -> list[Ended]:
        """What ended: at least one, and at most what one transaction takes. An interactive result waits for none."""
        window = 0.0 if self.claim.priority == Priority.INTERACTIVE else _FLUSH_SECONDS
        ended = [self._alive(self._inbox.get())]
        deadline = time.monotonic() + window
        while len(ended) < min(_FLUSH_JOBS, len(self._open)):
            try:
                ended.append(self._alive(self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))))
            except queue.Empty:
                break
        return ended

    def _alive(self, item: Ended | _Lost) -> Ended:
        if isinstance(item, _Lost):
            raise FenceLost(f"cohort={self.claim.cohort_id}")
        return item

    def _settle(self, ended: list[Ended]) -> None:
        finished = [result for item in ended if (result := self._judge(item)) is not None]
        self._record(finished)

    def _judge(self, item: Ended) -> FinishedJob | None:
        """The result to record; None where the job is fed again, was given back, or is to be released."""
        job = item.job
        if isinstance(item.ending, Crashed | Unfed) and not item.relayed:
            if isinstance(item.ending, Crashed):
                self._crashed.append(job.job_id)
            self._unfed += 1
            self._leave(job)
            return None
        failure = _failure(item)
        if failure is not None and not item.relayed and self._retries(job, failure, item):
            return None
        del self._open[job.job_id]
        return finished_job(item, self.claim, self._life, leads=job.job_id == self._leader)

    def _leave(self, job: ClaimedJob) -> None:
        """It runs here no more."""
        del self._open[job.job_id]
        self._life.watch.leave([job])

    def _retries(self, job: ClaimedJob, failure: int | TransportError, item: Ended) -> bool:
        self._tries[job.job_id] += 1
        answer = decide(
            failure,
            attempt=self._tries[job.job_id],
            elapsed_seconds=0.0,
            deadline_seconds=None,  # the heartbeat ends what is past its deadline, whatever it waits for
            jitter=random.random(),
            retry_after_seconds=item.ending.retry_after_seconds if isinstance(item.ending, EngineReply) else None,
            limits=self._limits,
        )
        if not isinstance(answer, Retry):
            return False
        log.info("retry: job=%d try=%d after=%.1fs", job.job_id, self._tries[job.job_id], answer.after_seconds)
        if answer.after_seconds <= _LONGEST_WAIT_HERE_SECONDS:
            waiting = self._open[job.job_id]
            self._life.call(
                self._life.feeder.add_later, waiting, answer.after_seconds, is_suspect=_may_be_death(failure)
            )
            return True
        delay = answer.after_seconds
        # False: it went back by an earlier try, whose answer was lost.
        self._patiently(lambda conn: cohorts.return_job(conn, self.claim, job.job_id, delay))
        self._leave(job)
        return True

    def _record(self, finished: list[FinishedJob]) -> None:
        if finished:
            self._patiently(lambda conn: results.record(conn, self.claim, finished))

    def _end(self) -> None:
        if not self._unfed and self._patiently(lambda conn: cohorts.finish(conn, self.claim)):
            log.info("cohort done: cohort=%d attempt=%d", self.claim.cohort_id, self.claim.attempt)
            return
        reason = "the engine died" if self._crashed else "not finished here"
        crashed = tuple(self._crashed)
        # A failure only where its own jobs were in flight: the others did nothing to kill the engine.
        self._patiently(
            lambda conn: cohorts.release(conn, self.claim, reason=reason, failure=bool(crashed), crashed_jobs=crashed)
        )
        log.info("cohort released: cohort=%d jobs=%d crashed=%d", self.claim.cohort_id, self._unfed, len(crashed))

    def _patiently(self, work: Callable[[sa.Connection], T]) -> T:
        return patiently(self._database, work, self._is_lost)


def _reason_not_to_run(job: ClaimedJob) -> LineErrorCode | None:
    if job.is_cancelled:
        return LineErrorCode.BATCH_CANCELLED
    return LineErrorCode.ENGINE_CRASH if job.crashes >= MAX_CRASHES else None


def patiently(database: Database, work: Callable[[sa.Connection], T], is_lost: threading.Event) -> T:
    """`work` in a transaction, again and again while the database is away. Raises FenceLost once `is_lost` is set.

    Finished results wait meanwhile, bounded by their cohort (the feeder pauses after one lease without renewal); the
    fence decides whether they still count.
    """
    tries = 0
    while not is_lost.is_set():
        try:
            return database.run(work)
        except DATABASE_AWAY as error:
            log.warning("the database is away, results wait: %s", first_line(error))
            is_lost.wait(_DATABASE_WAIT_SECONDS[min(tries, len(_DATABASE_WAIT_SECONDS) - 1)])
            tries += 1
    raise FenceLost("(while the database was away)")


def _failure(item: Ended) -> int | TransportError | None:
    """What core.retry judges; None where the job ended for good."""
    if isinstance(item.ending, EngineReply):
        return None if 200 <= item.ending.status_code < 300 else item.ending.status_code
    if isinstance(item.ending, TimedOut):
        return TransportError.TIMEOUT
    if isinstance(item.ending, Disconnected):
        return TransportError.CONNECTION
    return None


def _may_be_death(failure: int | TransportError) -> bool:
    """What a job sees of the death of its engine, which may be known a moment later."""
    return failure is TransportError.CONNECTION or (isinstance(failure, int) and failure >= 500)
