"""The feeder: which job goes to the engine next, and how many at once. One per boot, on the worker's event loop."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from service.core.model import Outcome, Priority
from service.store.cohorts import Claim, ClaimedJob
from workers.engines.base import Engine, EngineGone, EngineReply, EngineRequest, EngineTimeout, EventSink
from workers.streams import Outlet, Streams

log = logging.getLogger(__name__)

_CLASS_STEP = 2**40  # classes never overlap: a boot hands out fewer sequence numbers than this
_AHEAD = 4  # jobs waiting at the engine beyond its running set; deeper prefetch costs 10 % of the hits
_KEPT_FOR_INTERACTIVE = 2
# How long a failed submission waits to learn whether the engine died: its keeper takes up to 3 s to say so.
_DEATH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The job was taken off, waiting or in flight, because it is cancelled or past its deadline."""

    outcome: Outcome


class Unfed:
    """The job never reached the engine, or was taken back from it by a drain: it runs again, elsewhere."""


class Crashed:
    """The job was in flight when the engine died."""


class TimedOut:
    """The engine did not answer in time."""


class Disconnected:
    """The connection failed, and the engine lives."""


Ending = EngineReply | Aborted | Unfed | Crashed | TimedOut | Disconnected


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one submission of a job ended. `run_seconds` is 0 for one that was never fed."""

    job: ClaimedJob
    ending: Ending
    run_seconds: float
    ended_at: float  # the loop's clock, which is time.monotonic
    relayed: bool = False  # its client has a part of the answer: it is not run again


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """One submission of a job, sorted by `order`. Compared by identity: a job may be claimed again while an earlier
    submission of it, whose fence was lost, is still being aborted."""

    claim: Claim
    job: ClaimedJob
    position: int  # in the cohort's planned order
    sink: Callable[[Ended], None]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Class, then the planned order: a lower tuple goes first."""
        return (-self.claim.priority, self.claim.sequence, self.claim.cohort_id, self.position)


class Admission:
    """Who may enter the engine now. Pure: no clock, no I/O.

    In planned order and never past a job that does not fit, since to overtake is to break up prefix groups. In flight
    is what fits the KV cache (at least one job), at most `max_num_seqs` + 4, of which bulk jobs leave two to
    interactive ones. A job of an `alone` cohort (a suspect of two engine deaths) runs beside nothing.
    """

    def __init__(self, *, max_num_seqs: int, kv_capacity_tokens: int | None, max_model_len: int | None = None) -> None:
        self._limit = max_num_seqs + _AHEAD
        self._capacity = kv_capacity_tokens
        self._max_model_len = max_model_len
        self._heap: list[tuple[tuple[int, int, int, int], int, Waiting]] = []
        self._ties = itertools.count()
        self._running: dict[Waiting, None] = {}  # oldest first

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._heap)

    def add(self, item: Waiting) -> None:
        heapq.heappush(self._heap, (item.order, next(self._ties), item))

    def take(self) -> Waiting | None:
        """The next job, now counted as in flight; None where nobody may enter."""
        if not self._heap or not self._may_enter(self._heap[0][2]):
            return None
        item = heapq.heappop(self._heap)[2]
        self._running[item] = None
        return item

    def leave(self, item: Waiting) -> None:
        del self._running[item]

    def remove(self, wanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Take waiting jobs off, in order."""
        removed = sorted((entry for entry in self._heap if wanted(entry[2])), key=lambda entry: entry[:2])
        self._heap = [entry for entry in self._heap if not wanted(entry[2])]
        heapq.heapify(self._heap)
        return [entry[2] for entry in removed]

    def _may_enter(self, item: Waiting) -> bool:
        if not self._running:
            return True
        if item.claim.alone or any(other.claim.alone for other in self._running):
            return False
        kept = 0 if item.claim.priority == Priority.INTERACTIVE else _KEPT_FOR_INTERACTIVE
        if len(self._running) >= self._limit - kept:
            return False
        return self._capacity is None or self._held_tokens() + self._need_tokens(item.job) <= self._capacity

    def _need_tokens(self, job: ClaimedJob) -> int:
        """KV cache it adds to what its prefix neighbours hold already. No answer is longer than the model allows."""
        output_tokens = job.predicted_output_tokens
        if self._max_model_len is not None:
            output_tokens = min(output_tokens, max(0, self._max_model_len - job.prompt_tokens))
        return max(1, job.prompt_tokens - job.predicted_cached_tokens) + output_tokens

    def _held_tokens(self) -> int:
        """What is in flight, with the prefix that the oldest found in the cache: the others' came from their elders."""
        oldest = next(iter(self._running))
        return oldest.job.predicted_cached_tokens + sum(self._need_tokens(item.job) for item in self._running)


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Ending]
    began: float
    ending: Ending | None = None  # set before the task is cancelled: why
    silent: bool = False  # nobody waits for its end any more
    outlet: Outlet | None = None  # of a streamed answer

    @property
    def relayed(self) -> bool:
        return self.outlet is not None and self.outlet.has_relayed


@dataclass(slots=True)
class Feeder:
    """Feeds one engine. Every method runs on the event loop; sinks are called there and must not block."""

    engine: Engine
    admission: Admission
    timeout_seconds: float
    death_seconds: float = _DEATH_SECONDS
    streams: Streams | None = None  # None: no answer is relayed, only recorded
    _flights: dict[Waiting, _Flight] = field(default_factory=dict)
    _later: dict[Waiting, asyncio.TimerHandle] = field(default_factory=dict)
    _suspects: set[Waiting] = field(default_factory=set)  # to be fed again after they failed as in a death
    _doubts: int = 0  # submissions that failed so, while the engine is asked whether it lives
    _question: asyncio.Task[bool] | None = None
    _sequence: itertools.count[int] = field(default_factory=itertools.count)
    _is_open: bool = True
    _is_paused: bool = False
    _dead: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def running(self) -> int:
        return self.admission.running

    @property
    def waiting(self) -> int:
        return self.admission.waiting + len(self._later)

    def add(self, items: Iterable[Waiting]) -> None:
        for item in items:
            if self._is_open:
                self.admission.add(item)
            else:
                self._end(item, Unfed())
        self._pump()

    def add_later(self, item: Waiting, delay_seconds: float, *, is_suspect: bool = False) -> None:
        """Feed a job again after a while (a retry). `is_suspect`: it failed as jobs do whose engine is dying (5xx, or
        no connection), so it crashed should the engine be dead before it is fed again."""
        if not self._is_open:
            self._end(item, Crashed() if is_suspect and self._dead.is_set() else Unfed())
            return
        if is_suspect:
            self._suspects.add(item)
        self._later[item] = asyncio.get_running_loop().call_later(delay_seconds, self._due, item)

    def pause(self, is_paused: bool) -> None:
        """While paused nothing new is fed: this worker's leases may be lost."""
        self._is_paused = is_paused
        self._pump()

    def abort(self, outcomes: Mapping[int, Outcome]) -> None:
        """End jobs that are cancelled or past their deadline, waiting or in flight."""
        for item in self._take_off(lambda item: item.job.job_id in outcomes):
            self._end(item, Aborted(outcome=outcomes[item.job.job_id]))
        for item, flight in self._flights.items():
            if item.job.job_id in outcomes:
                self._cancel(flight, Aborted(outcome=outcomes[item.job.job_id]))
        self._pump()

    def drop(self, claim: Claim) -> None:
        """Forget a cohort whose fence is lost: nobody waits for its jobs any more. A newer claim of it stays."""
        self._take_off(lambda item: item.claim == claim)
        for item, flight in self._flights.items():
            if item.claim == claim:
                flight.silent = True
                self._cancel(flight, Unfed())
        self._pump()

    def close(self) -> None:
        """Feed nothing more; what waits is handed back, what is in flight goes on. Idempotent."""
        self._is_open = False
        for item in self._take_off(lambda item: True):
            self._end(item, Unfed())

    def take_back(self) -> None:
        """Abort what is in flight, to run elsewhere: the grace of a drain is over."""
        self.close()
        self._cancel_all(Unfed())

    def die(self) -> None:
        """The engine is dead: what was in flight crashed, and what had just failed and was to be fed again."""
        self._dead.set()
        self._is_open = False
        for item in self._take_off(lambda item: item in self._suspects):
            self._end(item, Crashed())
        self.close()
        self._cancel_all(Crashed())

    def _take_off(self, wanted: Callable[[Waiting], bool]) -> list[Waiting]:
        late = [item for item in self._later if wanted(item)]
        for item in late:
            self._later.pop(item).cancel()
        taken = self.admission.remove(wanted) + late
        self._suspects.difference_update(taken)
        return taken

    def _due(self, item: Waiting) -> None:
        del self._later[item]
        self.add([item])

    def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while self._may_feed() and (item := self.admission.take()) is not None:
            self._suspects.discard(item)
            task = loop.create_task(self._submit(item))
            self._flights[item] = _Flight(task=task, began=loop.time())
            # A callback, not a `finally` in the task: a task cancelled before its first step never enters its body.
            task.add_done_callback(functools.partial(self._landed, item))

    def _may_feed(self) -> bool:
        """Not while the engine may be dying: each job fed now would be taken for one of those that killed it."""
        return self._is_open and not self._is_paused and not self._doubts

    def _cancel_all(self, ending: Ending) -> None:
        for flight in self._flights.values():
            self._cancel(flight, ending)
        if self._question is not None:
            self._question.cancel()

    def _cancel(self, flight: _Flight, ending: Ending) -> None:
        if flight.ending is None:
            flight.ending = ending
            flight.task.cancel()

    def _landed(self, item: Waiting, task: asyncio.Task[Ending]) -> None:
        flight = self._flights.pop(item)
        self.admission.leave(item)
        if task.cancelled():
            ending = flight.ending or Unfed()
        elif (error := task.exception()) is not None:
            log.error("a submission failed: job=%d error=%r", item.job.job_id, type(error), exc_info=error)
            ending = Disconnected()
        else:
            ending = task.result()
        if not flight.silent:
            self._end(item, ending, flight.began, relayed=flight.relayed)
        self._pump()

    async def _submit(self, item: Waiting) -> Ending:
        try:
            reply = await self._ask(item)
        except EngineTimeout:
            return TimedOut()
        except EngineGone:
            return await self._unless_dying(Disconnected())
        return reply if reply.status_code < 500 else await self._unless_dying(reply)

    def _ask(self, item: Waiting) -> Awaitable[EngineReply]:
        request = self._request(item)
        if item.job.stream_to is None or self.streams is None:
            return self.engine.submit(request)
        outlet = self._flights[item].outlet = self.streams.open(item.job.stream_to)

        def streamed(events: EventSink) -> Awaitable[EngineReply]:
            return self.engine.submit(replace(request, events=events))

        return self.streams.relay(outlet, streamed)

    async def _unless_dying(self, ending: Ending) -> Ending:
        """`ending`, or Crashed: an engine whose core died answers 500 to all that it has, and only then exits."""
        self._doubts += 1
        try:
            if await self._is_engine_alive():
                return ending
            await asyncio.wait_for(self._dead.wait(), self.death_seconds)
        except TimeoutError:
            return ending
        finally:
            self._doubts -= 1
        return Crashed()

    async def _is_engine_alive(self) -> bool:
        """Asked once for all that doubt it at the same time."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self.engine.is_alive())
        return await asyncio.shield(self._question)

    def _request(self, item: Waiting) -> EngineRequest:
        job = item.job
        return EngineRequest(
            job_id=job.job_id,
            endpoint=job.endpoint,
            body=job.body,
            salt=job.salt,
            priority=(Priority.INTERACTIVE - item.claim.priority) * _CLASS_STEP + next(self._sequence),
            prefix_key=job.prefix_key,
            prompt_tokens=job.prompt_tokens,
            expected_output_tokens=job.predicted_output_tokens,
            timeout_seconds=self.timeout_seconds,
        )

    def _end(self, item: Waiting, ending: Ending, began: float | None = None, *, relayed: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        run_seconds = now - began if began is not None else 0.0
        item.sink(Ended(job=item.job, ending=ending, run_seconds=run_seconds, ended_at=now, relayed=relayed))
