"""The engine `openai`: any OpenAI-compatible server that runs already, attached to by its URL and probed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

import httpx

from service.errors import EngineFailed
from service.fleet import Instance, Model
from service.settings import Settings
from workers.engines.base import EngineFacts, EngineGone, EngineReply, EngineRequest, EngineTimeout
from workers.engines.http import QUESTION_SECONDS, EngineHttp, cache_config
from workers.engines.probe import probe

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 2.0
_ALIVE_SECONDS = 10.0  # for an answer to the one look after a failed submission
_FAILURES_TO_DEATH = 3  # one failed look may be a busy server
_DEFAULT_MAX_NUM_SEQS = 32  # a server does not say; `options.max_num_seqs` of the instance does


class OpenAIEngine:
    """A server that others run: it is never started nor stopped here."""

    kind = "openai"

    def __init__(self, instance: Instance, model: Model, settings: Settings) -> None:
        assert instance.url is not None, "load_instances() sees to it"
        self._instance = instance
        self._model = model
        self._start_seconds = settings.engine_start_seconds
        try:
            self._http = EngineHttp(instance.url, api_key=instance.api_key, through_proxies=True)
            self._url = url_without_secrets(instance.url)
        except (httpx.InvalidURL, ValueError) as error:
            raise EngineFailed(f"INSTANCES: [instances.{instance.name}] url is no URL.") from error
        self._tokenizes = True

    async def start(self) -> EngineFacts:
        if not await self._is_healthy():
            raise EngineFailed(f"INSTANCES: [instances.{self._instance.name}] url: {self._url} does not answer.")
        served = await self._served()
        try:
            probed = await probe(self._http, self._model.name, self._model.endpoints)
        except (EngineGone, EngineTimeout) as error:
            raise EngineFailed(f"instance={self._instance.name}: {error}") from error
        self._http.salt = probed.honours_salt
        self._http.priority = probed.honours_priority
        metrics = await self._http.get("/metrics")
        capacity, block_size = cache_config(metrics[1]) if metrics is not None else (None, None)
        options = {name: int(value) for name, value in self._instance.options}
        version = await self._http.get_json("/version")
        return EngineFacts(
            version=version.get("version") if isinstance(version, dict) else None,
            kv_capacity_tokens=options.get("kv_capacity_tokens", capacity),
            block_size=options.get("block_size", block_size),
            max_num_seqs=options.get("max_num_seqs", _DEFAULT_MAX_NUM_SEQS),
            max_model_len=served.get(self._model.name),
            honours_salt=probed.honours_salt,
            honours_priority=probed.honours_priority,
            reports_cached_tokens=probed.reports_cached_tokens,
            told_block_size=block_size,
        )

    async def submit(self, request: EngineRequest) -> EngineReply:
        return await self._http.submit(request)

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        return await self._http.tokenize(endpoint, body)

    async def is_alive(self) -> bool:
        return await self._is_healthy(_ALIVE_SECONDS)

    async def wait_dead(self) -> str:
        """Several failed looks in a row."""
        failures = 0
        while failures < _FAILURES_TO_DEATH:
            await asyncio.sleep(_HEALTH_SECONDS)
            failures = 0 if await self._is_healthy() else failures + 1
        return f"{self._url} does not answer"

    async def stop(self, grace_seconds: float) -> None:
        await self._http.close()

    async def _is_healthy(self, timeout_seconds: float = QUESTION_SECONDS) -> bool:
        """GET /health where there is one (404: there is none), else the list of models."""
        reply = await self._http.get("/health", timeout_seconds=timeout_seconds)
        if reply is not None and reply[0] == 404:
            reply = await self._http.get("/v1/models", timeout_seconds=timeout_seconds)
        return reply is not None and reply[0] < 500

    async def _served(self) -> dict[str, int | None]:
        """Model name -> longest prompt, where the server lists models. Raises EngineFailed where ours is not there."""
        listing = await self._http.get_json("/v1/models")
        entries = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(entries, list):
            return {}
        served = {str(item.get("id")): _length(item) for item in entries if isinstance(item, dict)}
        if served and self._model.name not in served:
            raise EngineFailed(
                f"INSTANCES: [instances.{self._instance.name}] model: {self._url} serves "
                f"{', '.join(sorted(served))}, not {self._model.name}."
            )
        return served


def url_without_secrets(url: str) -> str:
    """Scheme, host, port and path: user and password, and a key in the query, are for no message."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _length(entry: dict[str, Any]) -> int | None:
    length = entry.get("max_model_len")
    return length if isinstance(length, int) else None
