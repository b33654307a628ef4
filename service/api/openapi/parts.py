"""What the pages of the document are made of: schemas of one line, operations, and the errors that each may answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]
Operation = dict[str, Any]

_SAID = {
    400: "The request is refused: a field or a parameter is wrong.",
    401: "No API key, or a wrong or revoked one.",
    404: "There is none of that id, or it is another tenant's.",
    405: "The method is not allowed here.",
    409: "It is not in a state that allows this. Never repeated: `x-should-retry` is false.",
    413: "The body is larger than the limit.",
    416: "The range cannot be satisfied.",
    422: "The engine refused the request.",
    429: "A quota or a limit is reached; `Retry-After` says when to come again.",
    500: "The server, or the engine, failed.",
    502: "The engine gave no valid answer.",
    503: "A part of the server does not answer. Nothing was written.",
    504: "The engine did not answer in time.",
}

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object", "additionalProperties": True}
COUNT: Schema = {"type": "integer", "minimum": 0}
SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
UNIX: Schema = {"type": "integer", "description": "Unix seconds."}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def const(value: str) -> Schema:
    return {"type": "string", "const": value}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(description: str = "", /, **properties: Schema) -> Schema:
    """An object that has all of these, and nothing else."""
    made: Schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"description": description, **made} if description else made


def fields(*required: str, **properties: Schema) -> Schema:
    """An object that a client sends: what is unknown in it is ignored."""
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": True}
    return {**made, "required": list(required)} if required else made


def page(item: str) -> Schema:
    return record(
        object=const("list"),
        data=many(ref(item)),
        first_id=nullable(STRING),
        last_id=nullable(STRING),
        has_more=BOOLEAN,
    )


def path(name: str, says: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "description": says, "schema": STRING}


def query(name: str, schema: Schema, says: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": says, "schema": schema}


def header(name: str, says: str) -> Schema:
    return {"name": name, "in": "header", "required": False, "description": says, "schema": STRING}


def limit(least: int, most: int, default: int) -> Schema:
    schema = {"type": "integer", "minimum": least, "maximum": most, "default": default}
    return query("limit", schema, "How many at most.")


def after(what: str) -> Schema:
    return query("after", STRING, what)


IDEMPOTENCY_KEY = header("Idempotency-Key", "The same key with the same body: the same answer, for 24 hours.")


def json_body(schema: Schema) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def answer(says: str, schema: Schema, media_type: str = "application/json") -> Schema:
    return {"description": says, "content": {media_type: {"schema": schema}}}


def operation(
    name: str,
    summary: str,
    *,
    tag: str,
    ok: Mapping[int, Schema],
    errors: Iterable[int] = (),
    parameters: Iterable[Schema] = (),
    body: Schema | None = None,
    description: str = "",
    is_open: bool = False,
) -> Operation:
    """One method of one path. Every one may be refused for its key (unless `is_open`) and while a part is down."""
    always = (503,) if is_open else (400, 401, 503)
    failures = {str(status): answer(_SAID[status], ref("Error")) for status in sorted({*errors, *always})}
    made: Operation = {
        "operationId": name,
        "summary": summary,
        "tags": [tag],
        "responses": {**{str(status): said for status, said in ok.items()}, **failures},
    }
    if description:
        made["description"] = description
    if parameters:
        made["parameters"] = list(parameters)
    if body is not None:
        made["requestBody"] = body
    if is_open:
        made["security"] = []
    return made
