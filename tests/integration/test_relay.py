"""The relay itself, over the real broker: order, gaps, silence, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from stream_script import HELLO
from worker_processes import wait_until

from service.api.hub import RelayedStream, RelayHub
from service.core.usage import UNKNOWN
from service.ports import free_port
from service.relay import WINDOW_CHUNKS, Chunk, Ending, Listener, Sender, Signal, new_address, signal_address
from workers.engines.base import EngineReply, EventSink
from workers.streams import Streams

WHOLE = EngineReply(status_code=200, body=b'{"whole": true}', usage=UNKNOWN)
SILENCE_SECONDS = 2.0  # twice the second between two acknowledgements


def chunk(first: int, *data: str, run: str = "a", stream: str = "1", ending: Ending | None = None) -> Chunk:
    return Chunk(stream=stream, run=run, first=first, data=list(data), reply_to="signal.x", instance="x", ending=ending)


@pytest.fixture
async def hub(broker_url: str) -> AsyncIterator[RelayHub]:
    hub = RelayHub(broker_url)
    hub.start()
    assert await hub.wait_listening(10)
    yield hub
    await hub.stop()


@contextmanager
def heard(broker_url: str, address: str) -> Iterator[list[Any]]:
    """All that comes to an address meanwhile."""
    messages: list[Any] = []
    listener = Listener(broker_url, address, messages.append)
    listener.start()
    assert listener.wait_listening(10)
    try:
        yield messages
    finally:
        listener.stop()


@contextmanager
def sending(broker_url: str) -> Iterator[Sender]:
    sender = Sender(broker_url)
    sender.start()
    try:
        yield sender
    finally:
        sender.stop()


async def rest_of(stream: RelayedStream) -> tuple[list[str], Ending]:
    taken = []
    while isinstance(item := await stream.next(), str):
        taken.append(item)
    return taken, item


async def test_a_chunk_that_comes_twice_is_passed_over(hub: RelayHub) -> None:
    with hub.open() as stream:
        for part in (chunk(0, "a", "b"), chunk(0, "a", "b"), chunk(1, "b", "c"), chunk(3, ending=Ending())):
            stream.hear(part)
        assert await rest_of(stream) == (["a", "b", "c"], Ending())
        assert not stream.is_lost


@pytest.mark.parametrize(
    "last",
    [chunk(3, "d"), chunk(2, ending=Ending()), chunk(0, "a", run="b")],
    ids=["a chunk is missing", "the last chunk is missing", "another attempt"],
)
async def test_what_is_missing_ends_the_stream_behind_what_has_come(hub: RelayHub, last: Chunk) -> None:
    with hub.open() as stream:
        stream.hear(chunk(0, "a"))
        stream.hear(last)
        stream.hear(chunk(1, "b"))  # too late
        taken, ending = await rest_of(stream)
        assert taken == ["a"]
        assert ending.error is not None
        assert (ending.error["code"], ending.error["type"]) == ("stream_lost", "server_error")
        assert stream.is_lost


async def test_chunks_that_wait_share_a_message_and_keep_their_order(broker_url: str) -> None:
    address = new_address()
    with heard(broker_url, address) as messages:
        sender = Sender(broker_url)
        for number in range(400):  # before it has started, so they all wait
            sender.send(address, chunk(number // 2, f"{number}", stream=str(number % 2)))
        sender.start()
        await asyncio.to_thread(wait_until, lambda: sum(len(it["data"]) for it in messages) == 400, 10)
        await asyncio.to_thread(sender.stop)
    assert len(messages) < 20
    for stream in ("0", "1"):
        events = [event for it in messages if it["stream"] == stream for event in it["data"]]
        assert events == [str(number) for number in range(int(stream), 400, 2)]


async def test_what_is_malformed_or_for_nobody_is_dropped(hub: RelayHub, broker_url: str) -> None:
    class Nonsense(Signal):
        def to_json(self) -> dict[str, Any]:
            return {"stream": 1}

    with hub.open() as stream, sending(broker_url) as sender:
        sender.send(hub.address, Nonsense())
        sender.send(hub.address, chunk(0, "x", stream="none"))
        sender.send(hub.address, chunk(0, "a", stream=stream.key, ending=Ending()))
        async with asyncio.timeout(10):
            assert await rest_of(stream) == (["a"], Ending())


class Relayed:
    """A worker's side, and an `ask` that sends events as an engine would."""

    def __init__(self, broker_url: str) -> None:
        self.cancelled: list[int] = []
        self.streams = Streams(broker_url, "x", silence_seconds=SILENCE_SECONDS)
        self.streams.start(asyncio.get_running_loop(), self.cancelled.extend)
        self.sent = 0

    def relay(self, stream_to: str, events: int) -> asyncio.Task[EngineReply]:
        async def ask(sink: EventSink) -> EngineReply:
            for number in range(events):
                await sink.send(f"data: {number}")
                self.sent += 1
            return WHOLE

        return asyncio.create_task(self.streams.relay(self.streams.open(stream_to), ask))


@pytest.fixture
async def worker(broker_url: str) -> AsyncIterator[Relayed]:
    worker = Relayed(broker_url)
    assert await asyncio.to_thread(worker.streams._listener.wait_listening, 10)
    yield worker
    await asyncio.to_thread(worker.streams.stop)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, 10)


async def test_the_worker_stays_a_window_ahead_of_the_client(hub: RelayHub, worker: Relayed) -> None:
    count = 3 * WINDOW_CHUNKS
    with hub.open() as stream:
        task = worker.relay(stream.address, count)
        await until(lambda: len(stream._events) == WINDOW_CHUNKS)
        assert worker.sent == WINDOW_CHUNKS - 1  # the last one does not return yet
        held_for = 1.5 * SILENCE_SECONDS  # kept alive by the hub's second-by-second word
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), held_for)
        assert len(stream._events) == WINDOW_CHUNKS
        events, ending = await rest_of(stream)
        assert (len(events), ending) == (count, Ending())
    assert await task == WHOLE


async def test_an_api_process_that_has_died_is_not_waited_for(worker: Relayed, broker_url: str) -> None:
    task = worker.relay(f"{new_address()}/1", 3 * WINDOW_CHUNKS)
    async with asyncio.timeout(10):
        assert await task == WHOLE
    keys = redis.Redis.from_url(broker_url).keys("*relay*")
    assert keys == []


async def test_a_dropped_stream_is_read_to_its_end(hub: RelayHub, worker: Relayed, broker_url: str) -> None:
    with hub.open() as stream:
        task = worker.relay(stream.address, 3 * WINDOW_CHUNKS)
        assert await stream.next() == "data: 0"
    async with asyncio.timeout(10):
        assert await task == WHOLE


async def test_a_cancel_is_heard_at_once(hub: RelayHub, worker: Relayed) -> None:
    hub.signal_cancel("x", 7)
    await until(lambda: worker.cancelled == [7])


async def test_nothing_is_said_of_a_try_that_sent_nothing(worker: Relayed, broker_url: str) -> None:
    address = new_address()
    bad = EngineReply(status_code=503, body=b"{}", usage=UNKNOWN)

    async def refuse(sink: EventSink) -> EngineReply:
        return bad

    async def break_off(sink: EventSink) -> EngineReply:
        await sink.send(HELLO[0])
        return bad

    with heard(broker_url, address) as messages:
        outlets = [worker.streams.open(f"{address}/1") for _ in range(2)]
        assert await worker.streams.relay(outlets[0], refuse) == bad
        assert await worker.streams.relay(outlets[1], break_off) == bad
        assert [outlet.has_relayed for outlet in outlets] == [False, True]
        await until(lambda: any(it["ending"] for it in messages))
    assert [event for it in messages for event in it["data"]] == [HELLO[0]]
    assert messages[-1]["ending"]["error"]["message"] == "The engine answered with status 503."


async def test_a_listener_leaves_nothing_behind(broker_url: str) -> None:
    address = new_address()
    client = redis.Redis.from_url(broker_url)
    with heard(broker_url, address):
        pass
    with sending(broker_url) as sender:
        for number in range(300):
            sender.send(address, chunk(number, "x"))
        sender.send(signal_address("none"), Signal(cancelled=(1,)))
    assert [key for key in client.keys("*") if address.encode() in key or b"signal.none" in key] == []


def test_a_broker_that_is_away_is_said_once_and_does_not_keep_anybody_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    listener = Listener(nowhere, new_address(), lambda said: None)
    sender = Sender(nowhere)
    sender.send("relay.none", chunk(0, "x"))
    listener.start()
    sender.start()
    assert not listener.wait_listening(1.2)  # two tries and more
    sender.stop()
    listener.stop()
    said = [record.message.partition(":")[0] for record in caplog.records if record.name == "service.relay"]
    assert sorted(said) == ["a relayed message is dropped", "the relay hears nothing for now"]
