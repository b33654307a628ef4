"""The engine `vllm` on a real vLLM: start, capacity, cached tokens, and what a killed server leaves behind: nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.core.model import Endpoint
from service.fleet import Instance, Model, Models
from service.settings import Settings
from service.tokenizing import Tokenizing
from workers.agreement import key_agreement
from workers.engines.base import EngineGone, EngineReply, EngineRequest
from workers.engines.tree import ProcessId, descendants, identify, is_alive
from workers.engines.vllm import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

KV_TOKENS = 4096
ARGUMENTS = ("--num-gpu-blocks-override", "128", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
HOLDER = Path(__file__).with_name("hold_engine.py")
PREFIX = " ".join(f"Rule {number}: answer briefly." for number in range(60))


def request(model: Model, question: str, salt: str, number: int) -> EngineRequest:
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}]
    body = {"model": model.name, "messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1}
    return EngineRequest(
        job_id=number,
        endpoint=Endpoint.CHAT,
        body=orjson.dumps(body),
        salt=salt,
        priority=number,
        prefix_key=b"",
        prompt_tokens=600,
        expected_output_tokens=8,
        timeout_seconds=120,
    )


def until_gone(processes: list[ProcessId], seconds: float) -> list[ProcessId]:
    """Those that still live when the time is up."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while (living := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        pause.wait(0.05)
    return living


async def test_vllm_from_start_to_both_kills(
    model_folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = Settings(state_folder=tmp_path / "state folder", engine_start_seconds=900)
    model = Model(name="smollm2", tokenizer=model_folder, aliases=("small",))
    instance = Instance(name="one", engine="vllm", model=model.name, arguments=ARGUMENTS)
    engine = VllmEngine(instance, model, settings)
    try:
        began = time.monotonic()
        facts = await engine.start()
        record_property("ready_seconds", round(time.monotonic() - began, 1))
        assert (facts.kv_capacity_tokens, facts.block_size, facts.max_num_seqs) == (KV_TOKENS, 32, 16)
        assert facts.max_model_len == 2048
        assert facts.version
        assert facts.honours_salt
        assert facts.honours_priority
        assert facts.reports_cached_tokens

        tokenizing = Tokenizing(Models({model.name: model}))
        assert await key_agreement(engine, tokenizing, model) is True

        first = await engine.submit(request(model, "What is rule 3?", "aa", 1))
        second = await engine.submit(request(model, "What is rule 4?", "aa", 2))
        stranger = await engine.submit(request(model, "What is rule 4?", "bb", 3))
        assert [reply.status_code for reply in (first, second, stranger)] == [200, 200, 200]
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens is not None
        assert second.usage.prompt_tokens is not None
        assert second.usage.cached_tokens >= second.usage.prompt_tokens - 64
        assert stranger.usage.cached_tokens == 0
        assert json.loads(second.body)["choices"][0]["message"]["content"]
        await check_streams(engine, request(model, "What is rule 3?", "aa", 5), first)

        keeper = identify(facts.pid or 0)
        assert keeper is not None
        family = [keeper, *descendants([keeper.pid])]
        record_property("memory", memory(family))
        server = family[1]
        in_flight = asyncio.create_task(engine.submit(request(model, "Count to ten.", "cc", 4)))
        await asyncio.sleep(0)  # the request is on its way
        os.kill(server.pid, signal.SIGKILL)
        assert "status 137" in await asyncio.wait_for(engine.wait_dead(), 5)
        assert await asyncio.to_thread(until_gone, family, 5) == []
        with pytest.raises(EngineGone):
            await in_flight
    finally:
        await engine.stop(2)

    # The restart, in a process of its own, which then dies as a worker does.
    argv = [sys.executable, str(HOLDER), str(settings.state_folder), str(model_folder), *ARGUMENTS]
    holder = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    said = json.loads(await holder.stdout.readline())
    assert said["kv_capacity_tokens"] == KV_TOKENS
    keeper = identify(said["keeper"])
    assert keeper is not None
    family = [keeper, *descendants([keeper.pid])]
    assert len(family) >= 4
    holder.kill()
    await holder.wait()
    assert await asyncio.to_thread(until_gone, family, 5) == []
    log = (settings.state_folder / "logs" / "engine-one.log").read_text()
    assert "answer briefly" not in log


async def test_a_start_that_fails_says_why(model_folder: Path, tmp_path: Path) -> None:
    settings = Settings(state_folder=tmp_path / "state", engine_start_seconds=300)
    model = Model(name="smollm2", tokenizer=model_folder)
    instance = Instance(name="bad", engine="vllm", model=model.name, arguments=("--no-such-argument",))
    engine = VllmEngine(instance, model, settings)
    try:
        with pytest.raises(Exception, match="unrecognized arguments: --no-such-argument"):
            await engine.start()
    finally:
        await engine.stop(1)


class Sink:
    """What was streamed; held, it takes one event and no more."""

    def __init__(self, *, held: bool = False) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self._held = asyncio.Event()
        if not held:
            self._held.set()

    async def send(self, event: str) -> None:
        self.chunks.append(json.loads(event.removeprefix("data: ")))
        self.arrived.set()
        await self._held.wait()


async def check_streams(engine: VllmEngine, asked: EngineRequest, unstreamed: EngineReply) -> None:
    """Streamed, the answer is the same, and an event comes for each token; hung up on, vLLM runs nothing."""
    sink = Sink()
    reply = await engine.submit(dataclasses.replace(asked, events=sink))
    whole, expected = json.loads(reply.body), json.loads(unstreamed.body)
    choice, other = whole["choices"][0], expected["choices"][0]
    assert choice["message"]["content"] == other["message"]["content"]
    assert choice["finish_reason"] == other["finish_reason"]
    assert whole["object"] == expected["object"]
    assert reply.usage.completion_tokens == unstreamed.usage.completion_tokens
    assert reply.usage.cached_tokens is not None
    assert reply.usage.cached_tokens > 0
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in sink.chunks if chunk["choices"]]
    assert len([piece for piece in pieces if piece]) > 4
    assert sink.chunks[-1]["choices"] == []

    held = Sink(held=True)
    long = json.loads(asked.body) | {"max_tokens": 1200, "ignore_eos": True}
    task = asyncio.create_task(engine.submit(dataclasses.replace(asked, body=orjson.dumps(long), events=held)))
    await asyncio.wait_for(held.arrived.wait(), 60)
    assert await running(engine) == 1
    task.cancel()
    async with asyncio.timeout(5):
        while await running(engine):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


async def running(engine: VllmEngine) -> int:
    answer = await engine._client.get("/metrics")
    assert answer is not None
    found = re.search(rb"^vllm:num_requests_running\{.*\} (.*)$", answer[1], re.MULTILINE)
    assert found is not None
    return int(float(found.group(1)))


def memory(family: list[ProcessId]) -> str:
    """Resident memory of each process, for docs/performance.md."""
    lines = []
    for process in family:
        status = Path(f"/proc/{process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:60]
        lines.append(f"{fields['Name'].strip():>16} {int(fields['VmRSS'].split()[0]) // 1024:6} MiB  {command}")
    return "\n".join(lines)
