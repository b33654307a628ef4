"""What one boot's results say of its cache: which prefixes ran here, why tokens are missing, and whether to sound the
alarm. Filled by the threads that run cohorts, judged by the heartbeat."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from service.core.alarm import ADVICE, WINDOW_JOBS, Mismatch, Observation, judge
from service.core.history import History, Neighbour, prefix_of
from service.core.model import MissCause
from service.core.usage import Circumstances, Usage, bypasses_cache, classify_miss
from service.store.cohorts import Claim, ClaimedJob
from workers.engines.base import EngineFacts
from workers.feeder import Ended

log = logging.getLogger(__name__)

HasTokens = Callable[[str, dict[str, Any]], bool]
"""(endpoint, parsed body) -> whether our tokenizer makes its key; else that is made of bytes."""

_SHARING_ENGINES = frozenset({"vllm", "simulated"})  # of two jobs at once, one finds what the other has computed


class Watch:
    """Of one boot. `instance` names it in the log; `agrees` is the canaries' word; `former_keys` ran on the boot
    before it."""

    def __init__(
        self,
        *,
        instance: str = "",
        engine: str = "",
        facts: EngineFacts,
        agrees: bool | None = None,
        has_tokens: HasTokens = lambda endpoint, body: False,
        former_keys: Iterable[bytes] = (),
    ) -> None:
        self._instance = instance
        self._engine = engine
        self._block_size = facts.block_size
        self._has_tokens = has_tokens
        self._lock = threading.Lock()
        self._history = History(
            capacity_tokens=facts.kv_capacity_tokens, most_running=facts.max_num_seqs, former_keys=former_keys
        )
        self._seen: deque[Observation] = deque(maxlen=WINDOW_JOBS)
        told = facts.told_block_size
        self.mismatch: Mismatch | None = None  # once set, it stays: a boot is one life
        if agrees is False:
            self.mismatch = Mismatch.TOKENS
        elif told is not None and told != facts.block_size:
            self._sound(Mismatch.BLOCK_SIZE)

    def expect(self, jobs: Iterable[ClaimedJob]) -> None:
        """These were handed to the feeder."""
        with self._lock:
            for job in jobs:
                self._history.expect(job.job_id, job.prefix_key)

    def leave(self, jobs: Iterable[ClaimedJob]) -> None:
        """These will not be computed here."""
        with self._lock:
            for job in jobs:
                self._history.leave(job.job_id)

    def finish(self, item: Ended, claim: Claim, usage: Usage, *, leads: bool) -> MissCause | None:
        """A job was answered: remember it, and say why fewer tokens came from the cache than might have."""
        job, cached = item.job, usage.cached_tokens
        bypassed = (
            cached is not None and cached < job.predicted_cached_tokens and bypasses_cache(job.endpoint, job.body)
        )
        prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else job.prompt_tokens
        return classify_miss(
            predicted_cached_tokens=job.predicted_cached_tokens,
            cached_tokens=cached,
            prompt_tokens=prompt_tokens,
            block_size=self._block_size or 1,
            circumstances=Circumstances(
                first_of_group=job.first_of_group,
                neighbour=self._remember(item, usage, prompt_tokens, None if bypassed else cached),
                leads_cohort=leads,
                moved=claim.moved,
                rerun=claim.attempt > 1,
                cache_bypassed=bypassed,
                mismatch=self.mismatch,
                shared_engine=self._engine == "openai",
            ),
        )

    def _remember(self, item: Ended, usage: Usage, prompt_tokens: int, evidence: int | None) -> Neighbour:
        """Where its prefix had been computed. `evidence`: its cached tokens, where they say something of the cache."""
        job = item.job
        planned = self._planned_tokens(job, usage)
        written_tokens = max(0, prompt_tokens - (usage.cached_tokens or 0)) + (usage.completion_tokens or 0)
        with self._lock:
            found = self._history.end(
                job.job_id,
                job.prefix_key,
                job.predicted_cached_tokens,
                fed_at=item.ended_at - item.run_seconds,
                ended_at=item.ended_at,
                written_tokens=written_tokens,
            )
            observed = Observation(
                prefix=prefix_of(job.prefix_key, job.predicted_cached_tokens),
                predicted_cached_tokens=job.predicted_cached_tokens,
                cached_tokens=evidence,
                planned_prompt_tokens=planned,
                prompt_tokens=usage.prompt_tokens,
                neighbour=found,
            )
            self._seen.append(observed)
        return found

    def check(self) -> Mismatch | None:
        """The alarm, judged anew; said in the log once."""
        if self.mismatch is None:
            with self._lock:
                seen = list(self._seen)
            found = judge(seen, self._block_size, shares_in_flight=self._engine in _SHARING_ENGINES)
            if found is not None:
                self._sound(found)
        return self.mismatch

    def _sound(self, found: Mismatch) -> None:
        self.mismatch = found
        log.error("KEY MISMATCH (%s): instance=%s: %s", found, self._instance, ADVICE[found])

    def _planned_tokens(self, job: ClaimedJob, usage: Usage) -> int | None:
        """The prompt's length as its key has it; None where that is an estimate. Where the engine counts the same it
        is none that matters; where it does not, our tokenizer is asked whether it made the key."""
        if usage.prompt_tokens is None or self.mismatch is not None:
            return None
        if usage.prompt_tokens == job.prompt_tokens:
            return job.prompt_tokens
        try:
            body = orjson.loads(job.body)
        except orjson.JSONDecodeError:
            return None
        return job.prompt_tokens if isinstance(body, dict) and self._has_tokens(job.endpoint, body) else None
