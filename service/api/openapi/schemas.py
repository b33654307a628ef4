"""The objects that the server sends, field by field as `service.api.objects` makes them."""

from __future__ import annotations

from service.api.openapi.parts import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    SHARE,
    STRING,
    UNIX,
    Schema,
    const,
    enum,
    many,
    nullable,
    page,
    record,
    ref,
)

_MILLISECONDS = nullable({"type": "integer", "minimum": 0})
_METADATA: Schema = {"type": ["object", "null"], "additionalProperties": STRING}
_OPEN_COUNTS: Schema = {"type": "object", "additionalProperties": COUNT}

ERROR = record(
    "Every answer that is not 2xx.",
    error=record(
        message=STRING,
        type=enum(
            "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
        ),
        param=nullable(STRING),
        code=nullable(STRING),
    ),
)

LINE_ERROR = record(
    "Why a line of a file is refused; `line` is the physical line from 1, null for the file as a whole.",
    code=STRING,
    line=nullable(INTEGER),
    message=STRING,
    param=nullable(STRING),
)

_FILE = {
    "id": STRING,
    "object": const("file"),
    "bytes": COUNT,
    "created_at": UNIX,
    "expires_at": nullable(UNIX),
    "filename": STRING,
    "purpose": enum("batch", "batch_output"),
    "status": const("processed"),
    "status_details": {"type": "null"},
}
FILE = record("An uploaded file, or one that a batch wrote.", **_FILE)
VALIDATED_FILE = record(
    "A file that was looked through on upload.",
    **_FILE,
    validation=record(lines=COUNT, valid=COUNT, errors=many(ref("LineError"))),
)
FILE_DELETED = record(id=STRING, object=const("file"), deleted={"type": "boolean", "const": True})

BATCH_CACHE = record(
    "Tokens over the lines whose usage is known; `lines_unknown` are in none of the sums.",
    prompt_tokens=COUNT,
    cached_tokens=COUNT,
    predicted_cached_tokens=COUNT,
    bound_tokens=nullable(COUNT),
    lines_unknown=COUNT,
)
BATCH_QUEUE = record(
    "Where the batch stands among the others.",
    priority=enum("low", "normal", "high"),
    paused=BOOLEAN,
    retry_of=nullable(STRING),
    prefix_groups=nullable(COUNT),
    queued=COUNT,
    running=COUNT,
    retrying=COUNT,
    cancelled=COUNT,
    expired=COUNT,
    skipped=COUNT,
    eta_seconds=nullable(NUMBER),
    position=nullable(COUNT),
    cache=ref("BatchCache"),
)
BATCH_USAGE = record(
    input_tokens=COUNT,
    input_tokens_details=record(cached_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=record(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
_CLOCKS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
BATCH = record(
    "A set of requests.",
    id=STRING,
    object=const("batch"),
    endpoint=STRING,
    model=nullable(STRING),
    errors={"anyOf": [record(object=const("list"), data=many(ref("LineError"))), {"type": "null"}]},
    input_file_id=STRING,
    completion_window=STRING,
    status=enum("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"),
    output_file_id=nullable(STRING),
    error_file_id=nullable(STRING),
    created_at=UNIX,
    expires_at=UNIX,
    **{name: nullable(UNIX) for name in _CLOCKS},
    request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
    usage=ref("BatchUsage"),
    metadata=_METADATA,
    queue=ref("BatchQueue"),
)
BATCH_DELETED = record(id=STRING, object=const("batch"), deleted={"type": "boolean", "const": True})

REQUEST = record(
    "A line of a batch.",
    id=STRING,
    line=INTEGER,
    custom_id=nullable(STRING),
    status=enum("queued", "running", "retrying", "succeeded", "failed", "cancelled", "expired", "skipped"),
    attempts=COUNT,
    instance=nullable(STRING),
    cohort=nullable(INTEGER),
    predicted_cached_tokens=nullable(COUNT),
    cached_tokens=nullable(COUNT),
    prompt_tokens=nullable(COUNT),
    completion_tokens=nullable(COUNT),
    miss_cause=nullable(STRING),
    queue_ms=_MILLISECONDS,
    run_ms=_MILLISECONDS,
)

REPORT = record(
    "What became of a batch's lines, and what the caches did.",
    object=const("report"),
    lines=_OPEN_COUNTS,
    top_errors=many(record(code=nullable(STRING), message=nullable(STRING), count=COUNT)),
    tokens=_OPEN_COUNTS,
    hit_rate=SHARE,
    bound=SHARE,
    misses={
        "type": "object",
        "description": "By cause.",
        "additionalProperties": record(jobs=COUNT, prompt_tokens=COUNT, computed_tokens=COUNT, short_tokens=COUNT),
    },
    per_instance=many(
        record(
            name=STRING,
            jobs=COUNT,
            prompt_tokens=COUNT,
            cached_tokens=COUNT,
            hit_rate=SHARE,
            run_seconds=NUMBER,
        )
    ),
    started_at=nullable(UNIX),
    finished_at=nullable(UNIX),
    slowest=many(record(line=INTEGER, custom_id=STRING, run_ms=COUNT, instance=nullable(STRING))),
)

PLAN = record(
    "What a batch would cost, before it is created.",
    object=const("plan"),
    lines=COUNT,
    valid=COUNT,
    errors={"anyOf": [record(object=const("list"), data=many(ref("LineError"))), {"type": "null"}]},
    models=many(STRING),
    prefix_groups=nullable(COUNT),
    prompt_tokens=nullable(COUNT),
    shared_tokens=nullable(COUNT),
    bound=SHARE,
    predicted_hit_rate=SHARE,
    round_robin_hit_rate=SHARE,
    estimated_seconds=nullable(NUMBER),
    fits_window=nullable(BOOLEAN),
    instances=many(
        record(name=STRING, model=STRING, engine=STRING, block_size=COUNT, kv_capacity_tokens=COUNT),
    ),
)

JOB = record(
    "One request that was submitted by itself.",
    id=STRING,
    object=const("job"),
    status=enum("queued", "running", "succeeded", "failed", "cancelled", "expired"),
    endpoint=STRING,
    model=STRING,
    priority=enum("low", "normal", "high", "interactive"),
    created_at=UNIX,
    started_at=nullable(UNIX),
    finished_at=nullable(UNIX),
    attempts=COUNT,
    instance=nullable(STRING),
    usage={"type": ["object", "null"], "additionalProperties": True},
    cache=record(predicted_cached_tokens=nullable(COUNT), cached_tokens=nullable(COUNT), miss_cause=nullable(STRING)),
    response={
        "anyOf": [record(status_code=INTEGER, request_id=STRING, body=ANYTHING), {"type": "null"}],
        "description": "What the engine answered, as in a result line.",
    },
    error={"anyOf": [record(code=nullable(STRING), message=STRING), {"type": "null"}]},
    metadata=_METADATA,
)

MODEL = record(
    "`instances` is how many serve it now.",
    id=STRING,
    object=const("model"),
    created=INTEGER,
    owned_by=STRING,
    root=STRING,
    instances=COUNT,
)

READY = record(
    status=enum("ok", "degraded"),
    database=const("up"),
    store=const("up"),
    broker=enum("up", "down"),
)
NOT_READY = record(
    status=const("down"),
    database=enum("up", "down"),
    store=enum("up", "down"),
    broker=enum("up", "down"),
    error={"type": "object", "additionalProperties": True},
)

SCHEMAS: dict[str, Schema] = {
    "Error": ERROR,
    "LineError": LINE_ERROR,
    "File": FILE,
    "ValidatedFile": VALIDATED_FILE,
    "FilePage": page("File"),
    "FileDeleted": FILE_DELETED,
    "Batch": BATCH,
    "BatchCache": BATCH_CACHE,
    "BatchQueue": BATCH_QUEUE,
    "BatchUsage": BATCH_USAGE,
    "BatchPage": page("Batch"),
    "BatchDeleted": BATCH_DELETED,
    "Request": REQUEST,
    "RequestPage": page("Request"),
    "Plan": PLAN,
    "Report": REPORT,
    "Job": JOB,
    "JobPage": page("Job"),
    "Model": MODEL,
    "ModelList": record(object=const("list"), data=many(ref("Model"))),
    "Ready": READY,
    "NotReady": NOT_READY,
}
