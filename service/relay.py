"""How streamed answers pass between processes: numbered chunks from a worker to an API process, and signals back.

Over Kombu, and never stored: where the transport has the default exchange of AMQP (RabbitMQ), a queue of the listener
that goes with its connection; elsewhere (Redis, Valkey) a fanout, which is publish and subscribe there, so that what
is sent to a process that has died vanishes. Messages may be lost and may come twice, but never change their order:
chunks are numbered, and whoever misses one ends its stream. JSON only; answers pass, prompts never do.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from amqp.exceptions import AMQPError  # type: ignore[import-untyped]
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from service.store.session import first_line

log = logging.getLogger(__name__)

WINDOW_CHUNKS = 256  # sent and not acknowledged: beyond it the worker reads no more from the engine
_MESSAGE_BYTES = 256 * 1024  # chunks that wait for the same stream share a message up to about this
_EXPIRES_SECONDS = 60.0
_LOOK_SECONDS = 0.25  # how soon a listener notices that it is told to stop
_PAUSE_SECONDS = 0.5  # between two tries to reach the broker
_SEND_SECONDS = 5.0  # a message that cannot be sent within this is dropped: its stream ends with an error
_CONNECT_SECONDS = 5.0
_AWAY = (OSError, KombuError, AMQPError, RedisError)


def new_address() -> str:
    """Where one API process hears. Nobody can guess it."""
    return f"relay.{secrets.token_hex(8)}"


def signal_address(instance: str) -> str:
    """Where the worker of an instance hears acknowledgements and cancels."""
    return f"signal.{instance}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an engine's answer ended. `error` is the body of an error envelope; None after a whole answer."""

    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some events of one answer, numbered from 0 within their run; with `ending` nothing follows."""

    stream: str  # of the address: which of the streams that the process relays
    run: str  # one submission to an engine; a retry is another
    first: int
    data: list[str]  # server-sent events as the engine wrote them, without the blank line
    reply_to: str  # the worker's signal address
    instance: str
    ending: Ending | None = None

    def is_followed_by(self, other: Chunk) -> bool:
        """Whether the two may travel as one."""
        same = (self.stream, self.run, self.first + len(self.data)) == (other.stream, other.run, other.first)
        return same and self.ending is None

    def joined(self, other: Chunk) -> Chunk:
        return Chunk(
            stream=self.stream,
            run=self.run,
            first=self.first,
            data=[*self.data, *other.data],
            reply_to=self.reply_to,
            instance=self.instance,
            ending=other.ending,
        )

    def to_json(self) -> dict[str, Any]:
        ending = None if self.ending is None else {"error": self.ending.error}
        return {
            "stream": self.stream,
            "run": self.run,
            "first": self.first,
            "data": self.data,
            "reply_to": self.reply_to,
            "instance": self.instance,
            "ending": ending,
        }

    @staticmethod
    def from_json(said: Any) -> Chunk:
        """Raises KeyError, TypeError."""
        ending = said["ending"]
        return Chunk(
            stream=said["stream"],
            run=said["run"],
            first=said["first"],
            data=list(said["data"]),
            reply_to=said["reply_to"],
            instance=said["instance"],
            ending=None if ending is None else Ending(error=ending["error"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """From an API process to the worker of an instance."""

    acks: dict[str, int] = field(default_factory=dict)  # run -> how many of its chunks the client has taken
    dropped: tuple[str, ...] = ()  # runs that nobody relays any more; their results are recorded all the same
    cancelled: tuple[int, ...] = ()  # job ids: abort them at the engine

    def to_json(self) -> dict[str, Any]:
        return {"acks": self.acks, "dropped": list(self.dropped), "cancelled": list(self.cancelled)}

    @staticmethod
    def from_json(said: Any) -> Signal:
        """Raises KeyError, TypeError, ValueError."""
        return Signal(
            acks={str(run): int(taken) for run, taken in said["acks"].items()},
            dropped=tuple(said["dropped"]),
            cancelled=tuple(int(job_id) for job_id in said["cancelled"]),
        )


class Sender:
    """A thread that sends what it is given, in order; `send` never blocks, and may be called from any thread.

    A message that cannot be sent for some seconds is dropped, with what waits behind it that is as old.
    """

    def __init__(self, broker_url: str) -> None:
        self._broker_url = broker_url
        self._waiting: queue.SimpleQueue[tuple[str, Chunk | Signal, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="relay-sender", daemon=True)
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._stopping = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What waits is sent first, where the broker answers."""
        self._stopping.set()
        self._waiting.put(None)
        self._thread.join()

    def send(self, address: str, message: Chunk | Signal) -> None:
        self._waiting.put((address, message, time.monotonic()))

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._waiting.get()]
            with suppress(queue.Empty):
                while True:
                    items.append(self._waiting.get_nowait())
            is_open = None not in items
            for address, message, since in _packed(item for item in items if item is not None):
                try:
                    self._deliver(address, message, since)
                except Exception:  # the thread's loop: it must go on
                    log.exception("a relayed message is dropped")
                    self._forget()
        self._forget()

    def _deliver(self, address: str, message: Chunk | Signal, since: float) -> None:
        """Again after a failure: the first to meet a broken connection would else be lost."""
        while True:
            try:
                self._publish(address, message.to_json())
            except _AWAY as error:
                self._forget()
                if self._stopping.is_set() or time.monotonic() - since > _SEND_SECONDS:
                    log.warning("a relayed message is dropped: %s", first_line(error))
                    return
                self._stopping.wait(_PAUSE_SECONDS)
            else:
                return

    def _publish(self, address: str, body: dict[str, Any]) -> None:
        if self._producer is None:
            self._connection = _connect(self._broker_url)
            self._producer = Producer(self._connection.channel(), serializer="json")
        assert self._connection is not None
        exchange = _exchange(self._connection, address)
        self._producer.publish(
            body,
            exchange=exchange or "",
            routing_key=address,
            declare=[exchange] if exchange is not None else [],
            delivery_mode="transient",
            retry=False,
        )

    def _forget(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(*_AWAY):
                connection.release()


class Listener:
    """A thread that hears one address and hands over what comes, parsed. It reconnects for as long as it lives."""

    def __init__(self, broker_url: str, address: str, hear: Callable[[Any], None]) -> None:
        """`hear` is called on the thread; KeyError, TypeError and ValueError mean that the message is malformed."""
        self._broker_url = broker_url
        self._address = address
        self._hear = hear
        self._thread = threading.Thread(target=self._run, name=f"relay {address}", daemon=True)
        self._stopping = threading.Event()
        self._listening = threading.Event()
        self._is_away = False  # and the log says so

    @property
    def is_listening(self) -> bool:
        """Whether what is sent now would be heard, as far as this end knows."""
        return self._listening.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def wait_listening(self, seconds: float) -> bool:
        return self._listening.wait(seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with _connect(self._broker_url) as connection:
                    self._listen(connection)
            except _AWAY as error:
                self._listening.clear()
                if not self._is_away:  # once, however long the broker is away
                    log.warning("the relay hears nothing for now: %s", first_line(error))
                self._is_away = True
            except Exception:  # the thread's loop: it must go on
                self._listening.clear()
                log.exception("the relay hears nothing for now")
            self._stopping.wait(_PAUSE_SECONDS)

    def _listen(self, connection: Connection) -> None:
        exchange = _exchange(connection, self._address)
        with Consumer(
            connection.channel(),
            queues=[_queue(self._address, exchange)],
            callbacks=[self._on_message],
            accept=["json"],
            no_ack=True,
        ):
            self._drain(connection, 0.01)  # Redis subscribes with the first look
            self._listening.set()
            self._is_away = False
            while not self._stopping.is_set():
                self._drain(connection, _LOOK_SECONDS)

    def _drain(self, connection: Connection, seconds: float) -> None:
        with suppress(TimeoutError):
            connection.drain_events(timeout=seconds)

    def _on_message(self, body: Any, message: Any) -> None:
        try:
            self._hear(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("malformed message of the relay dropped: %s", type(error).__name__)


def _packed(items: Iterable[tuple[str, Chunk | Signal, float]]) -> list[tuple[str, Chunk | Signal, float]]:
    """Neighbouring chunks of a stream put together; the order within each stream stays."""
    packed: list[tuple[str, Chunk | Signal, float]] = []
    last: dict[tuple[str, str], tuple[int, int]] = {}  # (address, stream) -> its last place in `packed`, its bytes
    for address, message, since in items:
        if not isinstance(message, Chunk):
            packed.append((address, message, since))
            continue
        size = sum(map(len, message.data))
        place, size_before = last.get((address, message.stream), (-1, 0))
        former = packed[place][1] if place >= 0 else None
        if isinstance(former, Chunk) and former.is_followed_by(message) and size_before + size <= _MESSAGE_BYTES:
            packed[place] = (address, former.joined(message), packed[place][2])
            last[address, message.stream] = (place, size_before + size)
        else:
            last[address, message.stream] = (len(packed), size)
            packed.append((address, message, since))
    return packed


def _connect(broker_url: str) -> Connection:
    """Raises one of `_AWAY`."""
    connection = Connection(
        broker_url,
        connect_timeout=_CONNECT_SECONDS,
        transport_options={"socket_connect_timeout": _CONNECT_SECONDS, "max_retries": 1},
    )
    connection.connect()
    return connection


def _exchange(connection: Connection, address: str) -> Exchange | None:
    """None: the default exchange, which drops what is for a queue that is not there."""
    if connection.transport.driver_type == "amqp":
        return None
    return Exchange(address, type="fanout", durable=False, delivery_mode="transient")


def _queue(address: str, exchange: Exchange | None) -> Queue:
    """Gone with its listener, or soon after."""
    if exchange is None:
        return Queue(address, durable=False, exclusive=True, auto_delete=True)
    return Queue(address, exchange, address, durable=False, auto_delete=True, expires=_EXPIRES_SECONDS)
