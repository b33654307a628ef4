"""What `trunkline plan` reads and writes: a batch file or a trace as jobs with prefix keys, and the exported plan."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

import numpy as np

from service.core import strictjson
from service.core.batchfile import FileValidator, LineError, ParsedLine, RawLine, iter_lines
from service.core.model import Endpoint
from service.core.plan import Backlog, PlannedCohort
from service.core.scenario import FleetJobs, jobs_at_once
from service.core.simulate import CostModel
from service.core.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace
from service.errors import InputRefused
from service.fleet import Model, Models, load_models
from service.intake import CHUNK_LINES, chunks_of
from service.settings import Settings
from service.tokenizing import Keyed, KeyRequest, Tokenizing

STANDARD_INPUT = "-"
BATCH_BLOCK_TOKENS = 16  # vLLM's on a GPU
_PIECE_BYTES = 1 << 20
_LONGEST_SECONDS = 1_000  # of an engine step, or of a token: whatever is above is a mistake
_TRACE_FIELDS = ("input_length", "output_length", "hash_ids")
_REQUEST_FIELDS = ("custom_id", "method", "url", "body")


class InputKind(StrEnum):
    """What INPUT turned out to be, by its first line."""

    BATCH = "batch"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanInput:
    """INPUT, read. A job's id is the number of its line in the file, from 0."""

    name: str  # for messages
    kind: InputKind
    block_size: int  # tokens of an engine's block: as asked for, or the kind's default
    jobs: FleetJobs
    model: str | None  # the served model whose tokenizer was used; None for a trace
    byte_keyed_jobs: int  # keyed by bytes: no tokenizer, or a body that the chat template refuses
    is_over_batch_limit: bool  # more lines than this server takes as one batch


def read_input(
    source: str,
    settings: Settings,
    *,
    model: str | None = None,
    block_size: int | None = None,
    trace_block_size: int | None = None,
    on_progress: Callable[[int], None] = lambda lines: None,
) -> PlanInput:
    """Read a path, or standard input for "-". `model` takes the place of the one that each line of a batch names;
    `trace_block_size`, tokens behind an id of a trace, is by default `block_size`.

    Raises InputRefused naming the first bad line, SettingError for MODELS, ModelMissing for a broken tokenizer.
    """
    name = "standard input" if source == STANDARD_INPUT else source
    with _opened(source, name) as stream:
        pieces = iter(lambda: _read(stream, name), b"")
        lines = iter_lines(pieces, limit_bytes=settings.max_line_bytes)
        first = next(lines, None)
        if first is None:
            raise InputRefused(f"{name} holds no line.")
        lines = _counted(chain([first], lines), on_progress)
        if _kind_of(first, name) is InputKind.TRACE:
            return _read_trace(lines, name, block_size=block_size, id_tokens=trace_block_size)
        if trace_block_size is not None:
            raise InputRefused(f"{name} is a batch file: --trace-block-size is for traces only.")
        return _BatchReader(settings, name, model, block_size).read(first, lines)


@contextmanager
def _opened(source: str, name: str) -> Iterator[BinaryIO]:
    if source == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    try:
        stream = Path(source).open("rb")  # noqa: SIM115 - closed below; what the reader raises is none of this
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputRefused(f"{name} cannot be read: {_why(error)}.") from error
    with stream:
        yield stream


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(_PIECE_BYTES)
    except OSError as error:
        raise InputRefused(f"{name} cannot be read: {_why(error)}.") from error


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _counted(lines: Iterable[RawLine], on_progress: Callable[[int], None]) -> Iterator[RawLine]:
    for number, line in enumerate(lines, 1):
        if number % CHUNK_LINES == 0:
            on_progress(number)
        yield line


def _kind_of(first: RawLine, name: str) -> InputKind:
    """By the members of the first line. Raises InputRefused where it has those of neither."""
    neither = f"{name} is neither a batch file ({', '.join(_REQUEST_FIELDS)}) nor a trace ({', '.join(_TRACE_FIELDS)})"
    if first.raw is None:
        raise InputRefused(f"{neither}: its first line is over the limit.")
    try:
        value = strictjson.loads(first.raw)
    except strictjson.AmbiguousJson as error:
        value = error.value  # whose line it is can be told all the same; its reader says what is wrong
    except strictjson.NotJson as error:
        raise InputRefused(f"{neither}: line {first.line_no} is not JSON ({error}).") from error
    if isinstance(value, dict):
        if any(member in value for member in _REQUEST_FIELDS):
            return InputKind.BATCH
        if any(member in value for member in _TRACE_FIELDS):
            return InputKind.TRACE
    raise InputRefused(f"{neither}: line {first.line_no} has other members.")


def _read_trace(lines: Iterable[RawLine], name: str, *, block_size: int | None, id_tokens: int | None) -> PlanInput:
    block_size = block_size or TRACE_BLOCK_TOKENS
    try:
        trace = read_trace(_physical_lines(lines, name), id_tokens or block_size)
    except TraceError as error:
        raise InputRefused(f"{name}: {error}") from error
    return PlanInput(
        name=name,
        kind=InputKind.TRACE,
        block_size=block_size,
        jobs=trace.at_once(),
        model=None,
        byte_keyed_jobs=0,
        is_over_batch_limit=False,
    )


def _physical_lines(lines: Iterable[RawLine], name: str) -> Iterator[bytes]:
    """The bytes of each line, with empty ones for the blank lines in between, so that numbers stay right."""
    before = 0
    for line in lines:
        for _ in range(line.line_no - before - 1):
            yield b""
        if line.raw is None:
            raise InputRefused(f"{name}: Line {line.line_no} is over the limit.")
        yield line.raw
        before = line.line_no


@dataclass(slots=True)
class Columns:
    """The jobs of one model, as they are read; nothing of a body is kept."""

    lines: list[int] = field(default_factory=list)  # from 0
    keyed: list[Keyed] = field(default_factory=list)
    body_bytes: list[int] = field(default_factory=list)

    def backlog(self) -> Backlog:
        def column(values: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.fromiter(values, dtype=np.int64, count=len(self.lines))

        return Backlog(
            job_ids=column(self.lines),
            keys=[item.prefix_key for item in self.keyed],
            prompt_tokens=column(item.prompt_tokens for item in self.keyed),
            output_tokens=column(item.output_tokens for item in self.keyed),
            body_bytes=column(self.body_bytes),
        )


class _BatchReader:
    """One batch file, judged and tokenised as intake does, line by line; nothing of a body is kept."""

    def __init__(self, settings: Settings, name: str, model: str | None, block_size: int | None) -> None:
        self._name, self._max_lines = name, settings.max_lines
        self._block_size = block_size or BATCH_BLOCK_TOKENS
        if not settings.models_path.exists():
            raise InputRefused(
                f"a batch file is tokenised with the model that its lines name, and there is no "
                f"{settings.models_path}: set MODELS to the file that says what is served, or run `make demo` once."
            )
        self._models = load_models(settings.models_path)
        self._tokenizing = Tokenizing(self._models, default_output_tokens=settings.default_output_tokens)
        self._given = None if model is None else _given_model(self._models, model)
        self._as_model = model  # an alias or adapter as it was given: the key knows of adapters
        self._first: tuple[Model, int] | None = None  # model and number of the first line

    def read(self, first: RawLine, lines: Iterator[RawLine]) -> PlanInput:
        endpoint = self._endpoint(first)
        validator = FileValidator(
            endpoint=endpoint, known_models=lambda name: self._served(endpoint, name), max_lines=sys.maxsize
        )
        columns = Columns()
        for chunk in chunks_of(lines):
            parsed = [self._checked(validator, raw) for raw in chunk]
            requests = [
                KeyRequest(model=self._as_model or line.model, endpoint=endpoint, body=line.body, salt=b"")
                for line in parsed
            ]
            columns.keyed += self._tokenizing.keys(requests)
            columns.lines += [line.line_no - 1 for line in parsed]
            columns.body_bytes += [len(line.body_bytes) for line in parsed]
        assert self._first is not None  # there is a first line, and it was checked
        return PlanInput(
            name=self._name,
            kind=InputKind.BATCH,
            block_size=self._block_size,
            jobs=jobs_at_once(columns.backlog()),
            model=self._first[0].name,
            byte_keyed_jobs=sum(item.kind == "bytes" for item in columns.keyed),
            is_over_batch_limit=len(columns.lines) > self._max_lines,
        )

    def _endpoint(self, first: RawLine) -> str:
        """The endpoint that the batch would be created with: the url of the first line."""
        try:
            url = strictjson.loads(first.raw or b"").get("url")
        except strictjson.AmbiguousJson:
            url = None  # the validator says it better
        known = {endpoint.value for endpoint in Endpoint}
        if not isinstance(url, str):
            return Endpoint.CHAT.value
        if url not in known:
            raise InputRefused(f"{self._name}: Line {first.line_no}: url must be one of {', '.join(sorted(known))}.")
        return url

    def _served(self, endpoint: str, name: str) -> str | None:
        model = self._given or self._models.resolve(name)
        return model.name if model is not None and endpoint in model.endpoints else None

    def _checked(self, validator: FileValidator, raw: RawLine) -> ParsedLine:
        checked = validator.check(raw)
        if isinstance(checked, LineError):
            hint = self._hint(checked)
            raise InputRefused(f"{self._name}: Line {raw.line_no}: {checked.message}{hint}")
        model = self._given or self._models.resolve(checked.model)
        assert model is not None  # the validator asked _served
        self._first = self._first or (model, raw.line_no)
        if model.name != self._first[0].name:
            raise InputRefused(
                f"{self._name}: Line {raw.line_no} asks for the model {model.name}, line {self._first[1]} for "
                f"{self._first[0].name}, and an instance serves one: tokenise all with one of them by --model."
            )
        return checked

    def _hint(self, error: LineError) -> str:
        if error.param != "body.model" or error.code != "model_not_found":
            return ""
        if self._given is not None:
            return f" ({self._given.name} does not serve the endpoint of this file)"
        return f" MODELS has {', '.join(self._models.names())}; --model plans with one of them."


def _given_model(models: Models, name: str) -> Model:
    found = models.resolve(name)
    if found is None:
        raise InputRefused(f"--model: {name} is not served; MODELS has {', '.join(models.names())}.")
    return found


def read_cost(path: Path) -> CostModel:
    """The engine's constants from a JSON object of them, or one with such an object as `cost`; what it does not name
    keeps its default. Raises InputRefused."""
    try:
        value = strictjson.loads(path.read_bytes())
    except OSError as error:
        raise InputRefused(f"--cost: {path} cannot be read: {_why(error)}.") from error
    except ValueError as error:
        raise InputRefused(f"--cost: {path} is not JSON: {error}.") from error
    constants = value.get("cost", value) if isinstance(value, dict) else None
    known = [spec.name for spec in dataclasses.fields(CostModel)]
    if not isinstance(constants, dict) or not constants or not set(constants) <= set(known):
        raise InputRefused(f"--cost: {path} must hold an object of {', '.join(known)}.")
    for name, seconds in constants.items():
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not (is_number and math.isfinite(seconds) and 0 <= seconds <= _LONGEST_SECONDS):
            raise InputRefused(f"--cost: {path}: {name} must be a number of seconds, from 0 to {_LONGEST_SECONDS}.")
    cost = CostModel(**constants)
    if min(cost.step_seconds + cost.prefill_token_seconds, cost.step_seconds + cost.decode_sequence_seconds) <= 0:
        raise InputRefused(f"--cost: {path}: prefill and decode must take some time.")
    return cost


def check_export(target: Path, source: str) -> None:
    """Raises InputRefused where the plan could not be written to `target`, before any work is done."""
    if str(target) == STANDARD_INPUT:
        raise InputRefused("--export needs a file: standard output has the figures.")
    try:
        if target.is_dir():
            raise InputRefused(f"--export: {target} is a folder.")
        if not target.absolute().parent.is_dir():
            raise InputRefused(f"--export: the folder {target.absolute().parent} is not there.")
        if source != STANDARD_INPUT and Path(source).exists() and target.exists() and target.samefile(source):
            raise InputRefused(f"--export: {target} is INPUT itself.")
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        raise InputRefused(f"--export: {target} cannot be written: {_why(error)}.") from error


def write_plan(target: Path, cohorts: Iterable[PlannedCohort]) -> None:
    """One line per job, instance by instance in execution order; whole or not at all. Raises InputRefused."""
    is_plain = target.is_file() or not target.exists()  # anything else, a pipe say, is written to as it is
    target = target.resolve() if is_plain else target  # a link stays one
    draft = target.with_name(f".{token_hex(8)}.trunkline-plan") if is_plain else target
    try:
        with draft.open("xb" if is_plain else "wb") as output:
            output.writelines(_export_lines(cohorts))
        if is_plain:
            draft.replace(target)
    except OSError as error:
        raise InputRefused(f"--export: {target} cannot be written: {_why(error)}.") from error
    finally:
        if is_plain:
            draft.unlink(missing_ok=True)


def _export_lines(cohorts: Iterable[PlannedCohort]) -> Iterator[bytes]:
    places: dict[int, int] = {}
    for number, cohort in enumerate(cohorts):
        place = places.get(cohort.instance, 0)
        for index in cohort.job_ids.tolist():
            line = f'{{"index": {index}, "instance": {cohort.instance}, "cohort": {number}, "position": {place}}}\n'
            yield line.encode()
            place += 1
        places[cohort.instance] = place
