"""The owner of one instance: takes cohorts from Celery's threads, keeps the engine, drains at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import sqlalchemy as sa

from service.broker import instance_queue
from service.core.model import Outcome
from service.errors import TrunklineError
from service.fleet import Instance, Model
from service.settings import Settings
from service.store import cohorts, instances
from service.store.cohorts import Claim, ClaimedJob
from service.store.session import DATABASE_AWAY, Database, first_line
from service.tokenizing import Tokenizing
from workers.lives import Lives
from workers.presence import Presence, Pulse, Standing
from workers.runner import CohortRun
from workers.runs import Runs, Turnstile
from workers.streams import Streams

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_RELEASE_SECONDS = 10.0  # how long runs may take to give back what they hold, when the grace is over


class StartStopped(TrunklineError):
    """The worker was told to stop while its engine started."""

    exit_status = 0


class InstanceOwner:
    """Start it once, hand in cohorts from any number of threads, stop it once."""

    def __init__(
        self,
        *,
        settings: Settings,
        instance: Instance,
        model: Model,
        database: Database,
        tokenizing: Tokenizing,
        streams: Streams | None = None,
    ) -> None:
        """`streams`: None where no answer is relayed while it comes."""
        self._settings = settings
        self._name = instance.name
        self._database = database
        self._streams = streams
        self._lives = Lives(
            settings=settings,
            instance=instance,
            model=model,
            database=database,
            tokenizing=tokenizing,
            streams=streams,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._presence = Presence(database, settings, self)
        self._runs = Runs()
        self._turnstile = Turnstile()
        self._supervision: asyncio.Task[None] | None = None
        self._drain_lock = threading.Lock()
        self._is_draining = threading.Event()
        self._hurry = threading.Event()

    def start(self, is_stopping: Callable[[], bool]) -> None:
        """Return once the engine answers and its boot is ready. Raises TrunklineError, with nothing left behind."""
        self._thread.start()
        self._presence.start()
        if self._streams is not None:
            self._streams.start(self._loop, self._cancel)
        task: list[asyncio.Task[None]] = []

        async def first() -> None:
            beginning = asyncio.create_task(self._lives.begin())
            task.append(beginning)
            await beginning
            self._supervision = asyncio.create_task(self._supervise())

        begun = asyncio.run_coroutine_threadsafe(first(), self._loop)
        while not begun.done():
            if is_stopping() and task:
                self._loop.call_soon_threadsafe(task.pop().cancel)  # once: the clean-up must not be cancelled
            time.sleep(_POLL_SECONDS)
        error = StartStopped() if begun.cancelled() else begun.exception()
        if error is not None:
            self.stop()
            raise error

    def run_cohort(self, cohort_id: int, dispatch_no: int) -> None:
        """What a message asks for: claim the cohort and run it to its end. A stale message is dropped."""
        with self._runs.busy(), ExitStack() as stack:
            with self._turnstile.turn():
                run = self._claim(cohort_id, dispatch_no)
                if run is None:
                    return
                stack.enter_context(self._runs.registered(run))
                run.feed()
            run.run()

    def _claim(self, cohort_id: int, dispatch_no: int) -> CohortRun | None:
        life = self._lives.current
        if life is None or self._is_draining.is_set():
            log.info("no cohort is taken now: cohort=%d", cohort_id)
            return None

        def take(conn: sa.Connection) -> tuple[Claim | None, list[ClaimedJob]]:
            claim = cohorts.claim(
                conn,
                cohort_id=cohort_id,
                dispatch_no=dispatch_no,
                boot_id=life.boot_id,
                queue=instance_queue(self._name),
                lease_seconds=self._settings.lease_seconds,
            )
            return claim, cohorts.load_jobs(conn, claim) if claim is not None else []

        try:
            claim, jobs = self._database.run(take)
        except DATABASE_AWAY as error:
            # The reaper sends the message again. Had the claim been committed all the same, its lease expires.
            log.warning("the database is away, cohort=%d is left %s", cohort_id, first_line(error))
            return None
        if claim is None:
            log.info("stale message dropped: cohort=%d dispatch=%d", cohort_id, dispatch_no)
            return None
        return CohortRun(self._database, life, claim, jobs, job_tries=self._settings.job_tries)

    def standing(self) -> Standing | None:
        boot_id, life = self._lives.boot_id, self._lives.current
        if boot_id is None:
            return None
        return Standing(
            boot_id=boot_id,
            cohort_ids=self._runs.ids() if life is not None else frozenset(),
            running_jobs=life.feeder.running if life is not None else 0,
            waiting_jobs=life.feeder.waiting if life is not None else 0,
            mismatch=life.watch.check() if life is not None else None,
        )

    def pulse(self, standing: Standing, pulse: Pulse) -> None:
        life = self._lives.current
        if life is None or life.boot_id != standing.boot_id:
            return
        if not pulse.is_boot_alive:
            life.call(self._lives.lose_boot)
            return
        self._runs.lose(standing.cohort_ids - pulse.held)
        if pulse.to_abort:
            life.call(life.feeder.abort, pulse.to_abort)

    def pause(self, is_paused: bool) -> None:
        life = self._lives.current
        if life is not None:
            life.call(life.feeder.pause, is_paused)

    def drain(self) -> None:
        """Take nothing new, let what is at the engine end within the grace, give the rest back. Called again while
        it drains, from another thread, it ends the grace."""
        if self._is_draining.is_set():
            self._hurry.set()
        self._is_draining.set()
        with self._drain_lock:
            life = self._lives.current
            if life is not None:
                self._say_draining(life.boot_id)
                life.call(life.feeder.close)
            if self._runs.wait_idle(self._settings.drain_seconds, self._hurry):
                return
            if life is not None:
                life.call(life.feeder.take_back)
            if not self._runs.wait_idle(_RELEASE_SECONDS):
                self._runs.lose(self._runs.ids())
                self._runs.wait_idle(_RELEASE_SECONDS)

    def stop(self) -> None:
        """Drain, mark the boot gone, end the engine. Idempotent."""
        if not self._thread.is_alive():
            return
        if not self._is_draining.is_set():
            self.drain()
        with self._drain_lock:  # a drain that a signal began
            self._presence.stop()
            if self._streams is not None:
                self._streams.stop()
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _cancel(self, job_ids: Sequence[int]) -> None:
        """Their clients have gone away. On the loop; their rows say so too, for where this comes too early."""
        life = self._lives.current
        if life is not None:
            life.feeder.abort(dict.fromkeys(job_ids, Outcome.CANCELLED))

    async def _supervise(self) -> None:
        try:
            await self._lives.supervise(self._runs)
        except Exception:  # unseen, the engine's next death would be nobody's
            log.exception("supervision of the engine failed; the worker ends")
            os.kill(os.getpid(), signal.SIGTERM)

    async def _end(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait({self._supervision})
        await self._lives.end("stopped")

    def _say_draining(self, boot_id: int) -> None:
        try:
            self._database.run(lambda conn: instances.mark_draining(conn, boot_id))
        except DATABASE_AWAY as error:
            log.warning("boot %d could not be marked draining %s", boot_id, first_line(error))
