"""`stream: true` from SDK to simulated engine: each token when it is made, and an engine that dies in the middle."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from api_fixtures import Api, serve_api
from feeding import make_claim, make_job, waiting
from worker_processes import Worker, running, wait_until, write_fleet

from service.fleet import load_models
from service.relay import Listener, new_address
from service.settings import Settings
from service.store.session import Database
from workers.engines.base import EngineReply, EngineRequest
from workers.engines.simulated import SimulatedEngine
from workers.feeder import Admission, Crashed, Ended, Feeder
from workers.streams import Streams

SPEED = 10.0  # 1,000 tokens a second
TOKENS = 1_000
MESSAGES: list[Any] = [{"role": "user", "content": "Count."}]


@pytest.fixture
def api(settings: Settings, database: Database, broker_url: str) -> Iterator[Api]:
    settings = dataclasses.replace(settings, drain_seconds=1.0)
    write_fleet(settings, speed=SPEED)
    models = load_models(settings.models_path)
    log = settings.state_folder / "dispatcher.log"
    with running("-m", "service", "dispatch", settings=settings, log=log):
        worker = Worker(settings)
        try:
            with serve_api(settings, database, broker_url, models) as api:
                wait_until(
                    lambda: api.http.get("/v1/models").json()["data"][0]["instances"] == 1, 60, lambda: worker.log
                )
                yield api
        finally:
            worker.terminate()


def test_tokens_come_as_they_are_made(api: Api) -> None:
    with api.sdk(max_retries=0) as sdk:
        began = time.monotonic()
        seen = [
            (time.monotonic() - began, chunk)
            for chunk in sdk.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    text = "".join(chunk.choices[0].delta.content or "" for _, chunk in seen if chunk.choices)
    assert text == f"simulated answer of {TOKENS} tokens"
    assert len(seen) == TOKENS + 1
    usage = seen[-1][1].usage
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    making_seconds = TOKENS / (100.0 * SPEED)
    assert seen[-1][0] - seen[0][0] > making_seconds / 2  # an answer that was held back would come at once


async def test_two_async_streams_keep_apart(api: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as sdk:

        async def one(tokens: int) -> str:
            stream = await sdk.completions.create(model="tiny", prompt="p", max_tokens=tokens, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        answers = await asyncio.gather(*(one(tokens) for tokens in (50, 80, 110)))
    assert answers == [f"simulated answer of {tokens} tokens" for tokens in (50, 80, 110)]


class Endless(SimulatedEngine):
    """Streams one event, and then is silent."""

    def __init__(self) -> None:
        self.has_sent = asyncio.Event()

    async def submit(self, request: EngineRequest) -> EngineReply:
        assert request.events is not None
        await request.events.send('data: {"choices": []}')
        self.has_sent.set()
        return await asyncio.get_running_loop().create_future()


async def test_a_streamed_job_whose_engine_died_is_known_to_have_been_relayed(broker_url: str) -> None:
    address, heard, ended = new_address(), list[Any](), list[Ended]()
    listener = Listener(broker_url, address, heard.append)
    listener.start()
    assert await asyncio.to_thread(listener.wait_listening, 10)
    streams = Streams(broker_url, "x", silence_seconds=10)
    streams.start(asyncio.get_running_loop(), lambda job_ids: None)
    engine = Endless()
    admission = Admission(max_num_seqs=4, kv_capacity_tokens=None)
    feeder = Feeder(engine=engine, admission=admission, timeout_seconds=30, streams=streams)
    job = dataclasses.replace(make_job(1), stream_to=f"{address}/1")
    feeder.add([waiting(make_claim(), job, 0, ended.append)])
    await asyncio.wait_for(engine.has_sent.wait(), 10)
    feeder.die()
    await asyncio.to_thread(wait_until, lambda: any(said["ending"] for said in heard), 10)
    assert [(type(item.ending), item.relayed) for item in ended] == [(Crashed, True)]
    assert heard[-1]["ending"]["error"]["code"] == "stream_aborted"
    await asyncio.to_thread(streams.stop)
    await asyncio.to_thread(listener.stop)
