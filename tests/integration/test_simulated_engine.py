"""The simulated engine: answers in OpenAI's shape that say what they are, caches by prefix, times out, aborts."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from seeds import key_of

from service.core.assembly import Assembly
from service.core.model import Endpoint
from service.core.usage import read_usage
from service.errors import SettingError
from service.fleet import Instance, Model
from workers.engines.base import EngineRequest, EngineTimeout
from workers.engines.simulated import SimulatedEngine

OPTIONS = {"kv_capacity_tokens": 4096.0, "block_size": 32.0, "max_num_seqs": 8.0, "speed": 1000.0}


def make_engine(**options: float) -> SimulatedEngine:
    given = tuple((OPTIONS | options).items())
    return SimulatedEngine(Instance(name="one", engine="simulated", model="tiny", options=given), Model(name="tiny"))


def request(group: int, line: int, endpoint: Endpoint = Endpoint.CHAT, **changes: object) -> EngineRequest:
    key, prompt_tokens = key_of(group, line)
    made = EngineRequest(
        job_id=line,
        endpoint=endpoint,
        body=b"{}",
        salt="",
        priority=line,
        prefix_key=key,
        prompt_tokens=prompt_tokens,
        expected_output_tokens=8,
        timeout_seconds=10,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        (Endpoint.CHAT, ChatCompletion),
        (Endpoint.COMPLETIONS, Completion),
        (Endpoint.EMBEDDINGS, CreateEmbeddingResponse),
    ],
)
async def test_answers_are_openais_and_say_that_they_are_simulated(endpoint: Endpoint, kind: type) -> None:
    engine = make_engine()
    await engine.start()
    reply = await engine.submit(request(1, 1, endpoint))
    kind.model_validate(orjson.loads(reply.body), strict=True)  # type: ignore[attr-defined]
    assert orjson.loads(reply.body)["simulated"] is True
    assert read_usage(reply.body) == reply.usage
    await engine.stop(0)


async def test_a_prefix_is_computed_once() -> None:
    engine = make_engine()
    facts = await engine.start()
    assert (facts.kv_capacity_tokens, facts.block_size) == (4096, 32)
    replies = await asyncio.gather(*(engine.submit(request(group, line)) for line, group in enumerate([1, 1, 2, 1, 2])))
    assert [reply.usage.cached_tokens for reply in replies] == [0, 320, 0, 320, 320]
    await engine.stop(0)


async def test_an_aborted_request_frees_its_place() -> None:
    engine = make_engine(max_num_seqs=1, speed=0.001)
    await engine.start()
    first = asyncio.create_task(engine.submit(request(1, 1)))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(EngineTimeout):
        await engine.submit(request(1, 2, timeout_seconds=0.01))
    assert await engine.is_alive()
    await engine.stop(0)
    assert "ended" in await asyncio.wait_for(engine.wait_dead(), 5)
    assert not await engine.is_alive()


async def test_what_never_fits_is_refused_as_an_engine_would() -> None:
    engine = make_engine(kv_capacity_tokens=128)
    await engine.start()
    reply = await engine.submit(request(1, 1))
    assert reply.status_code == 400
    assert orjson.loads(reply.body)["error"]["code"] == "context_length_exceeded"
    await engine.stop(0)


def test_options_are_checked() -> None:
    with pytest.raises(SettingError, match=r"\[instances\.one\] options: size is unknown"):
        make_engine(size=1)
    with pytest.raises(SettingError, match="speed must be above 0"):
        make_engine(speed=0)


class Events:
    """What a streaming engine sent; after the first, it waits to be let go."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self.let_go = asyncio.Event()

    async def send(self, event: str) -> None:
        self.chunks.append(orjson.loads(event.removeprefix("data: ")))
        self.arrived.set()
        await self.let_go.wait()


@pytest.mark.parametrize(
    ("endpoint", "kind"), [(Endpoint.CHAT, ChatCompletionChunk), (Endpoint.COMPLETIONS, Completion)]
)
async def test_it_streams_token_by_token_and_answers_whole(endpoint: Endpoint, kind: type) -> None:
    engine = make_engine()
    await engine.start()
    events = Events()
    answer = asyncio.create_task(engine.submit(request(1, 1, endpoint, events=events)))
    await asyncio.wait_for(events.arrived.wait(), 10)
    assert (len(events.chunks), answer.done()) == (1, False)
    events.let_go.set()
    reply = await answer
    assembly = Assembly(endpoint=endpoint)
    for chunk in events.chunks:
        assembly.add(chunk)
    for chunk in events.chunks if endpoint is Endpoint.CHAT else events.chunks[-2:]:  # before, no reason to finish
        kind.model_validate(chunk, strict=True)  # type: ignore[attr-defined]
    assert len(events.chunks) == 8 + 1  # and the usage
    whole, assembled = orjson.loads(reply.body), orjson.loads(assembly.body())
    assert {**assembled, "created": 0} == {**whole, "created": 0}
    assert reply.usage.completion_tokens == 8
    await engine.stop(0)


async def test_a_streamed_request_is_aborted_in_the_middle() -> None:
    engine = make_engine(speed=0.1, max_num_seqs=1)
    await engine.start()
    events = Events()
    answer = asyncio.create_task(engine.submit(request(1, 1, events=events)))
    await asyncio.wait_for(events.arrived.wait(), 10)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    with pytest.raises(EngineTimeout):  # it runs at once, and is slow
        await engine.submit(request(1, 2, timeout_seconds=0.01))
    await engine.stop(0)
