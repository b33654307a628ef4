"""`POST /v1/batches/plan`: a batch file read as intake reads it, and its jobs replayed on the instances that are ready.

Runs as a process of its own (`python -m service.batchplan`): it keeps a core busy for up to minutes, and the API
answers others meanwhile. The question comes as a line on standard input, the answer goes to standard output, both as
JSON. It needs no database.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from service.core.batchfile import FileValidator, LineError, ParsedLine, RawLine, iter_lines
from service.core.plan import Limits, Rates
from service.core.policies import make_policy
from service.core.ratedcost import cost_of_rates
from service.core.replay import FleetJobs, FleetReplay, replay_fleet
from service.core.scenario import EngineShape, jobs_at_once, mean_context_tokens
from service.core.simulate import DEFAULT_COST
from service.errors import ModelMissing, StoreFailed
from service.findings import Findings, check_lines
from service.fleet import Model, Models
from service.forecast import PREFIX, ROUND_ROBIN, Sharing, measure_sharing
from service.intake import chunks_of
from service.planfile import Columns
from service.store.blobs import Blobs
from service.tokenizing import KeyRequest, Tokenizing

NO_INSTANCE_BLOCK_TOKENS = 32  # as intake takes it for the bound of a batch
_STANDARD_INPUT = 0
_NICENESS = 10  # others of this host go first
_MAX_BATCHED_TOKENS = 8192  # of an engine step: vLLM's default; no boot says


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInstance:
    """An instance that takes work now. Rates are None until they are fitted."""

    name: str
    model: str
    engine: str
    block_size: int
    kv_capacity_tokens: int
    max_num_seqs: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Everything that the answer depends on."""

    store_location: str
    store_path: str
    endpoint: str
    model_policy: str
    max_lines: int
    max_line_bytes: int
    default_output_tokens: int
    cohort_jobs: int
    models: tuple[Model, ...]
    instances: tuple[ReadyInstance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What the file holds, and what would become of its valid lines. All that is predicted is simulated.

    Predictions are None where a model of the file has no ready instance; the time also where one has no rates yet.
    """

    lines: int
    valid: int
    errors: list[dict[str, Any]]  # as a batch's `errors.data`
    models: list[str]
    prefix_groups: int
    prompt_tokens: int
    shared_tokens: int
    bound_tokens: int
    predicted_cached_tokens: int | None
    round_robin_cached_tokens: int | None
    estimated_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan, or the name of what is not there: the file's bytes, or a tokenizer."""

    plan: BatchPlan | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The jobs of one model."""

    sharing: Sharing
    cached_tokens: int | None = None
    round_robin_cached_tokens: int | None = None
    seconds: float | None = None


def plan_batch(question: PlanQuestion, pieces: Iterable[bytes]) -> BatchPlan:
    """`pieces` are the file's bytes. Memory: a chunk of lines, and some 200 bytes and the key of each valid line.

    Raises ModelMissing for a broken tokenizer.
    """
    models = Models({model.name: model for model in question.models})
    validator = FileValidator(
        endpoint=question.endpoint,
        known_models=lambda name: _served(models, question.endpoint, name),
        max_lines=question.max_lines,
        model_policy=question.model_policy,
    )
    findings = Findings()
    raw_lines = iter_lines(pieces, limit_bytes=question.max_line_bytes)
    columns = _read(question, models, _checked(validator, raw_lines, findings))
    findings.of_file = findings.of_file or validator.finish()
    errors = findings.all_errors()
    parts = [_part(question, name, columns[name]) for name in sorted(columns)]
    return BatchPlan(
        lines=min(validator.lines, question.max_lines),
        valid=sum(len(item.lines) for item in columns.values()),
        errors=errors,
        models=sorted(columns),
        prefix_groups=sum(part.sharing.prefix_groups for part in parts),
        prompt_tokens=sum(part.sharing.prompt_tokens for part in parts),
        shared_tokens=sum(part.sharing.shared_tokens for part in parts),
        bound_tokens=sum(part.sharing.bound_tokens for part in parts),
        predicted_cached_tokens=_sum(part.cached_tokens for part in parts),
        round_robin_cached_tokens=_sum(part.round_robin_cached_tokens for part in parts),
        estimated_seconds=_longest(part.seconds for part in parts),
    )


def _served(models: Models, endpoint: str, name: str) -> str | None:
    model = models.resolve(name)
    return model.name if model is not None and endpoint in model.endpoints else None


def _checked(validator: FileValidator, raw_lines: Iterator[RawLine], findings: Findings) -> Iterator[list[ParsedLine]]:
    """The valid lines, chunk by chunk; nothing after an error of the whole file."""
    for chunk in chunks_of(raw_lines):
        yield [line for line in check_lines(validator, chunk, findings) if not isinstance(line, LineError)]
        if findings.of_file is not None:
            return


def _read(question: PlanQuestion, models: Models, chunks: Iterable[list[ParsedLine]]) -> dict[str, Columns]:
    """By served model. Keys are without the tenant's salt: all of these jobs have the same."""
    tokenizing = Tokenizing(models, default_output_tokens=question.default_output_tokens)
    columns: dict[str, Columns] = {}
    for chunk in chunks:
        keys = tokenizing.keys(
            [KeyRequest(model=line.model, endpoint=question.endpoint, body=line.body, salt=b"") for line in chunk]
        )
        for line, key in zip(chunk, keys, strict=True):
            name = _served(models, question.endpoint, line.model)
            assert name is not None  # the validator asked
            mine = columns.setdefault(name, Columns())
            mine.lines.append(line.line_no)
            mine.keyed.append(key)
            mine.body_bytes.append(len(line.body_bytes))
    return columns


def _part(question: PlanQuestion, model: str, columns: Columns) -> _Part:
    jobs = jobs_at_once(columns.backlog())
    instances = [instance for instance in question.instances if instance.model == model]
    blocks = [instance.block_size for instance in instances]
    sharing = measure_sharing(jobs, min(blocks, default=NO_INSTANCE_BLOCK_TOKENS))
    if not instances:
        return _Part(sharing=sharing)
    shapes = [_shape(instance, jobs) for instance in instances]
    limits = Limits(cohort_jobs=question.cohort_jobs)

    def replayed(name: str) -> FleetReplay:
        return replay_fleet(jobs, make_policy(name, limits), shapes)

    ours = replayed(PREFIX)
    return _Part(
        sharing=sharing,
        cached_tokens=int(ours.cached_tokens.sum()),
        round_robin_cached_tokens=int(replayed(ROUND_ROBIN).cached_tokens.sum()),
        seconds=ours.makespan_seconds if all(_rates(instance) for instance in instances) else None,
    )


def _shape(instance: ReadyInstance, jobs: FleetJobs) -> EngineShape:
    """Without rates the default engine: what is cached depends on them very little."""

    def shape(cost: Any) -> EngineShape:
        return EngineShape(
            block_size=instance.block_size,
            kv_capacity_tokens=instance.kv_capacity_tokens,
            max_num_seqs=instance.max_num_seqs,
            max_batched_tokens=max(_MAX_BATCHED_TOKENS, instance.max_num_seqs),
            cost=cost,
        )

    rates = _rates(instance)
    if rates is None:
        return shape(DEFAULT_COST)
    context_tokens = mean_context_tokens(jobs.jobs.prompt_tokens, jobs.output_tokens)
    return shape(cost_of_rates(rates, shape(DEFAULT_COST), context_tokens))


def _rates(instance: ReadyInstance) -> Rates | None:
    prefill, decode = instance.prefill_tokens_per_second, instance.decode_tokens_per_second
    if not prefill or not decode:
        return None
    return Rates(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if not known or None in known else sum(value or 0 for value in known)


def _longest(values: Iterable[float | None]) -> float | None:
    """Models run side by side, each on instances of its own."""
    known = list(values)
    return None if not known or None in known else max(value or 0.0 for value in known)


QUESTION = TypeAdapter(PlanQuestion)
ANSWER = TypeAdapter(PlanAnswer)


def answer(question: PlanQuestion) -> PlanAnswer:
    """What fails is named, and nothing more is said of it: a message may quote a prompt."""
    try:
        blobs = Blobs(question.store_location)
        return PlanAnswer(plan=plan_batch(question, blobs.read(question.store_path)))
    except (StoreFailed, ModelMissing) as error:
        return PlanAnswer(missing=type(error).__name__)


def main() -> None:
    os.nice(_NICENESS)
    question = bytearray()
    while not question.endswith(b"\n"):
        piece = os.read(_STANDARD_INPUT, 1 << 16)
        if not piece:
            return
        question += piece
    threading.Thread(target=_end_with_the_asker, daemon=True).start()
    sys.stdout.buffer.write(ANSWER.dump_json(answer(QUESTION.validate_json(bytes(question)))))


def _end_with_the_asker() -> None:
    """Standard input stays open as long as whoever asked lives."""
    os.read(_STANDARD_INPUT, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
