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
from workers.engines.base import EngineFacts, EngineReply, EngineRequest, EngineTimeout, EventSink

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
        self._progress: dict[int, asyncio.Queue[int]] = {}  # of streamed jobs: how many tokens are made
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
                if request.events is not None and request.endpoint != Endpoint.EMBEDDINGS:
                    return await self._stream(request, request.events, job, answer)
                return self._reply(request, await answer)
        except TimeoutError as error:
            raise EngineTimeout(f"after {request.timeout_seconds:g} s") from error
        finally:
            self._core.abort(job.job_id)  # nothing where it is finished
            self._answers.pop(job.job_id, None)
            self._progress.pop(job.job_id, None)

    async def _stream(
        self, request: EngineRequest, events: EventSink, job: SimulatedJob, answer: asyncio.Future[FinishedJob]
    ) -> EngineReply:
        """An event for each token as it is made, then the usage."""
        progress = self._progress[job.job_id] = asyncio.Queue()
        text = _text(job.output_tokens)
        total = max(job.output_tokens, 1)
        sent = 0
        while sent < total:
            made = await progress.get()
            for token in range(sent, made):
                piece = text[token * len(text) // total : (token + 1) * len(text) // total]
                await events.send(self._event(request, _delta(request, token, total, piece)))
            sent = max(sent, made)
        reply = self._reply(request, await answer)
        await events.send(self._event(request, [], usage=orjson.loads(reply.body)["usage"]))
        return reply

    def _event(self, request: EngineRequest, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if request.endpoint == Endpoint.CHAT else "text_completion"
        chunk = {**self._head(request), "object": kind, "choices": choices, **more}
        return f"data: {orjson.dumps(chunk).decode()}"

    def _head(self, request: EngineRequest) -> dict[str, Any]:
        return {
            "id": f"simulated-{request.job_id}",
            "created": int(time.time()),
            "model": self._model,
            "simulated": True,
        }

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
            for job_id, progress in self._progress.items():
                if made := self._core.made_tokens(job_id):
                    progress.put_nowait(made)
            for finished in report.finished:
                answer = self._answers.pop(finished.job_id, None)
                if finished.job_id in self._progress:
                    self._progress[finished.job_id].put_nowait(max(finished.output_tokens, 1))
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
            **self._head(request),
            **_answer(request, _text(completion_tokens)),
            "usage": {
                "prompt_tokens": finished.prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": finished.prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
            },
        }
        return EngineReply(status_code=200, body=orjson.dumps(body), usage=usage)


def _text(tokens: int) -> str:
    return f"simulated answer of {tokens} tokens"


def _delta(request: EngineRequest, token: int, total: int, piece: str) -> list[dict[str, Any]]:
    """The choices of the event of one token."""
    reason = "length" if token + 1 == total else None
    if request.endpoint == Endpoint.COMPLETIONS:
        return [{"index": 0, "text": piece, "logprobs": None, "finish_reason": reason}]
    delta = {"role": "assistant", "content": piece} if token == 0 else {"content": piece}
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]


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
