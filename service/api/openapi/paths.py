"""Every path of the API and what it takes and answers."""

from __future__ import annotations

from service.api.openapi.bodies import CHANGES, MESSAGES, NEW_BATCH, NEW_JOB, STREAM, UPLOAD
from service.api.openapi.parts import (
    ANYTHING,
    IDEMPOTENCY_KEY,
    INTEGER,
    STRING,
    Operation,
    Schema,
    after,
    answer,
    enum,
    fields,
    header,
    json_body,
    limit,
    many,
    operation,
    path,
    query,
    ref,
)
from service.core.model import Endpoint

_JSON_LINES = "application/jsonl"
_FILE_ID = path("file_id", "`file-` and 32 hex digits.")
_BATCH_ID = path("batch_id", "`batch_` and 32 hex digits.")
_WAIT = query("wait", {**INTEGER, "minimum": 0, "maximum": 60}, "Seconds to wait for its end.")
_JOB_ID = path("job_id", "`job_` and 32 hex digits.")
_FILES: dict[str, dict[str, Operation]] = {
    "/v1/files": {
        "post": operation(
            "uploadFile",
            "Upload a file of requests",
            tag="Files",
            parameters=[query("validate", enum("true", "false"), "Look through it at once, and report every line.")],
            body={"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}},
            ok={200: answer("The file.", {"anyOf": [ref("File"), ref("ValidatedFile")]})},
            errors=[413],
        ),
        "get": operation(
            "listFiles",
            "List files",
            tag="Files",
            parameters=[
                limit(1, 10_000, 10_000),
                after("A file id: those behind it."),
                query("order", enum("asc", "desc"), "By time of creation; desc where it is not given."),
                query("purpose", STRING, "Only files of this purpose."),
            ],
            ok={200: answer("A page of files.", ref("FilePage"))},
        ),
    },
    "/v1/files/{file_id}": {
        "get": operation(
            "getFile",
            "A file's record",
            tag="Files",
            parameters=[_FILE_ID],
            ok={200: answer("The file.", ref("File"))},
            errors=[404],
        ),
        "delete": operation(
            "deleteFile",
            "Delete a file",
            tag="Files",
            parameters=[_FILE_ID],
            ok={200: answer("It is gone.", ref("FileDeleted"))},
            errors=[404, 409],
        ),
    },
    "/v1/files/{file_id}/content": {
        "get": operation(
            "downloadFile",
            "A file's bytes",
            tag="Files",
            parameters=[_FILE_ID, header("Range", "One range of bytes.")],
            ok={
                200: answer("The whole file.", STRING, _JSON_LINES),
                206: answer("The range.", STRING, _JSON_LINES),
            },
            errors=[404, 416],
        ),
    },
}

_BATCHES: dict[str, dict[str, Operation]] = {
    "/v1/batches": {
        "post": operation(
            "createBatch",
            "Create a batch",
            tag="Batches",
            parameters=[IDEMPOTENCY_KEY],
            body=json_body(NEW_BATCH),
            ok={200: answer("The batch, in `validating`.", ref("Batch"))},
            errors=[404, 409, 413, 429],
        ),
        "get": operation(
            "listBatches",
            "List batches, newest first",
            tag="Batches",
            parameters=[limit(0, 100, 20), after("A batch id: those before it.")],
            ok={200: answer("A page of batches.", ref("BatchPage"))},
        ),
    },
    "/v1/batches/plan": {
        "post": operation(
            "planBatch",
            "What a batch would cost; nothing is created",
            tag="Batches",
            body=json_body(NEW_BATCH),
            ok={200: answer("The plan.", ref("Plan"))},
            errors=[404, 413, 429],
        ),
    },
    "/v1/batches/{batch_id}": {
        "get": operation(
            "getBatch",
            "A batch",
            tag="Batches",
            parameters=[_BATCH_ID],
            ok={200: answer("The batch.", ref("Batch"))},
            errors=[404],
        ),
        "patch": operation(
            "updateBatch",
            "Pause, resume, priority, deadline",
            tag="Batches",
            parameters=[_BATCH_ID],
            body=json_body(CHANGES),
            ok={200: answer("The batch.", ref("Batch"))},
            errors=[404, 409, 413],
        ),
        "delete": operation(
            "deleteBatch",
            "Delete a batch that has ended",
            tag="Batches",
            parameters=[_BATCH_ID],
            ok={200: answer("It is gone.", ref("BatchDeleted"))},
            errors=[404, 409],
        ),
    },
    "/v1/batches/{batch_id}/cancel": {
        "post": operation(
            "cancelBatch",
            "Cancel a batch",
            tag="Batches",
            parameters=[_BATCH_ID],
            ok={200: answer("The batch.", ref("Batch"))},
            errors=[404, 409],
        ),
    },
    "/v1/batches/{batch_id}/retry": {
        "post": operation(
            "retryBatch",
            "Failed, expired and cancelled lines in a new batch",
            tag="Batches",
            parameters=[_BATCH_ID, IDEMPOTENCY_KEY],
            ok={200: answer("The new batch.", ref("Batch"))},
            errors=[404, 409, 413, 429],
        ),
    },
    "/v1/batches/{batch_id}/results": {
        "get": operation(
            "readResults",
            "Result lines while the batch runs",
            tag="Batches",
            parameters=[_BATCH_ID, limit(0, 10_000, 1_000), after("`X-Next-After` of the page before.")],
            ok={200: answer("Lines in the order they were recorded.", STRING, _JSON_LINES)},
            errors=[404],
        ),
    },
    "/v1/batches/{batch_id}/requests": {
        "get": operation(
            "listRequests",
            "Each line's state",
            tag="Batches",
            parameters=[
                _BATCH_ID,
                query("status", STRING, "Only lines of this status."),
                limit(0, 1_000, 20),
                after("`last_id` of the page before, or the number of a line."),
            ],
            ok={200: answer("A page of lines.", ref("RequestPage"))},
            errors=[404],
        ),
    },
    "/v1/batches/{batch_id}/report": {
        "get": operation(
            "reportBatch",
            "Cache, timing and errors of a batch",
            tag="Batches",
            parameters=[_BATCH_ID],
            ok={200: answer("The report.", ref("Report"))},
            errors=[404],
        ),
    },
}

_JOBS: dict[str, dict[str, Operation]] = {
    "/v1/jobs": {
        "post": operation(
            "submitJob",
            "Submit one request",
            tag="Jobs",
            parameters=[IDEMPOTENCY_KEY, _WAIT],
            body=json_body(NEW_JOB),
            ok={202: answer("The job; `Location` says where to poll.", ref("Job"))},
            errors=[404, 409, 413, 429],
        ),
        "get": operation(
            "listJobs",
            "List jobs, newest first",
            tag="Jobs",
            parameters=[limit(0, 100, 20), after("A job id: those before it.")],
            ok={200: answer("A page of jobs.", ref("JobPage"))},
        ),
    },
    "/v1/jobs/{job_id}": {
        "get": operation(
            "getJob",
            "A job, perhaps once it has ended",
            tag="Jobs",
            parameters=[_JOB_ID, _WAIT],
            ok={200: answer("The job.", ref("Job"))},
            errors=[404],
        ),
    },
    "/v1/jobs/{job_id}/cancel": {
        "post": operation(
            "cancelJob",
            "Cancel a job",
            tag="Jobs",
            parameters=[_JOB_ID],
            ok={200: answer("The job.", ref("Job"))},
            errors=[404, 409],
        ),
    },
}


def _inference(name: str, summary: str, body: Schema) -> dict[str, Operation]:
    """What the engine says passes unchanged, so its answer is any object."""
    streamed = "text/event-stream"
    said = answer("The engine's answer, unchanged.", ANYTHING)
    if name != "createEmbeddings":
        said["content"][streamed] = {"schema": fields("data", data=STRING)}  # of each event
    return {
        "post": operation(
            name,
            summary,
            tag="Inference",
            parameters=[IDEMPOTENCY_KEY],
            body=json_body(body),
            ok={200: said},
            errors=[404, 409, 413, 422, 429, 500, 502, 504],
        )
    }


_INFERENCE = {
    Endpoint.CHAT.value: _inference(
        "createChatCompletion",
        "Chat completion",
        fields("model", "messages", model=STRING, messages=MESSAGES, stream=STREAM, max_tokens=INTEGER),
    ),
    Endpoint.COMPLETIONS.value: _inference(
        "createCompletion",
        "Completion",
        fields("model", "prompt", model=STRING, prompt=STRING, stream=STREAM, max_tokens=INTEGER),
    ),
    Endpoint.EMBEDDINGS.value: _inference(
        "createEmbeddings",
        "Embeddings",
        fields("model", "input", model=STRING, input={"anyOf": [STRING, many(STRING)]}),
    ),
}

_OTHER: dict[str, dict[str, Operation]] = {
    "/v1/models": {
        "get": operation(
            "listModels",
            "Served models",
            tag="Models",
            ok={200: answer("All of them.", ref("ModelList"))},
        )
    },
    "/v1/models/{name}": {
        "get": operation(
            "getModel",
            "A served model",
            tag="Models",
            parameters=[path("name", "Its name or an alias; it may hold slashes.")],
            ok={200: answer("The model.", ref("Model"))},
            errors=[404],
        )
    },
    "/healthz": {
        "get": operation(
            "healthz",
            "Whether the process answers",
            tag="Health",
            is_open=True,
            ok={200: answer("It does.", fields("status", status=STRING))},
        )
    },
    "/readyz": {
        "get": {
            **operation(
                "readyz",
                "Whether its parts do",
                tag="Health",
                is_open=True,
                ok={200: answer("Database and store are up.", ref("Ready"))},
            ),
        }
    },
    "/metrics": {
        "get": operation(
            "metrics",
            "Prometheus metrics",
            tag="Health",
            ok={200: answer("Prometheus text format.", STRING, "text/plain")},
        )
    },
    "/openapi.json": {
        "get": operation(
            "openapi",
            "This document",
            tag="Health",
            is_open=True,
            ok={200: answer("OpenAPI 3.1.", ANYTHING)},
        )
    },
}
_OTHER["/readyz"]["get"]["responses"]["503"] = answer("One of them is down.", ref("NotReady"))
_OTHER["/healthz"]["get"]["responses"].pop("503")
_OTHER["/openapi.json"]["get"]["responses"].pop("503")

PATHS: dict[str, dict[str, Operation]] = {**_FILES, **_BATCHES, **_JOBS, **_INFERENCE, **_OTHER}
