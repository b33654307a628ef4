"""Streams of single jobs for tests: multi-turn conversations, made from a seed, that arrive one by one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from service.core.plan import Backlog
from service.core.prefix import rung_depths
from service.core.scenario import FleetJobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What the conversations are like; lengths are means."""

    seconds: float  # in which conversations begin
    conversations_per_second: float
    apps: int = 6  # each with a system prompt that all its conversations share
    system_tokens: int = 1200
    turns: int = 5
    message_tokens: int = 250
    answer_tokens: int = 200
    think_seconds: float = 20.0


def key_of_stream(conversation: int, app: int, system_tokens: int, prompt_tokens: int) -> bytes:
    """Rungs within the system prompt are the app's, those beyond it the conversation's."""
    depths = np.array(rung_depths(prompt_tokens), dtype=np.uint64)
    whose = np.where(depths <= system_tokens, app, conversation + 1_000_003).astype(np.uint64)
    return ((whose * np.uint64(2654435761) + depths * np.uint64(40503)) % np.uint64(2**32)).astype(">u4").tobytes()


def conversations(talk: Talk, seed: int) -> FleetJobs:
    """Each turn's prompt is the last one with its answer and a new message; it comes when that has been read.

    Apps are chosen by Zipf's law; gaps, lengths and thinking are exponential, turns geometric.
    """
    random = Random(seed)
    apps = range(1, talk.apps + 1)
    systems = [int(talk.system_tokens * random.uniform(0.5, 1.5)) for _ in apps]
    rows: list[tuple[float, bytes, int, int]] = []
    start, number = 0.0, 0
    while (start := start + random.expovariate(talk.conversations_per_second)) < talk.seconds:
        number += 1
        app = random.choices(apps, [1 / rank for rank in apps])[0]
        system = systems[app - 1]
        prompt, now = system, start
        while True:
            prompt += 1 + int(random.expovariate(1 / talk.message_tokens))
            answer = 1 + int(random.expovariate(1 / talk.answer_tokens))
            rows.append((now, key_of_stream(number, app, system, prompt), prompt, answer))
            if random.random() < 1 / talk.turns:
                break
            prompt += answer
            now += 0.03 * answer + random.expovariate(1 / talk.think_seconds)
    rows.sort(key=lambda row: row[0])
    return single_jobs(
        np.array([row[0] for row in rows]),
        [row[1] for row in rows],
        np.array([row[2] for row in rows], dtype=np.int64),
        np.array([row[3] for row in rows], dtype=np.int64),
    )


def single_jobs(
    arrival_seconds: np.ndarray, keys: list[bytes], prompt_tokens: np.ndarray, output_tokens: np.ndarray
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
