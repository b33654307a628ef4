"""A single job on its way in: judged as a line of a batch would be, tokenised, written once; and its cancel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sqlalchemy as sa

from service.api.batches import check_quota
from service.api.context import Context
from service.api.creates import Repeats
from service.api.errors import ApiError, invalid_type, invalid_value
from service.api.inputs import JsonObject, metadata_of, required, text
from service.core import strictjson
from service.core.batchfile import LineCode, check_body, strip_body
from service.core.ids import JOB_PREFIX
from service.core.model import Endpoint, Priority
from service.core.webhook import URL_RULE, parse_url
from service.fleet import Model
from service.store import singles
from service.store.clock import new_id
from service.store.singles import NewSingle
from service.store.tenants import Tenant

_MAX_DEADLINE_SECONDS = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that may be created. `said` is the request's whole body: repeats are told by it."""

    new: NewSingle
    said: JsonObject
    repeats: Repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """The job that a submission led to; `is_repeat` where it was there before."""

    public_id: str
    is_repeat: bool


def judge_submit(context: Context, tenant: Tenant, said: JsonObject) -> NewSingle:
    """The job that a body of POST /v1/jobs asks for. Raises ApiError."""
    required(said, "endpoint", "body")
    endpoint = text(said, "endpoint")
    if endpoint not in set(Endpoint):
        raise invalid_value("endpoint", f"endpoint must be one of {', '.join(Endpoint)}.")
    check_request(said["body"], endpoint, at="body")
    priority, deadline_seconds = _priority(said), _deadline_seconds(said)
    metadata, webhook_url = metadata_of(said), _webhook_url(said)
    new = keyed(context, tenant, said["body"], endpoint, at="body")
    return replace(
        new, priority=priority, deadline_seconds=deadline_seconds, metadata=metadata, webhook_url=webhook_url
    )


def check_request(body: object, endpoint: str, *, at: str) -> None:
    """Raises ApiError for what no engine would take. `at` is where the body lies, "" for the request's own."""
    error = check_body(body, endpoint=endpoint, at=at)
    if error is not None:
        code = "invalid_type" if error.code is LineCode.INVALID_REQUEST else error.code.value
        raise ApiError(400, code, error.message, param=error.param)


def keyed(context: Context, tenant: Tenant, body: JsonObject, endpoint: str, *, at: str) -> NewSingle:
    """An interactive job of a checked body. Raises ApiError 404 where its model is not served there."""
    request_body = strip_body(body)
    param = f"{at}.model" if at else "model"
    model = _model(context, request_body["model"], endpoint, param)
    found = context.tokenizing.key(request_body["model"], endpoint, request_body, salt=tenant.salt)
    return NewSingle(
        endpoint=endpoint,
        model=model.name,
        body=strictjson.dumps(request_body),
        prefix_key=found.prefix_key,
        prompt_tokens=found.prompt_tokens,
        predicted_output_tokens=found.output_tokens,
    )


def create(conn: sa.Connection, context: Context, tenant: Tenant, submission: Submission) -> Created:
    """Write the job, unless this request repeats one that was written before. Raises ApiError 429."""
    wanted_id = new_id(conn, JOB_PREFIX)
    job_id = submission.repeats.claim(conn, tenant.id, submission.said, wanted_id)
    if job_id != wanted_id:
        return Created(public_id=job_id, is_repeat=True)
    check_quota(conn, context, tenant)
    singles.create_single(conn, tenant.id, wanted_id, submission.new)
    return Created(public_id=wanted_id, is_repeat=False)


def create_unless_cancelled(conn: sa.Connection, context: Context, tenant: Tenant, submission: Submission) -> Created:
    """As `create`, for a caller who waits for the answer: one that was cancelled (the client that waited for it went
    away) answers nobody, so its repeat is a job of its own, which further repeats find."""
    created = create(conn, context, tenant, submission)
    if not created.is_repeat or singles.may_answer(conn, tenant.id, created.public_id):
        return created
    check_quota(conn, context, tenant)
    fresh_id = new_id(conn, JOB_PREFIX)
    submission.repeats.point_to(conn, tenant.id, submission.said, fresh_id)
    singles.create_single(conn, tenant.id, fresh_id, submission.new)
    return Created(public_id=fresh_id, is_repeat=False)


def _model(context: Context, name: str, endpoint: str, param: str) -> Model:
    model = context.models.resolve(name)
    if model is None or endpoint not in model.endpoints:
        where = "" if model is None else f" at {endpoint}"
        message = f"The model '{strictjson.printable(name)}' is not served{where}."
        raise ApiError(404, "model_not_found", message, param=param)
    return model


def _priority(said: JsonObject) -> Priority:
    value = said.get("priority")
    if value is None:
        return Priority.INTERACTIVE
    labels = {priority.label: priority for priority in Priority}
    if not isinstance(value, str) or value not in labels:
        raise invalid_value("priority", f"priority must be one of {', '.join(labels)}.")
    return labels[value]


def _deadline_seconds(said: JsonObject) -> float | None:
    value = said.get("deadline_seconds")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid_type("deadline_seconds", "deadline_seconds must be a number.")
    if not 0 < value <= _MAX_DEADLINE_SECONDS or not math.isfinite(value):
        raise invalid_value("deadline_seconds", f"deadline_seconds: above 0, at most {_MAX_DEADLINE_SECONDS}.")
    return float(value)


def _webhook_url(said: JsonObject) -> str | None:
    """Kept with the job. Which addresses may be called is judged when it is."""
    if said.get("webhook_url") is None:
        return None
    url = text(said, "webhook_url")
    if parse_url(url) is None:
        raise invalid_value("webhook_url", f"webhook_url is {URL_RULE}.")
    return url
