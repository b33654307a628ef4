"""The bodies that clients send, as far as the document describes them; what is unknown in them is ignored."""

from __future__ import annotations

from service.api.openapi.parts import ANYTHING, BOOLEAN, STRING, Schema, enum, fields
from service.core.model import Endpoint, Priority

_ENDPOINT = enum(*Endpoint)
_BATCH_PRIORITY = enum(*(priority.label for priority in Priority if priority is not Priority.INTERACTIVE))
_METADATA: Schema = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
_EXPIRY = fields(
    "anchor",
    "seconds",
    anchor=enum("created_at"),
    seconds={"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
)

UPLOAD: Schema = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": enum("batch"),
        "file": {"type": "string", "format": "binary", "description": "A name that ends in .jsonl."},
        "expires_after[anchor]": enum("created_at"),
        "expires_after[seconds]": {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
    },
}

WINDOW: Schema = {
    "type": "string",
    "pattern": "^[0-9]{1,7}[mhd]$",
    "description": "24h, or a number with m, h or d; at most 30d.",
}
NEW_BATCH = fields(
    "input_file_id",
    "endpoint",
    "completion_window",
    input_file_id=STRING,
    endpoint=_ENDPOINT,
    completion_window=WINDOW,
    metadata=_METADATA,
    output_expires_after=_EXPIRY,
    queue=fields(
        priority=_BATCH_PRIORITY,
        on_invalid_line=enum("fail", "skip"),
        order=enum("any", "input"),
        model_policy=enum("mixed", "strict"),
    ),
)
CHANGES = fields(
    completion_window=WINDOW,
    queue=fields(priority=_BATCH_PRIORITY, paused=BOOLEAN),
)
NEW_JOB = fields(
    "endpoint",
    "body",
    endpoint=_ENDPOINT,
    body=ANYTHING,
    priority=enum(*(priority.label for priority in Priority)),
    deadline_seconds={"type": "number", "exclusiveMinimum": 0, "maximum": 2_592_000},
    metadata=_METADATA,
    webhook_url=STRING,
)

STREAM: Schema = {"type": ["boolean", "null"]}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": fields("role", role=enum("system", "user", "assistant"), content=STRING),
}
