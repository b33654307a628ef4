"""Requests and replies without I/O: each function builds one call of the contract, with how its answer is read.

Every call here may be sent again: reads, deletes and cancels are idempotent, creates carry an Idempotency-Key, and a
repeated upload leaves at most a file that nothing uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from trunkline.errors import APIError, UnreadableReply, api_error
from trunkline.wire import Batch, Deleted, File, Job, Model, Page
from trunkline.wire_lines import BatchLine
from trunkline.wire_reports import Plan, Report

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_RETRY_SECONDS = 240  # the server writes a new input file first: some seconds for each 100,000 lines
_PLAN_SECONDS = 600  # what the server may take by default
_SHOWN_BODY_BYTES = 120  # of an answer that is no envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer. Header names are lower case."""

    status_code: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The file part of a multipart request; read from its start on every try."""

    file: BinaryIO
    filename: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request. `read` turns a 2xx reply into its value; `wait_seconds` is a long poll's share of the time-out."""

    method: str
    path: str
    read: Callable[[Reply], T]
    params: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    upload: Upload | None = None
    wait_seconds: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a file, from the asked offset on; `is_last` where the file ends with it."""

    data: bytes
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsPage:
    """Result lines in the order they were recorded, and the cursor that goes on after them."""

    data: bytes
    next_after: str | None
    is_incomplete: bool  # more lines will end later


def upload_file(file: BinaryIO, filename: str, expires_after_seconds: int | None = None) -> Call[File]:
    fields = {"purpose": "batch"}
    if expires_after_seconds is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_seconds)}
    upload = Upload(file=file, filename=filename, fields=fields)
    return Call(method="POST", path="/files", upload=upload, read=_as(File))


def list_files(purpose: str | None, after: str | None, limit: int) -> Call[Page[File]]:
    params = _present(purpose=purpose, after=after, limit=limit)
    return Call(method="GET", path="/files", params=params, read=_as(Page[File]))


def get_file(file_id: str) -> Call[File]:
    return Call(method="GET", path=f"/files/{_segment(file_id)}", read=_as(File))


def delete_file(file_id: str) -> Call[Deleted]:
    return Call(method="DELETE", path=f"/files/{_segment(file_id)}", read=_as(Deleted))


def read_file(file_id: str, offset: int, size_bytes: int) -> Call[Chunk]:
    """`size_bytes` from `offset`; of a server that knows no ranges, the whole file and from it the rest."""
    headers = {"range": f"bytes={offset}-{offset + size_bytes - 1}", "accept-encoding": "identity"}

    def read(reply: Reply) -> Chunk:
        if reply.status_code != 206:
            return Chunk(data=reply.body[offset:], is_last=True)
        total = reply.headers.get("content-range", "").rpartition("/")[2]
        if not total.isdigit():
            raise UnreadableReply(f"GET {path} answered 206 without the size of the file.")
        return Chunk(data=reply.body, is_last=offset + len(reply.body) >= int(total))

    path = f"/files/{_segment(file_id)}/content"
    return Call(method="GET", path=path, headers=headers, read=read)


def create_batch(
    *,
    input_file_id: str,
    endpoint: str,
    completion_window: str,
    metadata: Mapping[str, str] | None,
    queue: Mapping[str, str] | None,
    idempotency_key: str,
) -> Call[Batch]:
    body = _present(
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window=completion_window,
        metadata=metadata,
        queue=queue,
    )
    headers = {"idempotency-key": idempotency_key}
    return Call(method="POST", path="/batches", json=body, headers=headers, read=_as(Batch))


def get_batch(batch_id: str) -> Call[Batch]:
    return Call(method="GET", path=f"/batches/{_segment(batch_id)}", read=_as(Batch))


def plan_batch(
    *, input_file_id: str, endpoint: str, completion_window: str, queue: Mapping[str, str] | None
) -> Call[Plan]:
    """Nothing is created; the answer may take minutes."""
    body = _present(input_file_id=input_file_id, endpoint=endpoint, completion_window=completion_window, queue=queue)
    return Call(method="POST", path="/batches/plan", json=body, wait_seconds=_PLAN_SECONDS, read=_as(Plan))


def get_report(batch_id: str) -> Call[Report]:
    return Call(method="GET", path=f"/batches/{_segment(batch_id)}/report", read=_as(Report))


def list_batches(after: str | None, limit: int) -> Call[Page[Batch]]:
    return Call(method="GET", path="/batches", params=_present(after=after, limit=limit), read=_as(Page[Batch]))


def cancel_batch(batch_id: str) -> Call[Batch]:
    return Call(method="POST", path=f"/batches/{_segment(batch_id)}/cancel", read=_as(Batch))


def update_batch(
    batch_id: str, *, priority: str | None, paused: bool | None, completion_window: str | None
) -> Call[Batch]:
    """What is None stays as it is."""
    queue = _present(priority=priority, paused=paused)
    body = _present(queue=queue or None, completion_window=completion_window)
    return Call(method="PATCH", path=f"/batches/{_segment(batch_id)}", json=body, read=_as(Batch))


def delete_batch(batch_id: str) -> Call[Deleted]:
    return Call(method="DELETE", path=f"/batches/{_segment(batch_id)}", read=_as(Deleted))


def retry_batch(batch_id: str, idempotency_key: str) -> Call[Batch]:
    headers = {"idempotency-key": idempotency_key}
    path = f"/batches/{_segment(batch_id)}/retry"
    return Call(method="POST", path=path, json={}, headers=headers, wait_seconds=_RETRY_SECONDS, read=_as(Batch))


def list_lines(batch_id: str, status: str | None, after: str | None, limit: int) -> Call[Page[BatchLine]]:
    params = _present(status=status, after=after, limit=limit)
    path = f"/batches/{_segment(batch_id)}/requests"
    return Call(method="GET", path=path, params=params, read=_as(Page[BatchLine]))


def batch_results(batch_id: str, after: str | None, limit: int) -> Call[ResultsPage]:
    def read(reply: Reply) -> ResultsPage:
        return ResultsPage(
            data=reply.body,
            next_after=reply.headers.get("x-next-after"),
            is_incomplete=reply.headers.get("x-incomplete", "").lower() == "true",
        )

    params = _present(after=after, limit=limit)
    return Call(method="GET", path=f"/batches/{_segment(batch_id)}/results", params=params, read=read)


def create_job(
    *,
    endpoint: str,
    body: Mapping[str, Any],
    priority: str | None,
    deadline_seconds: float | None,
    metadata: Mapping[str, str] | None,
    webhook_url: str | None,
    idempotency_key: str,
) -> Call[Job]:
    record = _present(
        endpoint=endpoint,
        body=body,
        priority=priority,
        deadline_seconds=deadline_seconds,
        metadata=metadata,
        webhook_url=webhook_url,
    )
    headers = {"idempotency-key": idempotency_key}
    return Call(method="POST", path="/jobs", json=record, headers=headers, read=_as(Job))


def get_job(job_id: str, wait_seconds: int = 0) -> Call[Job]:
    """With `wait_seconds` (0 to 60) the server answers when the job ends, or at the latest after that long."""
    params = _present(wait=wait_seconds or None)
    return Call(method="GET", path=f"/jobs/{_segment(job_id)}", params=params, wait_seconds=wait_seconds, read=_as(Job))


def list_jobs(after: str | None, limit: int) -> Call[Page[Job]]:
    return Call(method="GET", path="/jobs", params=_present(after=after, limit=limit), read=_as(Page[Job]))


def cancel_job(job_id: str) -> Call[Job]:
    return Call(method="POST", path=f"/jobs/{_segment(job_id)}/cancel", read=_as(Job))


def list_models() -> Call[Page[Model]]:
    return Call(method="GET", path="/models", read=_as(Page[Model]))


def error_of(reply: Reply, retry_after_seconds: float | None = None) -> APIError:
    """The error that a non-2xx reply stands for, also where its body is no envelope."""
    inside = _envelope(reply.body)
    start = reply.body[:_SHOWN_BODY_BYTES].decode(errors="replace").strip()
    fallback = f"HTTP {reply.status_code}" + (f" with the body {start!r}" if start else " with no body")
    return api_error(
        reply.status_code,
        message=str(inside.get("message") or fallback),
        code=_text(inside.get("code")),
        param=_text(inside.get("param")),
        request_id=reply.headers.get("x-request-id"),
        retry_after_seconds=retry_after_seconds,
    )


def _as(kind: type[M]) -> Callable[[Reply], M]:
    def read(reply: Reply) -> M:
        # json.loads, not pydantic's own reader, which refuses half a surrogate pair: an engine's answer may hold one.
        try:
            return kind.model_validate(json.loads(reply.body))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UnreadableReply(f"The answer is no {kind.__name__} ({place or 'body'}: {first['msg']}).") from error
        except (ValueError, RecursionError) as error:
            raise UnreadableReply("The answer is not JSON; is TRUNKLINE_BASE_URL a Trunkline server?") from error

    return read


def _envelope(body: bytes) -> dict[str, Any]:
    try:
        inside = json.loads(body).get("error")
    except (ValueError, AttributeError):
        return {}
    return inside if isinstance(inside, dict) else {}


def _segment(given_id: str) -> str:
    """An id as one segment of a path, whatever a user typed for it."""
    return quote(given_id, safe="")


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
