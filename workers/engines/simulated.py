"""The engine `simulated`: no model, but vLLM's scheduler and block cache, and time that passes. Never a default.

Its answers say "simulated" in the text and carry `"simulated": true`; its usage is what an engine with these
capacities would report. For tests and capacity planning.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import orjson

from service.core.model import Endpoint
from service.core.simulate import CostModel, FinishedJob, SimulatedEngineCore, SimulatedJob
from service.core.usage import Usage
from service.errors import SettingError
from service.fleet import Instance, Model
from workers.engines.base import EngineFacts, EngineReply, EngineRequest, EngineTimeout

# An 8-billion-parameter model on one GPU, roughly; the instance's `options` say otherwise.
DEFAULT_OPTIONS = {
    "kv_capacity_tokens": 400_000.0,
    "block_size": 16.0,
    "max_num_seqs": 256.0,
    "max_batched_tokens": 8192.0,
    "prefill_tokens_per_second": 10_000.0,
    "decode_tokens_per_second": 100.0,  # of each sequence
    "speed": 1.0,  # seconds that pass in the engine for each second of ours
}
_EMBEDDING_LENGTH = 8


class SimulatedEngine:
    """An in-process engine: a queue of futures over `SimulatedEngineCore`, stepped in real or scaled time."""

    kind = "simulated"

    def __init__(self, instance: Instance, model: Model) -> None:
        self._options = _read_options(instance)
        self._model = model.name
        self._core = SimulatedEngineCore(
            block_size=int(self._options["block_size"]),
            capacity_blocks=int(self._options["kv_capacity_tokens"] // self._options["block_size"]),
            max_num_seqs=int(self._options["max_num_seqs"]),
            max_batched_tokens=int(max(self._options["max_batched_tokens"], self._options["max_num_seqs"])),
            cost=CostModel(
                step_seconds=1 / self._options["decode_tokens_per_second"],
                prefill_token_seconds=1 / self._options["prefill_tokens_per_second"],
                decode_sequence_seconds=0.0,
                context_token_seconds=0.0,
            ),
        )
        self._tickets = itertools.count(1)
        self._answers: dict[int, asyncio.Future[FinishedJob]] = {}
        self._arrived = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    async def start(self) -> EngineFacts:
        self._driver = asyncio.create_task(self._drive())
        return EngineFacts(
            version="simulated",
            kv_capacity_tokens=int(self._options["kv_capacity_tokens"]),
            block_size=int(self._options["block_size"]),
            max_num_seqs=int(self._options["max_num_seqs"]),
            max_model_len=None,
            honours_salt=True,  # the key's root holds the salt
            honours_priority=True,
            reports_cached_tokens=True,
        )

    async def submit(self, request: EngineRequest) -> EngineReply:
        job = SimulatedJob(
            job_id=next(self._tickets),
            key=request.prefix_key,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.expected_output_tokens,
            priority=request.priority,
        )
        if not self._core.can_hold(job):
            return _refusal("simulated: the prompt and its answer are longer than the cache")
        self._core.submit(job)
        answer = self._answers[job.job_id] = asyncio.get_running_loop().create_future()
        self._arrived.set()
        try:
            async with asyncio.timeout(request.timeout_seconds):
                return self._reply(request, await answer)
        except TimeoutError as error:
            raise EngineTimeout(f"after {request.timeout_seconds:g} s") from error
        finally:
            self._core.abort(job.job_id)  # nothing where it is finished
            self._answers.pop(job.job_id, None)

    async def tokenize(self, endpoint: str, body: bytes) -> list[int] | None:
        return None

    async def is_alive(self) -> bool:
        return self._driver is not None and not self._driver.done()

    async def wait_dead(self) -> str:
        """It does not die by itself; an error in it is its death."""
        assert self._driver is not None
        await asyncio.wait({self._driver})
        error = None if self._driver.cancelled() else self._driver.exception()
        return f"the simulation ended ({type(error).__name__})"

    async def stop(self, grace_seconds: float) -> None:
        if self._driver is not None:
            self._driver.cancel()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while True:
            if self._core.is_idle:
                self._arrived.clear()
                await self._arrived.wait()
                now = loop.time()
            report = self._core.step()
            now += report.seconds / self._options["speed"]
            await asyncio.sleep(max(0.0, now - loop.time()))
            for finished in report.finished:
                answer = self._answers.pop(finished.job_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(finished)

    def _reply(self, request: EngineRequest, finished: FinishedJob) -> EngineReply:
        is_embedding = request.endpoint == Endpoint.EMBEDDINGS
        completion_tokens = 0 if is_embedding else finished.output_tokens
        usage = Usage(
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            completion_tokens=completion_tokens,
        )
        body = {
            "id": f"simulated-{request.job_id}",
            "created": int(time.time()),
            "model": self._model,
            "simulated": True,
            **_answer(request, f"simulated answer of {completion_tokens} tokens"),
            "usage": {
                "prompt_tokens": finished.prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": finished.prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
            },
        }
        return EngineReply(status_code=200, body=orjson.dumps(body), usage=usage)


def _answer(request: EngineRequest, text: str) -> dict[str, Any]:
    if request.endpoint == Endpoint.CHAT:
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        return {"object": "chat.completion", "choices": choices}
    if request.endpoint == Endpoint.COMPLETIONS:
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
        return {"object": "text_completion", "choices": choices}
    vector = [0.0] * _EMBEDDING_LENGTH
    return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector}]}


def _refusal(message: str) -> EngineReply:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "context_length_exceeded"}
    return EngineReply(status_code=400, body=orjson.dumps({"error": error}), usage=Usage())


def _read_options(instance: Instance) -> dict[str, float]:
    given = dict(instance.options)
    where = f"INSTANCES: [instances.{instance.name}] options:"
    unknown = sorted(set(given) - set(DEFAULT_OPTIONS))
    if unknown:
        raise SettingError(f"{where} {unknown[0]} is unknown; known are {', '.join(DEFAULT_OPTIONS)}.")
    bad = [name for name, value in given.items() if value <= 0]
    if bad:
        raise SettingError(f"{where} {bad[0]} must be above 0.")
    return {**DEFAULT_OPTIONS, **given}
