"""Streams of single jobs: multi-turn conversations, made from a seed, that arrive one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from service.core.cut import FloatArray
from service.core.plan import Backlog
from service.core.prefix import IntArray, bound_tokens, rung_depths
from service.core.scenario import EngineShape, FleetJobs, mean_context_tokens

_SAMPLE, _SAMPLE_SEED = 200, 0  # the conversations that say what one of them costs
_READ_SECONDS = 0.03  # a token, of an answer; it is written meanwhile
_LIVES = 2  # of a conversation, after which about as many end as begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What the conversations are like; lengths are means."""

    apps: int = 6  # each with a system prompt that all its conversations share
    system_tokens: int = 1200
    turns: float = 5
    message_tokens: int = 250
    answer_tokens: int = 200
    think_seconds: float = 20.0


def conversations(talk: Talk, *, number: int, per_second: float, seed: int) -> FleetJobs:
    """So many conversations, which begin at random. Each turn's prompt is the last one with its answer and a new
    message; it comes when that has been read.

    Apps are chosen by Zipf's law; gaps, lengths and thinking are exponential, turns geometric.
    """
    random = Random(seed)
    apps = range(1, talk.apps + 1)
    systems = [int(talk.system_tokens * random.uniform(0.5, 1.5)) for _ in apps]
    rows: list[tuple[float, bytes, int, int]] = []
    start = 0.0
    for conversation in range(1, number + 1):
        start += random.expovariate(per_second)
        app = random.choices(apps, [1 / rank for rank in apps])[0]
        system = systems[app - 1]
        for seconds, prompt, answer in _turns(talk, system, random):
            rows.append((start + seconds, _key(conversation, app, system, prompt), prompt, answer))
    rows.sort(key=lambda row: row[0])
    return single_jobs(
        np.array([row[0] for row in rows]),
        [row[1] for row in rows],
        np.array([row[2] for row in rows], dtype=np.int64),
        np.array([row[3] for row in rows], dtype=np.int64),
    )


def _turns(talk: Talk, system_tokens: int, random: Random) -> Iterator[tuple[float, int, int]]:
    """Seconds after the beginning, tokens of the prompt, tokens of the answer."""
    prompt, seconds = system_tokens, 0.0
    while True:
        prompt += 1 + int(random.expovariate(1 / talk.message_tokens))
        answer = 1 + int(random.expovariate(1 / talk.answer_tokens))
        yield seconds, prompt, answer
        if random.random() < 1 / talk.turns:
            return
        prompt += answer
        seconds += _READ_SECONDS * answer + random.expovariate(1 / talk.think_seconds)


def _key(conversation: int, app: int, system_tokens: int, prompt_tokens: int) -> bytes:
    """Rungs within the system prompt are the app's, those beyond it the conversation's."""
    depths = np.array(rung_depths(prompt_tokens), dtype=np.uint64)
    whose = np.where(depths <= system_tokens, app, conversation + 1_000_003).astype(np.uint64)
    return ((whose * np.uint64(2654435761) + depths * np.uint64(40503)) % np.uint64(2**32)).astype(">u4").tobytes()


def single_jobs(
    arrival_seconds: FloatArray, keys: list[bytes], prompt_tokens: IntArray, output_tokens: IntArray
) -> FleetJobs:
    """Jobs whose output lengths nobody knows beforehand: the policy is told the mean."""
    n = len(keys)
    told = np.full(n, int(output_tokens.mean()), dtype=np.int64)
    return FleetJobs(
        jobs=Backlog(
            job_ids=np.arange(n, dtype=np.int64),
            keys=keys,
            prompt_tokens=prompt_tokens,
            output_tokens=told,
            body_bytes=prompt_tokens * 4,
        ),
        output_tokens=output_tokens,
        arrival_seconds=arrival_seconds,
        owners=np.zeros(n, dtype=np.int64),
        flows=np.zeros(n, dtype=np.int64),
        deadlines=np.full(n, np.inf),
    )


def least_work_seconds(jobs: FleetJobs, shape: EngineShape) -> float:
    """What the jobs cost one engine that computes everything once and batches as well as it can."""
    prompts = jobs.jobs.prompt_tokens
    rates = shape.rates(mean_context_tokens(prompts, jobs.output_tokens))
    uncached = int(prompts.sum()) - bound_tokens(jobs.jobs.keys, prompts, shape.block_size)
    prefill_seconds = uncached / rates.prefill_tokens_per_second
    return prefill_seconds + int(jobs.output_tokens.sum()) / rates.decode_tokens_per_second


def conversations_at_load(
    talk: Talk, shape: EngineShape, *, instances: int, load: float, n_jobs: int, seed: int
) -> FleetJobs:
    """About so many jobs, of conversations that begin as fast as keeps a fleet busy for the share `load` of its time.

    That is, a fleet that computes nothing twice; one that does is busier. The jobs are those of a stretch of time in
    the middle, when as many conversations end as begin; some are under way when it starts, and cached nowhere.
    Conversations are sampled for what one costs, and how long it lasts.
    """
    sample = conversations(talk, number=_SAMPLE, per_second=1.0, seed=_SAMPLE_SEED)
    per_second = load * instances * _SAMPLE / least_work_seconds(sample, shape)
    window_seconds = n_jobs / (talk.turns * per_second)
    before_seconds = _LIVES * talk.turns * (_READ_SECONDS * talk.answer_tokens + talk.think_seconds)
    number = round((before_seconds + window_seconds) * per_second)
    stream = conversations(talk, number=number, per_second=per_second, seed=seed)
    late = stream.arrival_seconds - before_seconds
    chosen = stream.take(np.flatnonzero((late >= 0) & (late < window_seconds)))
    return single_jobs(
        chosen.arrival_seconds - before_seconds, list(chosen.jobs.keys), chosen.jobs.prompt_tokens, chosen.output_tokens
    )
