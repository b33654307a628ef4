"""What is said of a batch as a whole: its report, and the plan of one that is not created yet."""

from __future__ import annotations

from pydantic import Field

from trunkline.wire import LineError, LineErrors, Wire


class ReportLines(Wire):
    """Lines of a batch by outcome; `skipped` ones are part of `failed`."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    skipped: int = 0
    cancelled: int = 0
    expired: int = 0
    unfinished: int = 0


class TopError(Wire):
    """An error of `count` lines; the messages of the others differ in numbers at most."""

    message: str
    count: int
    code: str | None = None


class Miss(Wire):
    """Tokens of the jobs with one cause; `short_tokens` were predicted from the cache and computed all the same."""

    jobs: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    short_tokens: int = 0


class InstanceRun(Wire):
    """What an instance did for a batch; `run_seconds` is summed over lines that ran side by side."""

    name: str
    jobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hit_rate: float | None = None
    run_seconds: float = 0.0


class SlowLine(Wire):
    """One of the lines that took longest."""

    line: int
    custom_id: str
    run_ms: int
    instance: str | None = None


class Report(Wire):
    """What a batch's lines cost, what came from caches and what did not, and what failed."""

    lines: ReportLines
    top_errors: list[TopError] = Field(default_factory=list)
    tokens: dict[str, int] = Field(default_factory=dict)
    hit_rate: float | None = None
    bound: float | None = None
    misses: dict[str, Miss] = Field(default_factory=dict)
    per_instance: list[InstanceRun] = Field(default_factory=list)
    started_at: int | None = None
    finished_at: int | None = None
    slowest: list[SlowLine] = Field(default_factory=list)


class PlanInstance(Wire):
    """An instance that the plan counts on."""

    name: str
    model: str
    engine: str | None = None
    block_size: int | None = None
    kv_capacity_tokens: int | None = None


class Plan(Wire):
    """What a batch would come to. What is predicted is simulated, and None where no instance is ready for it."""

    lines: int
    valid: int
    errors: LineErrors | None = None
    models: list[str] = Field(default_factory=list)
    prefix_groups: int | None = None
    prompt_tokens: int | None = None
    shared_tokens: int | None = None
    bound: float | None = None
    predicted_hit_rate: float | None = None
    round_robin_hit_rate: float | None = None
    estimated_seconds: float | None = None
    fits_window: bool | None = None
    instances: list[PlanInstance] = Field(default_factory=list)

    @property
    def line_errors(self) -> list[LineError]:
        return self.errors.data if self.errors else []
