"""The small interface between a worker and one engine, and the records that cross it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.core.usage import Usage
from service.errors import TrunklineError


class EngineGone(TrunklineError):
    """The engine died or was replaced while the request was in flight."""


class EngineTimeout(TrunklineError):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself once it is ready, probed rather than assumed; None where it does not say."""

    version: str | None
    kv_capacity_tokens: int | None
    block_size: int | None
    max_num_seqs: int
    max_model_len: int | None
    honours_salt: bool
    honours_priority: bool
    reports_cached_tokens: bool
    pid: int | None = None
    told_block_size: int | None = None  # the engine's own word, where `block_size` is the operator's


class EventSink(Protocol):
    """Where the events of a streamed answer go."""

    async def send(self, event: str) -> None:
        """One server-sent event as the engine wrote it, without the blank line behind it. Returns when the next may
        be read: with a slow client, much later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One job on its way to the engine. `body` is the JSON as accepted, without the fields the server owns.

    With `events` the engine is asked to stream (usage included), and each event is sent there as it comes; the reply
    is the whole answer all the same, put together.
    """

    job_id: int
    endpoint: str
    body: bytes
    salt: str  # hex; sent as cache_salt where honoured
    priority: int  # lower is served first, as vLLM has it: (classes above) * 2**40 + the feeder's sequence number
    prefix_key: bytes
    prompt_tokens: int
    expected_output_tokens: int
    timeout_seconds: float
    events: EventSink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """The engine's own answer: status and body unchanged, usage read from it."""

    status_code: int
    body: bytes
    usage: Usage
    retry_after_seconds: float | None = None  # what it asked for with a 429 or 503


class Engine(Protocol):
    """Drives one engine. All methods run on the worker's asyncio loop; none blocks it."""

    kind: str

    async def start(self) -> EngineFacts:
        """Start or attach, and return once requests are answered. Raises EngineFailed."""

    async def submit(self, request: EngineRequest) -> EngineReply:
        """Answer one job. Raises EngineGone, EngineTimeout. Cancelling the call aborts the request at the engine."""

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        """The engine's own token ids for this body's prompt; None where it cannot say."""

    async def is_alive(self) -> bool:
        """Whether it says, now, that it goes on answering. Asked after a 5xx or a failed connection; never raises."""

    async def wait_dead(self) -> str:
        """Return, with the cause, when the engine is no longer usable."""

    async def stop(self, grace_seconds: float) -> None:
        """End it and everything it started. Idempotent."""
