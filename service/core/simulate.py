"""The simulated engine, step by step. `replay` drives several.

Every figure that comes from here is simulated, and whoever shows it says so. What it keeps of vLLM's scheduler:
admission in order of (priority, arrival), a limit of running sequences and of tokens per step, decodes before
prefills, chunked prefill, blocks that hit from the step that schedules them, the last token always computed. What it
leaves out: preemption. A sequence reserves the blocks of its whole prompt and output when it is admitted, as our
worker admits only what fits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.core.blockcache import BlockCache, block_ids, own_block_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one engine step: a constant, and so much for each token and each sequence in it.

    The defaults are of the order of an 8-billion-parameter model in 16 bit on one A100: assumed, not measured.
    Reading the weights once a step (16 GB at 2 TB/s) is `step_seconds`; 16 GFLOP a token at half of 312 TFLOP/s is
    `prefill_token_seconds`; `decode_sequence_seconds` is sampling and bookkeeping; reading 128 KiB of KV for every
    token of context is `context_token_seconds`.
    """

    step_seconds: float = 0.008
    prefill_token_seconds: float = 1e-4
    decode_sequence_seconds: float = 5e-5
    context_token_seconds: float = 6.5e-8

    def seconds(self, *, prefill_tokens: int, decoding: int, context_tokens: int, steps: int = 1) -> float:
        """Time of `steps` equal steps; `context_tokens` is the sum over all decoding sequences and all the steps."""
        once = self.step_seconds + decoding * self.decode_sequence_seconds
        return once * steps + prefill_tokens * self.prefill_token_seconds + context_tokens * self.context_token_seconds

    def steps_until(self, seconds: float, *, prefill_tokens: int, decoding: int, context_tokens: int) -> int:
        """The fewest steps, 1 or more, that last `seconds`: prefill in the first, every context a token longer in each.

        `context_tokens` is the sum over the decoding sequences in the first step. Time is quadratic in the steps.
        """
        rest = seconds - prefill_tokens * self.prefill_token_seconds
        square = decoding * self.context_token_seconds / 2
        once = self.step_seconds + decoding * self.decode_sequence_seconds
        linear = once + context_tokens * self.context_token_seconds - square
        if rest <= 0 or linear <= 0:
            return 1
        # The usual formula, turned round so that it holds for square = 0 too.
        steps = 2 * rest / (linear + math.sqrt(linear * linear + 4 * square * rest))
        return max(1, math.ceil(steps))


DEFAULT_COST = CostModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One request. Lower priorities are admitted first, as in vLLM."""

    job_id: int
    key: bytes
    prompt_tokens: int
    output_tokens: int  # at least 1 is counted: the prefill gives the first
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """What became of a job; `cached_tokens` as its engine would report them."""

    job_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Time that passed (0 when there was nothing to do), the jobs that it began with, and those that ended with it."""

    seconds: float
    admitted: tuple[int, ...]  # job ids
    finished: tuple[FinishedJob, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    job: SimulatedJob
    arrival: int
    ids: list[int] | None = None  # made when it is first considered
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed_tokens: int = 0
    ends_at: int | None = None  # the step that makes the last token; None until the prompt is computed
    aborted: bool = False


class SimulatedEngineCore:
    """One engine. Drive it: submit, then step until nothing is left; jobs may be submitted and aborted in between."""

    def __init__(
        self,
        *,
        block_size: int,
        capacity_blocks: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        cost: CostModel = DEFAULT_COST,
    ) -> None:
        """Raises ValueError for a token budget below `max_num_seqs`, as vLLM does: decodes would starve."""
        if max_batched_tokens < max_num_seqs:
            raise ValueError("max_batched_tokens must be at least max_num_seqs")
        self.cache = BlockCache(capacity_blocks=capacity_blocks, block_size=block_size)
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._cost = cost
        self._sequences: dict[int, _Sequence] = {}  # waiting and running, by job id
        self._waiting: list[tuple[int, int, _Sequence]] = []  # heap of (priority, arrival)
        self._prefilling: list[_Sequence] = []  # in order of admission
        self._decoding: list[tuple[int, int, _Sequence]] = []  # heap of (last step, arrival)
        self._running = 0
        self._arrivals = 0
        self._steps = 0
        self._context_tokens = 0  # of all decoding sequences, before the next step

    @property
    def has_room(self) -> bool:
        """Nobody waits, and another sequence may run: a job that comes now begins with the next step, if it fits."""
        return self._running < self._max_num_seqs and len(self._sequences) == self._running

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._sequences

    def can_hold(self, job: SimulatedJob) -> bool:
        """Whether the job fits the empty cache; submit refuses one that does not."""
        return self._n_blocks(job) <= self.cache.capacity_blocks

    def submit(self, job: SimulatedJob) -> None:
        """Queue a job. Raises ValueError for one that can never run, or is here already."""
        if not self.can_hold(job) or job.job_id in self._sequences:
            raise ValueError(f"job {job.job_id} is too long for the cache, or here already")
        sequence = _Sequence(job=job, arrival=self._arrivals)
        self._sequences[job.job_id] = sequence
        heapq.heappush(self._waiting, (job.priority, self._arrivals, sequence))
        self._arrivals += 1

    def abort(self, job_id: int) -> bool:
        """Drop a job, waiting or running; its blocks stay in the cache as far as computed. False if it is not here."""
        sequence = self._sequences.pop(job_id, None)
        if sequence is None:
            return False
        sequence.aborted = True  # the heaps drop it when it comes up
        if not sequence.blocks:
            return True
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        else:
            ends_at = next(entry[0] for entry in self._decoding if entry[2] is sequence)
            self._context_tokens -= sequence.job.prompt_tokens + self._made(sequence, ends_at)
        self._running -= 1
        self.cache.release(sequence.blocks)
        return True

    def made_tokens(self, job_id: int) -> int:
        """Output tokens that a job has so far; 0 for one that is not here."""
        sequence = self._sequences.get(job_id)
        if sequence is None or sequence.ends_at is None:
            return 0
        return self._made(sequence, sequence.ends_at)

    def step(self, *, leap: bool = False, horizon_seconds: float = math.inf) -> StepReport:
        """One engine step; with `leap`, as many as pass before anything but decoding can happen, but none that begins
        after the horizon."""
        self._drop_aborted()
        decoding = self._running - len(self._prefilling)
        budget = self._max_batched_tokens - decoding
        budget = self._prefill(self._prefilling, budget)
        before = len(self._prefilling)
        budget = self._admit(budget)
        admitted = tuple(sequence.job.job_id for sequence in self._prefilling[before:])
        prefill_tokens = self._max_batched_tokens - decoding - budget
        if not self._running:
            return StepReport(seconds=0.0, admitted=(), finished=())
        steps = 1
        if leap and not self._prefilling:
            steps = self._decoding[0][0] - self._steps
            if horizon_seconds < math.inf:
                within = self._cost.steps_until(
                    horizon_seconds,
                    prefill_tokens=prefill_tokens,
                    decoding=decoding,
                    context_tokens=self._context_tokens,
                )
                steps = min(steps, within)
        context_tokens = steps * self._context_tokens + decoding * (steps * (steps - 1) // 2)
        seconds = self._cost.seconds(
            prefill_tokens=prefill_tokens, decoding=decoding, context_tokens=context_tokens, steps=steps
        )
        self._steps += steps
        self._context_tokens += decoding * steps
        self._begin_decoding()
        return StepReport(seconds=seconds, admitted=admitted, finished=tuple(self._finish()))

    def _n_blocks(self, job: SimulatedJob) -> int:
        return -(-self._held_tokens(job) // self.cache.block_size)

    def _held_tokens(self, job: SimulatedJob) -> int:
        """The last token of the output is never fed back, so it has no place in the cache."""
        return max(job.prompt_tokens + max(job.output_tokens, 1) - 1, 1)

    def _made(self, sequence: _Sequence, ends_at: int) -> int:
        """Output tokens made so far by a decoding sequence whose last step is `ends_at`."""
        return max(sequence.job.output_tokens, 1) - (ends_at - self._steps)

    def _drop_aborted(self) -> None:
        while self._waiting and self._waiting[0][2].aborted:
            heapq.heappop(self._waiting)
        while self._decoding and self._decoding[0][2].aborted:
            heapq.heappop(self._decoding)

    def _prefill(self, sequences: Sequence[_Sequence], budget: int) -> int:
        """Compute the next chunk of each, in order, while the budget lasts; what is left of it."""
        for sequence in sequences:
            chunk = min(sequence.job.prompt_tokens - sequence.computed_tokens, budget)
            if not chunk:
                continue
            before = sequence.computed_tokens
            sequence.computed_tokens += chunk
            budget -= chunk
            self._publish(sequence, before)
        return budget

    def _publish(self, sequence: _Sequence, before_tokens: int) -> None:
        """The blocks that were not full yet when `before_tokens` were computed."""
        assert sequence.ids is not None  # made on admission
        first = before_tokens // self.cache.block_size
        last = sequence.computed_tokens // self.cache.block_size
        for number in range(first, last):
            self.cache.publish(sequence.blocks[number], sequence.ids[number])

    def _admit(self, budget: int) -> int:
        """Admit in order until one does not fit; what is left of the budget."""
        while budget > 0 and self._running < self._max_num_seqs and self._waiting:
            sequence = self._waiting[0][2]
            if sequence.aborted:
                heapq.heappop(self._waiting)
                continue
            job = sequence.job
            if sequence.ids is None:
                sequence.ids = block_ids(job.key, job.prompt_tokens, self.cache.block_size, job.job_id)
            hits = self.cache.hits(sequence.ids, job.prompt_tokens)
            if not self.cache.fits(hits, self._n_blocks(job)):
                break
            heapq.heappop(self._waiting)
            sequence.blocks = self.cache.take(hits, self._n_blocks(job))
            sequence.cached_tokens = sequence.computed_tokens = len(hits) * self.cache.block_size
            self._running += 1
            self._prefilling.append(sequence)
            budget = self._prefill([sequence], budget)
        return budget

    def _begin_decoding(self) -> None:
        """Prompts computed in full have made their first token, and decode from the next step on."""
        still = []
        for sequence in self._prefilling:
            if sequence.computed_tokens < sequence.job.prompt_tokens:
                still.append(sequence)
                continue
            ends_at = self._steps + max(sequence.job.output_tokens, 1) - 1
            sequence.ends_at = ends_at
            heapq.heappush(self._decoding, (ends_at, sequence.arrival, sequence))
            self._context_tokens += sequence.job.prompt_tokens + 1
        self._prefilling = still

    def _finish(self) -> list[FinishedJob]:
        finished = []
        while self._decoding and (self._decoding[0][0] <= self._steps or self._decoding[0][2].aborted):
            _, _, sequence = heapq.heappop(self._decoding)
            if sequence.aborted:
                continue
            finished.append(self._end(sequence))
        return finished

    def _end(self, sequence: _Sequence) -> FinishedJob:
        job = sequence.job
        for number in range(
            job.prompt_tokens // self.cache.block_size, self._held_tokens(job) // self.cache.block_size
        ):
            self.cache.publish(sequence.blocks[number], own_block_id(job.job_id, number))
        self.cache.release(sequence.blocks)
        self._context_tokens -= job.prompt_tokens + max(job.output_tokens, 1)
        self._running -= 1
        del self._sequences[job.job_id]
        return FinishedJob(
            job_id=job.job_id,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            output_tokens=job.output_tokens,
        )
