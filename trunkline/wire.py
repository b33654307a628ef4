"""The contract's objects as the server sends them. Fields that a newer server adds are kept and do no harm."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

TERMINAL_BATCH = frozenset({"completed", "failed", "expired", "cancelled"})
TERMINAL_JOB = frozenset({"succeeded", "failed", "cancelled", "expired"})


class Wire(BaseModel):
    """Statuses are plain strings, so that a status this version does not know still parses."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    def as_dict(self) -> dict[str, Any]:
        """The object as the server sent it."""
        return self.model_dump(exclude_unset=True)


class Error(Wire):
    """An error envelope's inside, or the error of a result line."""

    message: str = ""
    code: str | None = None
    type: str | None = None
    param: str | None = None


class LineError(Wire):
    """Why a line of an input file was refused; `line` is the physical line from 1, None for the file as a whole."""

    code: str
    message: str = ""
    line: int | None = None
    param: str | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        where = f" ({self.code}, {self.param})" if self.param else f" ({self.code})"
        return f"{place}{self.message.rstrip('.')}{where}"


class LineErrors(Wire):
    """The list in a failed batch."""

    data: list[LineError] = []


class File(Wire):
    """An uploaded file, or one that a batch wrote."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str | None = None
    expires_at: int | None = None


class RequestCounts(Wire):
    """Lines of a batch; what is cancelled or expired stands in `Batch.queue`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Wire):
    """Part of BatchUsage."""

    cached_tokens: int | None = None


class OutputDetails(Wire):
    """Part of BatchUsage."""

    reasoning_tokens: int | None = None


class BatchUsage(Wire):
    """Running totals of a batch, over the lines whose usage is known."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class BatchCache(Wire):
    """What came from the engines' caches; `lines_unknown` lines are in none of the sums."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    bound_tokens: int | None = None
    lines_unknown: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """Cached / prompt tokens; None as long as nothing is known."""
        if not self.prompt_tokens or self.cached_tokens is None:
            return None
        return self.cached_tokens / self.prompt_tokens


class BatchQueue(Wire):
    """Trunkline's extension of the batch object."""

    priority: str | None = None
    paused: bool = False
    retry_of: str | None = None
    prefix_groups: int | None = None
    queued: int | None = None
    running: int | None = None
    retrying: int | None = None
    cancelled: int | None = None
    expired: int | None = None
    skipped: int | None = None
    eta_seconds: float | None = None
    position: int | None = None
    cache: BatchCache = BatchCache()


class Batch(Wire):
    """A producer's set of requests."""

    id: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    model: str | None = None
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None
    queue: BatchQueue = BatchQueue()

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_BATCH

    @property
    def line_errors(self) -> list[LineError]:
        return self.errors.data if self.errors else []

    @property
    def lines_ended(self) -> int:
        """Lines that need no more work, whatever came of them."""
        counts = self.request_counts
        return counts.completed + counts.failed + (self.queue.cancelled or 0) + (self.queue.expired or 0)


class PromptDetails(Wire):
    """Part of Usage."""

    cached_tokens: int | None = None


class CompletionDetails(Wire):
    """Part of Usage."""

    reasoning_tokens: int | None = None


class Usage(Wire):
    """The engine's own usage of one answer. `cached_tokens` None: it did not say, which is not 0."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class JobCache(Wire):
    """Predicted beside measured."""

    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    miss_cause: str | None = None


class Response(Wire):
    """What an engine answered."""

    status_code: int
    request_id: str | None = None
    body: Any = None


class Answered(Wire):
    """What a job and a result line have in common: a response or an error."""

    response: Response | None = None
    error: Error | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and 200 <= self.response.status_code < 300

    @property
    def body(self) -> dict[str, Any] | None:
        """The engine's answer where it is a good one: a chat completion, a completion, embeddings."""
        body = self.response.body if self.is_success and self.response else None
        return body if isinstance(body, dict) else None

    @property
    def text(self) -> str | None:
        """The text of the first choice, of chat and of completions."""
        choices = (self.body or {}).get("choices") or [{}]
        text = (choices[0].get("message") or {}).get("content") or choices[0].get("text")
        return text if isinstance(text, str) else None

    @property
    def failure(self) -> Error | None:
        """Why there is no good answer, whichever place of the object says it."""
        if self.error is not None:
            return self.error
        if self.response is None or self.is_success:
            return None
        body = self.response.body
        inside = body.get("error") if isinstance(body, dict) else None
        fields = {"message": f"the engine answered {self.response.status_code}"}
        return Error.model_validate({**fields, **inside} if isinstance(inside, dict) else fields)


class Job(Answered):
    """A single request, submitted and polled."""

    id: str
    status: str
    endpoint: str
    created_at: int
    model: str | None = None
    started_at: int | None = None
    finished_at: int | None = None
    attempts: int | None = None
    instance: str | None = None
    usage: Usage | None = None
    cache: JobCache = JobCache()
    metadata: dict[str, str] | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL_JOB


class Result(Answered):
    """One line of an output or error file. `custom_id` is None where the input line had none that could be read."""

    id: str | None = None
    custom_id: str | None = None

    @property
    def usage(self) -> Usage | None:
        counted = (self.body or {}).get("usage")
        return Usage.model_validate(counted) if isinstance(counted, dict) else None


class Model(Wire):
    """A name that a request may carry."""

    id: str
    created: int | None = None
    owned_by: str | None = None


T = TypeVar("T", bound=Wire)


class Page(Wire, Generic[T]):
    """One page of a list, newest first."""

    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class Deleted(Wire):
    """The answer to a delete."""

    id: str
    deleted: bool = False
