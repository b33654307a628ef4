"""Single jobs, one by one: the ledger serves as much from cache as affinity or more, and shares work out better."""

from __future__ import annotations

import numpy as np
import pytest
from streams import Talk, conversations, single_jobs
from traces import trace_folder

from service.core.cut import FloatArray
from service.core.policies import make_policy
from service.core.replay import FleetReplay, replay_fleet
from service.core.scenario import EngineShape, FleetJobs, mean_context_tokens
from service.core.trace import read_trace

_CHANCE = 0.02  # of max/mean: the mean over four seeds moves more than that from one set of seeds to another


def work_seconds(jobs: FleetJobs, result: FleetReplay, shape: EngineShape) -> FloatArray:
    """What each instance computed: a stream ends everywhere at the same time, so its makespan says nothing."""
    rates = shape.rates(mean_context_tokens(jobs.jobs.prompt_tokens, jobs.output_tokens))
    prefill = (jobs.jobs.prompt_tokens - result.cached_tokens) / rates.prefill_tokens_per_second
    seconds = prefill + jobs.output_tokens / rates.decode_tokens_per_second
    ran = result.instance >= 0
    return np.bincount(result.instance[ran], weights=seconds[ran], minlength=len(result.instances))


def replayed(name: str, jobs: FleetJobs, shape: EngineShape, instances: int) -> tuple[float, float, float]:
    """Hit rate, imbalance (max/mean of work), and mean seconds from arrival to finish."""
    result = replay_fleet(jobs, make_policy(name), [shape] * instances)
    assert result.refused_jobs == 0
    work = work_seconds(jobs, result, shape)
    latency = result.finish_seconds - jobs.arrival_seconds
    return result.hit_rate, float(work.max() / work.mean()), float(latency.mean())


def check_ledger_against_affinity(streams: list[FleetJobs], shape: EngineShape, instances: int) -> None:
    """On the mean of the streams: placements are chaotic, and one stream is a matter of luck."""
    ours = np.mean([replayed("ledger", jobs, shape, instances) for jobs in streams], axis=0)
    theirs = np.mean([replayed("affinity", jobs, shape, instances) for jobs in streams], axis=0)
    (hit_rate, imbalance, latency_seconds), (other_hit_rate, other_imbalance, other_latency_seconds) = ours, theirs
    assert hit_rate >= other_hit_rate
    assert imbalance <= other_imbalance + _CHANCE
    assert latency_seconds <= other_latency_seconds


@pytest.mark.parametrize(
    ("instances", "kv_tokens", "talk"),
    [
        (8, 100_000, Talk(seconds=120, conversations_per_second=3)),
        (4, 100_000, Talk(seconds=60, conversations_per_second=8, think_seconds=8)),
        (8, 300_000, Talk(seconds=40, conversations_per_second=18, think_seconds=8)),
    ],
    ids=["quiet", "busy", "wide"],
)
def test_conversations(instances: int, kv_tokens: int, talk: Talk) -> None:
    shape = EngineShape(block_size=32, kv_capacity_tokens=kv_tokens)
    check_ledger_against_affinity([conversations(talk, seed) for seed in (1, 2, 3, 4)], shape, instances)


def test_one_hot_prefix_is_warmed_where_it_is_needed() -> None:
    """A product alone would leave it on one instance until that is many seconds behind."""
    talk = Talk(
        seconds=15,
        conversations_per_second=120,
        apps=1,
        system_tokens=3000,
        turns=1,
        message_tokens=80,
        answer_tokens=60,
    )
    shape = EngineShape(block_size=32, kv_capacity_tokens=100_000)
    hit_rate, imbalance, _ = replayed("ledger", conversations(talk, 1), shape, 4)
    assert hit_rate > 0.94
    assert imbalance < 1.1


def test_the_production_stream() -> None:
    """The conversation trace by its timestamps, at 0.7 of the time it took: 8 engines are three quarters busy."""
    with (trace_folder() / "conversation_trace.jsonl").open("rb") as lines:
        trace = read_trace(lines)
    jobs = single_jobs(
        trace.timestamp_seconds * 0.7, trace.jobs.keys, trace.jobs.prompt_tokens, trace.jobs.output_tokens
    )
    check_ledger_against_affinity([jobs], EngineShape(block_size=512, kv_capacity_tokens=1_000_000), 8)
