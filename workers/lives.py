"""The lives of an instance, one after the other: start, readiness, death or loss, and the next. On the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import psutil
import sqlalchemy as sa

from service.broker import instance_queue
from service.errors import InstanceHeld, TrunklineError
from service.fleet import Instance, Model
from service.settings import Settings
from service.store import instances
from service.store.instances import BootFacts
from service.store.session import DATABASE_AWAY, Database, first_line
from service.tokenizing import Tokenizing
from workers.agreement import key_agreement
from workers.engines.base import Engine, EngineFacts
from workers.engines.make import make_engine
from workers.feeder import Admission, Feeder
from workers.life import Life
from workers.runs import Runs
from workers.streams import Streams
from workers.watch import Watch

log = logging.getLogger(__name__)

_ENGINE_GRACE_SECONDS = 2.0
_RELEASE_SECONDS = 10.0  # how long runs may take to give back what they hold
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
_STEADY_SECONDS = 120.0  # an engine that lived this long starts again at once


class Lives:
    """Keeps one instance alive: an engine that dies starts again under a new boot; a boot that was marked gone while
    its engine ran on is followed by a new boot of the same engine."""

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
        self._streams = streams
        self._settings = settings
        self._instance = instance
        self._model = model
        self._database = database
        self._tokenizing = tokenizing
        self._engine: Engine | None = None
        self._boot_lost = asyncio.Event()
        self.current: Life | None = None  # read by every thread; None while no engine is ready
        self.boot_id: int | None = None  # the boot that has a heartbeat: starting, ready or draining
        self._former_keys: list[bytes] = []  # of what ran on the boot before the current one

    async def begin(self, former: Life | None = None) -> None:
        """A new boot: of the engine of `former` where it runs on, else of a new one. Raises with nothing left behind,
        except that an engine which ran before goes on where only the row could not be written."""
        boot_id = await self._row()
        try:
            life = await self._ready_life(boot_id, former)
            self._boot_lost.clear()
            self.current = life  # before the row says ready: a message may come at once, and the claim is guarded
            facts = _boot_facts(life)
            await asyncio.to_thread(self._database.run, lambda conn: instances.mark_ready(conn, boot_id, facts))
        except BaseException as error:  # cancelled, too: the row must not hold the queue
            reason = str(error) if isinstance(error, TrunklineError) else type(error).__name__
            await self.end(reason)
            raise
        log.info("instance ready: %s boot=%d kv_tokens=%s", self._instance.name, boot_id, life.facts.kv_capacity_tokens)

    async def supervise(self, runs: Runs) -> None:
        """Bury what dies and begin anew, until cancelled."""
        loop = asyncio.get_running_loop()
        failures = 0
        while self.current is not None:
            life = self.current
            began = loop.time()
            cause = await self._until_over(life)
            await self._bury(life, cause, runs)
            failures = 0 if loop.time() - began > _STEADY_SECONDS else failures + 1
            if not await self._begin_again(life if cause is None else None, failures):
                return

    def lose_boot(self) -> None:
        """The heartbeat found this boot marked gone. On the loop."""
        self._boot_lost.set()

    async def end(self, reason: str) -> None:
        """Mark the boot gone and stop the engine. Idempotent."""
        self.current = None
        if self.boot_id is not None:
            await asyncio.to_thread(self._say_gone, self.boot_id, reason)
            self.boot_id = None
        if self._engine is not None:
            await self._engine.stop(_ENGINE_GRACE_SECONDS)
            self._engine = None

    async def _row(self) -> int:
        """A new boot row; its id. Told to stop meanwhile, it marks the row gone: one that nobody knows of would hold
        the queue until it is stale."""
        starting = asyncio.create_task(asyncio.to_thread(self._start_boot))
        try:
            boot_id, self._former_keys = await asyncio.shield(starting)
        except asyncio.CancelledError:
            (outcome,) = await asyncio.gather(starting, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                self.boot_id, _ = outcome
                await self.end("stopped")
            raise
        self.boot_id = boot_id
        return boot_id

    async def _ready_life(self, boot_id: int, former: Life | None) -> Life:
        if former is not None and former.engine is self._engine:
            return replace(self._life(boot_id, former.engine, former.facts, former.key_agrees), watch=former.watch)
        engine = make_engine(self._instance, self._model, self._settings)
        self._engine = engine
        facts = await engine.start()
        agrees = await key_agreement(engine, self._tokenizing, self._model)
        return self._life(boot_id, engine, facts, agrees)

    def _life(self, boot_id: int, engine: Engine, facts: EngineFacts, agrees: bool | None) -> Life:
        admission = Admission(
            max_num_seqs=facts.max_num_seqs,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_model_len=facts.max_model_len,
        )
        feeder = Feeder(
            engine=engine,
            admission=admission,
            timeout_seconds=self._settings.job_timeout_seconds,
            streams=self._streams,
        )
        return Life(
            boot_id=boot_id,
            engine=engine,
            facts=facts,
            key_agrees=agrees,
            feeder=feeder,
            loop=asyncio.get_running_loop(),
            watch=Watch(
                instance=self._instance.name,
                engine=self._instance.engine,
                facts=facts,
                agrees=agrees,
                has_tokens=self._has_tokens,
                former_keys=self._former_keys,
            ),
        )

    def _has_tokens(self, endpoint: str, body: dict[str, Any]) -> bool:
        return self._tokenizing.token_ids(self._model.name, endpoint, body) is not None

    async def _until_over(self, life: Life) -> str | None:
        """The cause of the engine's death; None where only the boot's row was marked gone."""
        dead = asyncio.create_task(life.engine.wait_dead())
        lost = asyncio.create_task(self._boot_lost.wait())
        try:
            await asyncio.wait({dead, lost}, return_when=asyncio.FIRST_COMPLETED)
            return dead.result() if dead.done() else None
        finally:
            dead.cancel()
            lost.cancel()

    async def _bury(self, life: Life, cause: str | None, runs: Runs) -> None:
        self.current = None
        if cause is None:
            log.warning("boot %d was marked gone; its cohorts are dropped", life.boot_id)
            life.feeder.close()
            runs.lose(runs.ids())
        else:
            log.error("the engine died: instance=%s boot=%d: %s", self._instance.name, life.boot_id, cause)
            life.feeder.die()
        if not await asyncio.to_thread(runs.wait_idle, _RELEASE_SECONDS):
            runs.lose(runs.ids())
        if cause is not None:
            await self.end(cause)

    async def _begin_again(self, former: Life | None, failures: int) -> bool:
        """False where another worker has the queue: this process is told to end."""
        while True:
            if failures:
                await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1])
            try:
                await self.begin(former)
            except InstanceHeld as error:
                log.error("this worker ends: %s", error)
                os.kill(os.getpid(), signal.SIGTERM)
                return False
            except TrunklineError as error:
                log.error("the instance does not start: %s", error)
            except DATABASE_AWAY as error:
                log.error("the instance does not start: the database is away %s", first_line(error))
            else:
                return True
            failures += 1

    def _start_boot(self) -> tuple[int, list[bytes]]:
        """The new boot's id, and the keys of what ran on the boot before it."""
        process = psutil.Process()
        boot = instances.NewBoot(
            name=self._instance.name,
            queue=instance_queue(self._instance.name),
            host=socket.gethostname(),
            pid=process.pid,
            pid_started_at=process.create_time(),
            engine=self._instance.engine,
            model=self._model.name,
            devices=list(self._instance.devices),
            engine_arguments=list(self._instance.arguments),
            adapters=list(self._model.adapters),
        )
        stale_seconds = self._settings.stale_boot_seconds

        def start(conn: sa.Connection) -> tuple[int, list[bytes]]:
            boot_id = instances.start_boot(conn, boot, stale_after_seconds=stale_seconds, is_dead=is_process_dead)
            return boot_id, instances.former_keys(conn, boot_id)

        try:
            return self._database.run(start)
        except sa.exc.IntegrityError as error:
            diagnosis = getattr(error.orig, "diag", None)
            if getattr(diagnosis, "constraint_name", None) != "uq_instance_boot_queue":
                raise
            raise InstanceHeld(f"{boot.name}: a worker that started at the same moment holds {boot.queue}.") from error

    def _say_gone(self, boot_id: int, reason: str) -> None:
        """Once: where the database is away, the successor or the reaper says it."""
        try:
            self._database.run(lambda conn: instances.mark_gone(conn, boot_id, reason))
        except DATABASE_AWAY as error:
            log.warning("boot %d could not be marked gone %s", boot_id, first_line(error))


def is_process_dead(host: str, pid: int, started_at: float) -> bool:
    """Proof that a process of this host has ended; of another host nothing is known."""
    if host != socket.gethostname():
        return False
    try:
        process = psutil.Process(pid)
        is_other = abs(process.create_time() - started_at) > 1.0
        return bool(is_other or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _boot_facts(life: Life) -> BootFacts:
    facts = life.facts
    return BootFacts(
        engine_version=facts.version,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        block_size=facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        max_model_len=facts.max_model_len,
        honours_salt=facts.honours_salt,
        honours_priority=facts.honours_priority,
        reports_cached_tokens=facts.reports_cached_tokens,
        key_agrees=False if life.watch.mismatch else life.key_agrees,
        alarm=life.watch.mismatch,
    )
