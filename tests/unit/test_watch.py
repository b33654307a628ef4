"""workers.watch over the simulated engine: a sound one never sounds the alarm and leaves no miss unexplained, however
small its cache; one that salts each request, or has other blocks, sounds it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from feeding import make_claim, make_job
from hypothesis import given
from hypothesis import strategies as st
from prefixes import key_of

from service.core.alarm import Mismatch
from service.core.model import MissCause
from service.core.prefix import cacheable_tokens, shared_tokens, sort_order
from service.core.simulate import SimulatedEngineCore, SimulatedJob
from service.core.usage import Usage
from service.store.cohorts import ClaimedJob
from workers.engines.base import EngineFacts, EngineReply
from workers.feeder import Ended
from workers.watch import Watch

BLOCK = 32
OUTPUT = 4


def facts(capacity_tokens: int, **changes: object) -> EngineFacts:
    made = EngineFacts(
        version=None,
        kv_capacity_tokens=capacity_tokens,
        block_size=BLOCK,
        max_num_seqs=4,
        max_model_len=None,
        honours_salt=True,
        honours_priority=True,
        reports_cached_tokens=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def planned(keys: list[bytes]) -> list[ClaimedJob]:
    """Jobs in key order, each predicted after the one before it."""
    ordered = [keys[place] for place in sort_order(keys).tolist()]
    jobs, before = [], b""
    for number, key in enumerate(ordered):
        prompt = len(key) * 8 + 7  # 32 tokens a rung, and some more
        cached = cacheable_tokens(shared_tokens(before, key), prompt, BLOCK)
        job = make_job(number, prompt=prompt, cached=cached, output=OUTPUT)
        jobs.append(replace(job, prefix_key=key, first_of_group=cached == 0))
        before = key
    return jobs


@dataclass
class Run:
    """What came of jobs on an engine."""

    watch: Watch
    causes: list[MissCause | None] = field(default_factory=list)
    short_tokens: int = 0

    def end(self, job: ClaimedJob, cached_tokens: int, fed_at: float, now: float) -> None:
        usage = Usage(prompt_tokens=job.prompt_tokens, cached_tokens=cached_tokens, completion_tokens=OUTPUT)
        reply = EngineReply(status_code=200, body=b"", usage=usage)
        item = Ended(job=job, ending=reply, run_seconds=now - fed_at, ended_at=now)
        self.causes.append(self.watch.finish(item, make_claim(), usage, leads=job.job_id == 0))
        self.short_tokens += max(0, job.predicted_cached_tokens - cached_tokens)


def run(
    jobs: list[ClaimedJob],
    *,
    capacity_tokens: int,
    block_size: int = BLOCK,
    in_flight: int = 4,
    key: Callable[[ClaimedJob], bytes] = lambda job: job.prefix_key,
) -> Run:
    """Feed an engine in order, so many at once, and watch it."""
    result = Run(watch=Watch(instance="one", engine="simulated", facts=facts(capacity_tokens)))
    core = SimulatedEngineCore(
        block_size=block_size, capacity_blocks=capacity_tokens // block_size, max_num_seqs=4, max_batched_tokens=512
    )
    waiting, flying, now = list(jobs), {}, 0.0
    result.watch.expect(jobs)
    while waiting or flying:
        while waiting and len(flying) < in_flight:
            job = waiting.pop(0)
            core.submit(
                SimulatedJob(job_id=job.job_id, key=key(job), prompt_tokens=job.prompt_tokens, output_tokens=OUTPUT)
            )
            flying[job.job_id] = (job, now)
        report = core.step()
        now += report.seconds
        for finished in report.finished:
            job, fed_at = flying.pop(finished.job_id)
            result.end(job, finished.cached_tokens, fed_at, now)
    return result


GROUPS = [key_of([group] * 20 + [100 + line] * 2) for group in range(6) for line in range(12)]


def test_a_sound_engine_serves_what_was_predicted() -> None:
    done = run(planned(GROUPS), capacity_tokens=100_000)
    assert done.short_tokens == 0
    assert set(done.causes) <= {None, MissCause.FIRST_OF_GROUP}
    assert done.causes.count(MissCause.FIRST_OF_GROUP) == 6
    assert done.watch.check() is None


rungs = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(
    st.lists(rungs, min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(9, 40),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_a_small_cache_and_any_order_sound_no_alarm_and_leave_nothing_unexplained(
    prompts: list[list[int]], copies: int, capacity_blocks: int, in_flight: int, shuffle: object
) -> None:
    jobs = planned([key_of(prompt) for prompt in prompts for _ in range(copies)])
    done = run(jobs, capacity_tokens=capacity_blocks * BLOCK, in_flight=in_flight)
    assert MissCause.UNKNOWN not in done.causes
    assert done.watch.check() is None


@pytest.mark.parametrize("capacity_tokens", [100_000, 3_000])
def test_a_salt_of_its_own_in_each_request(capacity_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    done = run(
        planned(GROUPS),
        capacity_tokens=capacity_tokens,
        key=lambda job: key_of([10_000 + job.job_id]) + job.prefix_key[4:],
    )
    with caplog.at_level(logging.ERROR):
        assert done.watch.check() is Mismatch.CACHE
        assert done.watch.check() is Mismatch.CACHE
    assert caplog.text.count("KEY MISMATCH (cache): instance=one") == 1
    done.end(planned(GROUPS)[1], 0, 1e6, 1e6 + 1)
    assert done.causes[-1] is MissCause.SALT


def test_other_blocks_than_told() -> None:
    depths = [key_of([group] * (10 + group) + [100 + line] * 2) for group in range(6) for line in range(12)]
    assert run(planned(depths), capacity_tokens=100_000).watch.check() is None
    assert run(planned(depths), capacity_tokens=100_000, block_size=64).watch.check() is Mismatch.BLOCK_SIZE
    assert run(planned(depths), capacity_tokens=100_000, block_size=128).watch.check() is Mismatch.BLOCK_SIZE


def test_what_the_start_found_is_the_alarm_from_then_on() -> None:
    assert Watch(facts=facts(1), agrees=False).check() is Mismatch.TOKENS
    assert Watch(facts=facts(1), agrees=True).check() is None
    assert Watch(facts=facts(1, told_block_size=16)).check() is Mismatch.BLOCK_SIZE
    assert Watch(facts=facts(1, told_block_size=BLOCK)).check() is None


def answered(watch: Watch, job: ClaimedJob, usage: Usage) -> MissCause | None:
    reply = EngineReply(status_code=200, body=b"", usage=usage)
    return watch.finish(Ended(job=job, ending=reply, run_seconds=1.0, ended_at=2.0), make_claim(), usage, leads=False)


def test_counts_are_compared_where_our_tokenizer_made_the_key() -> None:
    other = Usage(prompt_tokens=90, cached_tokens=0, completion_tokens=1)
    for has_tokens, alarm in ((True, Mismatch.TOKENS), (False, None)):
        asked: list[str] = []

        def tells(endpoint: str, body: object, answer: bool = has_tokens, asked: list[str] = asked) -> bool:
            asked.append(endpoint)
            return answer

        watch = Watch(facts=facts(1000), has_tokens=tells)
        for number in range(6):
            answered(watch, make_job(number), other)
        assert watch.check() is alarm
        answered(watch, make_job(7), replace(other, prompt_tokens=100))
        answered(watch, make_job(8, prompt=100), replace(other, prompt_tokens=None))
        assert len(asked) == 6
    watch = Watch(facts=facts(1000), has_tokens=lambda endpoint, body: True)
    for number in range(6):
        answered(watch, replace(make_job(number), body=b"no json"), other)
    assert watch.check() is None


def test_a_request_that_reads_no_cache_is_no_evidence() -> None:
    watch = Watch(facts=facts(100_000))
    job = replace(make_job(1, prompt=700, cached=640), prefix_key=GROUPS[0], body=b'{"prompt_logprobs":1}')
    usage = Usage(prompt_tokens=700, cached_tokens=0, completion_tokens=1)
    causes = {answered(watch, replace(job, job_id=number), usage) for number in range(40)}
    assert causes == {MissCause.CACHE_BYPASSED}
    assert watch.check() is None
