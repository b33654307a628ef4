"""The worker's side of streamed answers: events out to the API process that asked, acknowledgements and cancels in."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from service.core.resultline import error_envelope
from service.relay import WINDOW_CHUNKS, Chunk, Ending, Listener, Sender, Signal, signal_address
from workers.engines.base import EngineReply, EngineTimeout, EventSink

log = logging.getLogger(__name__)


class Streams:
    """Relays for one instance. Its threads hear and send; the rest runs on the worker's event loop."""

    def __init__(self, broker_url: str, instance: str, *, silence_seconds: float) -> None:
        """`silence_seconds`: an API process that acknowledges nothing for so long is taken for dead."""
        self._instance = instance
        self._silence_seconds = silence_seconds
        self._sender = Sender(broker_url)
        self._listener = Listener(broker_url, signal_address(instance), self._hear)
        self._outlets: dict[str, Outlet] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancel: Callable[[Sequence[int]], None] = lambda job_ids: None

    def start(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[Sequence[int]], None]) -> None:
        """`cancel` is called on the loop with the ids of jobs whose client has gone."""
        self._loop, self._cancel = loop, cancel
        self._listener.start()
        self._sender.start()

    def stop(self) -> None:
        """Once, after `start`; before the loop ends."""
        self._listener.stop()
        self._sender.stop()

    def open(self, stream_to: str) -> Outlet:
        """A way to the client for one submission."""
        return Outlet(self._sender, stream_to, self._instance, self._silence_seconds)

    async def relay(self, outlet: Outlet, ask: Callable[[EventSink], Awaitable[EngineReply]]) -> EngineReply:
        """What `ask` returns or raises, and the client is told how it ended, unless nothing was relayed yet: then it
        may be tried again, and the client sees nothing of this try."""
        self._outlets[outlet.run] = outlet
        ending = Ending(error=_failed("server_error", "engine_crash", "The engine failed in the middle of the answer."))
        try:
            reply = await ask(outlet)
            is_whole = 200 <= reply.status_code < 300
            ending = Ending() if is_whole else Ending(error=error_envelope(reply.status_code, reply.body)["error"])
        except EngineTimeout:
            ending = Ending(error=_failed("server_error", "request_timeout", "The engine did not answer in time."))
            raise
        except asyncio.CancelledError:
            message = "The request was cancelled, or its engine ended, in the middle of the answer."
            ending = Ending(error=_failed("server_error", "stream_aborted", message))
            raise
        finally:
            del self._outlets[outlet.run]
            outlet.end(ending)
        return reply

    def _hear(self, said: Any) -> None:
        signal = Signal.from_json(said)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._act, signal)

    def _act(self, signal: Signal) -> None:
        for run, taken in signal.acks.items():
            if run in self._outlets:
                self._outlets[run].acknowledge(taken)
        for run in signal.dropped:
            if run in self._outlets:
                self._outlets[run].drop()
        if signal.cancelled:
            self._cancel(signal.cancelled)


class Outlet:
    """One submission's way to its client. It sends no more than a window ahead of what the client has taken."""

    def __init__(self, sender: Sender, stream_to: str, instance: str, silence_seconds: float) -> None:
        self.run = secrets.token_hex(8)
        self._sender = sender
        self._address, _, self._stream = stream_to.partition("/")
        self._instance = instance
        self._silence_seconds = silence_seconds
        self._sent = 0
        self._taken = 0
        self._heard_at: float | None = None  # when the API process last said anything; counted from the first event
        self._news = asyncio.Event()
        self._is_dropped = False

    @property
    def has_relayed(self) -> bool:
        """Whether the client has a part of this answer, and so can be given no other."""
        return self._sent > 0 and not self._is_dropped

    async def send(self, event: str) -> None:
        if self._is_dropped:
            return
        now = asyncio.get_running_loop().time()
        if self._heard_at is None:
            self._heard_at = now
        if now - self._heard_at > self._silence_seconds:
            self._give_up()
            return
        self._publish([event])
        await self._room()

    def end(self, ending: Ending) -> None:
        if (self._sent or ending.error is None) and not self._is_dropped:
            self._publish([], ending)

    def acknowledge(self, taken: int) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._taken = max(self._taken, taken)
        self._news.set()

    def drop(self) -> None:
        """Nobody reads it any more. The answer is read to its end, and recorded."""
        self._is_dropped = True
        self._news.set()

    async def _room(self) -> None:
        while self._sent - self._taken >= WINDOW_CHUNKS and not self._is_dropped:
            assert self._heard_at is not None
            left_seconds = self._heard_at + self._silence_seconds - asyncio.get_running_loop().time()
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(0.0, left_seconds))
            except TimeoutError:
                self._give_up()

    def _give_up(self) -> None:
        log.warning("a streamed answer is relayed no further: no acknowledgement for %.0f s", self._silence_seconds)
        self.drop()

    def _publish(self, data: list[str], ending: Ending | None = None) -> None:
        chunk = Chunk(
            stream=self._stream,
            run=self.run,
            first=self._sent,
            data=data,
            reply_to=signal_address(self._instance),
            instance=self._instance,
            ending=ending,
        )
        self._sent += len(data)
        self._sender.send(self._address, chunk)


def _failed(kind: str, code: str, message: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}
