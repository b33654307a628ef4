"""What the demo prints at its end: the numbers of its batch beside the bound and beside round robin."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from rich.table import Table

from service.core.plan import Backlog
from service.core.policies import make_policy
from service.core.replay import EngineShape, jobs_at_once, replay_fleet
from service.store.instances import Boot, list_boots
from service.store.replaying import replay_jobs
from service.store.stats import BatchStats, InstanceStats, batch_stats, instance_stats

_MAX_BATCHED_TOKENS = 2048  # vLLM's default budget of one step
_ANSWER_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """The same batch dealt out in file order. Simulated."""

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everything measured; `round_robin` alone is simulated."""

    batch: BatchStats
    instances: list[InstanceStats]
    round_robin: RoundRobin
    seconds: dict[str, float]
    memory_bytes: dict[str, int]
    output_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question and its answer, shortened for the screen."""

    custom_id: str
    question: str
    answer: str


def read_numbers(
    conn: sa.Connection, batch_id: str, *, seconds: dict[str, float], memory_bytes: dict[str, int], output_path: Path
) -> Numbers:
    """Reads the rows that the workers wrote."""
    batch = batch_stats(conn, batch_id)
    assert batch is not None
    return Numbers(
        batch=batch,
        instances=instance_stats(conn, batch_id),
        round_robin=_replay_round_robin(conn, batch_id, list_boots(conn)),
        seconds=seconds,
        memory_bytes=memory_bytes,
        output_path=output_path,
    )


def _replay_round_robin(conn: sa.Connection, batch_id: str, boots: list[Boot]) -> RoundRobin:
    """On as many simulated engines as there are, each with the capacity that the first one reported."""
    rows = replay_jobs(conn, batch_id)
    jobs = Backlog(
        job_ids=np.array([row.job_id for row in rows], dtype=np.int64),
        keys=[row.prefix_key for row in rows],
        prompt_tokens=np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        output_tokens=np.array([row.completion_tokens for row in rows], dtype=np.int64),
        body_bytes=np.zeros(len(rows), dtype=np.int64),
    )
    boot = boots[0]
    assert boot.block_size
    assert boot.kv_capacity_tokens
    assert boot.max_num_seqs
    shape = EngineShape(
        block_size=boot.block_size,
        kv_capacity_tokens=boot.kv_capacity_tokens,
        max_num_seqs=boot.max_num_seqs,
        max_batched_tokens=_MAX_BATCHED_TOKENS,
    )
    result = replay_fleet(jobs_at_once(jobs), make_policy("round_robin"), [shape] * len(boots))
    return RoundRobin(
        prompt_tokens=result.prompt_tokens, cached_tokens=int(result.cached_tokens.sum()), hit_rate=result.hit_rate
    )


def number_table(numbers: Numbers) -> Table:
    """Per instance, in sum, and what to hold it against."""
    table = Table(title="Prompt tokens served from cache", title_justify="left")
    table.add_column("")
    for head in ("jobs", "prompt tokens", "cached tokens", "hit rate"):
        table.add_column(head, justify="right")
    for row in numbers.instances:
        table.add_row(row.name, *_cells(row.tokens.jobs, row.tokens.prompt_tokens, row.tokens.cached_tokens))
    sums, batch = numbers.batch.tokens, numbers.batch
    table.add_section()
    table.add_row("together", *_cells(sums.jobs, sums.prompt_tokens, sums.cached_tokens), style="bold")
    table.add_row("predicted", *_cells(sums.jobs, sums.prompt_tokens, sums.predicted_cached_tokens))
    table.add_section()
    bound = batch.bound_tokens or 0
    table.add_row("bound (any schedule)", *_cells(sums.jobs, batch.planned_prompt_tokens, bound))
    baseline = numbers.round_robin
    table.add_row("round robin (simulated)", *_cells(sums.jobs, baseline.prompt_tokens, baseline.cached_tokens))
    return table


def _cells(jobs: int, prompt_tokens: int, cached_tokens: int) -> tuple[str, str, str, str]:
    rate = f"{cached_tokens / prompt_tokens:.1%}" if prompt_tokens else "unknown"
    return f"{jobs:,}", f"{prompt_tokens:,}", f"{cached_tokens:,}", rate


def as_json_object(numbers: Numbers) -> dict[str, Any]:
    """For `--json`."""
    batch, sums = numbers.batch, numbers.batch.tokens
    rate, bound = sums.hit_rate, batch.bound_rate
    return {
        "batch": batch.batch_id,
        "status": batch.status,
        "lines": batch.total,
        "succeeded": batch.succeeded,
        "failed": batch.failed + batch.skipped + batch.cancelled + batch.expired,
        **{name: value for name, value in asdict(sums).items() if name != "jobs"},
        "hit_rate": rate,
        "bound_rate": bound,
        "share_of_bound": rate / bound if rate is not None and bound else None,
        "round_robin_simulated": asdict(numbers.round_robin),
        "instances": [
            {"name": row.name, "engine": row.engine, **asdict(row.tokens), "hit_rate": row.tokens.hit_rate}
            for row in numbers.instances
        ],
        "seconds": {name: round(value, 1) for name, value in numbers.seconds.items()},
        "memory_bytes": numbers.memory_bytes,
        "output": str(numbers.output_path),
    }


def read_samples(source: Path, output: Path, count: int = 2) -> list[Sample]:
    """Answers to the first lines of the file that ask different things."""
    answers = {line["custom_id"]: line["response"]["body"] for line in _lines(output)}
    samples: list[Sample] = []
    tasks: set[str] = set()
    for line in _lines(source):
        messages, body = line["body"].get("messages") or [], answers.get(line["custom_id"])
        if body is None or not messages or messages[0]["content"] in tasks:
            continue
        tasks.add(messages[0]["content"])
        answer = body["choices"][0]["message"]["content"] or ""
        samples.append(
            Sample(custom_id=line["custom_id"], question=_short(messages[-1]["content"]), answer=_short(answer))
        )
        if len(samples) == count:
            break
    return samples


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSONL is split at line feeds only."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def _short(text: str) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= _ANSWER_CHARACTERS else flat[: _ANSWER_CHARACTERS - 1] + "…"
