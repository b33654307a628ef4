"""The API's side of streamed answers: one address per process, and every stream that is relayed to it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from service.relay import Chunk, Ending, Listener, Sender, Signal, new_address, signal_address

log = logging.getLogger(__name__)

_ACK_CHUNKS = 64  # a quarter of the worker's window
_ACK_SECONDS = 1.0  # and at least this often: it tells the worker that this process lives


class RelayHub:
    """Hears every stream of this process. On its event loop, except `signal_cancel`."""

    def __init__(self, broker_url: str) -> None:
        self.address = new_address()
        self._sender = Sender(broker_url)
        self._listener = Listener(broker_url, self.address, self._hear)
        self._streams: dict[str, RelayedStream] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.Task[None] | None = None

    @property
    def is_listening(self) -> bool:
        return self._listener.is_listening

    async def wait_listening(self, seconds: float) -> bool:
        """Whether it hears by then: a process that has just started has yet to reach the broker."""
        return await asyncio.to_thread(self._listener.wait_listening, seconds)

    def start(self) -> None:
        """Call on the event loop of the application."""
        self._loop = asyncio.get_running_loop()
        self._listener.start()
        self._sender.start()
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """After the last stream has ended."""
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.to_thread(self._listener.stop)
        await asyncio.to_thread(self._sender.stop)

    @contextmanager
    def open(self) -> Iterator[RelayedStream]:
        """A stream that a job may be told to answer to, for as long as it is open."""
        stream = RelayedStream(self, str(next(self._numbers)))
        self._streams[stream.key] = stream
        try:
            yield stream
        finally:
            del self._streams[stream.key]
            if not stream.is_over:
                self.drop(stream)

    def signal_cancel(self, instance: str, job_id: int) -> None:
        """Have the worker of an instance abort a job now, not with its next heartbeat. From any thread; may be lost."""
        self._sender.send(signal_address(instance), Signal(cancelled=(job_id,)))

    def drop(self, stream: RelayedStream) -> None:
        """Tell the worker that nobody reads what it sends."""
        if stream.reply_to is not None:
            self._sender.send(stream.reply_to, Signal(dropped=(stream.run,)))

    def acknowledge(self, stream: RelayedStream) -> None:
        """Tell the worker how much the client has taken."""
        if stream.reply_to is not None and not stream.is_over:
            stream.acknowledged = stream.taken
            self._sender.send(stream.reply_to, Signal(acks={stream.run: stream.taken}))

    def _hear(self, said: Any) -> None:
        chunk = Chunk.from_json(said)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._pass_on, chunk)

    def _pass_on(self, chunk: Chunk) -> None:
        stream = self._streams.get(chunk.stream)
        if stream is not None:
            stream.hear(chunk)

    async def _tick(self) -> None:
        """Everything that a worker is to know in one message, again and again: an acknowledgement may be lost."""
        while True:
            await asyncio.sleep(_ACK_SECONDS)
            acks: defaultdict[str, dict[str, int]] = defaultdict(dict)
            for stream in self._streams.values():
                if stream.reply_to is not None and not stream.is_over:
                    acks[stream.reply_to][stream.run] = stream.acknowledged = stream.taken
            for address, taken in acks.items():
                self._sender.send(address, Signal(acks=taken))


class RelayedStream:
    """One answer, as it comes in. What is heard and not yet taken is bounded by the worker's window."""

    def __init__(self, hub: RelayHub, key: str) -> None:
        self.key = key
        self.run = ""
        self.reply_to: str | None = None  # None until the first event
        self.instance: str | None = None
        self.taken = 0  # events that the client has taken
        self.acknowledged = 0
        self.is_lost = False  # its job goes on all the same
        self._hub = hub
        self._given = 0
        self._expected = 0
        self._events: deque[str] = deque()
        self._ending: Ending | None = None
        self._news = asyncio.Event()

    @property
    def address(self) -> str:
        """What the job's `stream_to` says."""
        return f"{self._hub.address}/{self.key}"

    @property
    def is_over(self) -> bool:
        """Nothing more will come, or is wanted."""
        return self._ending is not None

    def hear(self, chunk: Chunk) -> None:
        """A chunk in its turn; one that came before is passed over, and a gap ends the stream."""
        if self._ending is not None:
            return
        if chunk.run != self.run:
            is_first = not self.run
            self.run, self.reply_to, self.instance = chunk.run, chunk.reply_to, chunk.instance
            if not is_first:
                self.lose("The answer was begun anew by another attempt.")
                return
        if chunk.first > self._expected:
            self.lose("A part of the answer was lost on its way.")
            return
        fresh = chunk.data[self._expected - chunk.first :]
        self._events.extend(fresh)
        self._expected += len(fresh)
        self._ending = chunk.ending
        self._news.set()

    def lose(self, message: str, code: str = "stream_lost") -> None:
        """End it with an error behind what has come. The worker is told, and relays no more; the job goes on."""
        if self._ending is not None:
            return
        self.is_lost = True
        self._hub.drop(self)
        self._ending = Ending(error={"message": message, "type": "server_error", "param": None, "code": code})
        self._news.set()

    @property
    def has_begun(self) -> bool:
        """Whether any event came, taken or not."""
        return self._expected > 0

    def abandon(self) -> None:
        """Nobody will read it, what has come included."""
        self._events.clear()
        self.lose("The client went away.")

    async def next(self) -> str | Ending:
        """The next event, once there is one: the one before counts as taken by the client. In the end, the ending."""
        self.taken = self._given
        if self.taken - self.acknowledged >= _ACK_CHUNKS:
            self._hub.acknowledge(self)
        while not self._events:
            if self._ending is not None:
                return self._ending
            self._news.clear()
            await self._news.wait()
        self._given += 1
        return self._events.popleft()
