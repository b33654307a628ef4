"""Retry: the lines of an ended batch that were not answered well become the input file of a new batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from service.api.batches import check_quota, find_batch, object_of, window_seconds_of
from service.api.context import Context
from service.api.creates import Repeats
from service.api.errors import ApiError, not_found
from service.api.inputs import JsonObject
from service.core import strictjson
from service.core.batchfile import iter_lines
from service.core.ids import BATCH_PREFIX
from service.core.model import TaskKind
from service.store import batches, files, lines, retrying
from service.store.batches import Batch, NewBatch
from service.store.blobs import Blob, BlobMissing, BlobWriter, new_blob_path
from service.store.clock import new_id
from service.store.control import create_task
from service.store.deleting import lock_undeleted
from service.store.files import Purpose
from service.store.session import DATABASE_AWAY
from service.store.tenants import Tenant

log = logging.getLogger(__name__)

_PAGE_BYTES = 8 * 2**20  # of bodies in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """One request for a retry."""

    context: Context
    tenant: Tenant
    batch: Batch
    body: JsonObject
    repeats: Repeats


def retry_batch(
    context: Context, tenant: Tenant, batch_id: str, body: JsonObject, repeats: Repeats
) -> tuple[dict[str, Any], int | None]:
    """The new batch as it is shown, and its intake task; of a repeat, what the first one made and None.

    The file is written without a transaction open: a delete that comes in between is seen at the end. What is answered
    is read in the transaction that makes the batch: behind it nothing may fail any more. Raises ApiError.
    """
    with context.database.transaction() as conn:
        known_id = _made_before(conn, tenant, body, repeats)
        if known_id is not None:
            return object_of(conn, find_batch(conn, tenant, known_id)), None
        batch = find_batch(conn, tenant, batch_id)
        if not batch.status.is_terminal:
            message = f"The batch is {batch.status}; only one that has ended can be retried."
            raise ApiError(409, "batch_not_terminal", message, param="batch_id")
        check_quota(conn, context, tenant)
    retry = _Retry(context=context, tenant=tenant, batch=batch, body=body, repeats=repeats)
    with context.blobs.writer(new_blob_path("input")) as writer:
        _write(retry, writer)
        if not writer.bytes:
            message = "Every line of the batch was answered or skipped; there is nothing to retry."
            raise ApiError(400, "nothing_to_retry", message, param="batch_id")
        blob = writer.publish()
    return _keep(retry, blob)


def _keep(retry: _Retry, blob: Blob) -> tuple[dict[str, Any], int | None]:
    """Make the batch over the file; where it is not made, the file goes again."""
    task_id: int | None = None

    def create(conn: sa.Connection) -> dict[str, Any]:
        nonlocal task_id
        shown, task_id = _create(conn, retry, blob)
        return shown

    try:
        shown = retry.context.database.run(create)
    except BaseException as error:
        if task_id is None or not isinstance(error, DATABASE_AWAY):
            retry.context.blobs.delete(blob.path)  # no row names it
        else:  # the commit was not answered: the batch may be there, and needs its file
            log.warning("the bytes of a retry are left in the file store, its row may be there: %s", blob.path)
        raise
    if task_id is None:
        retry.context.blobs.delete(blob.path)
    return shown, task_id


def _made_before(conn: sa.Connection, tenant: Tenant, body: JsonObject, repeats: Repeats) -> str | None:
    """What an earlier request like this one made: the claim is tried and taken back. Raises IdempotencyConflict."""
    wanted_id = new_id(conn, BATCH_PREFIX)
    attempt = conn.begin_nested()
    made_id = repeats.claim(conn, tenant.id, body, wanted_id)
    attempt.rollback()
    return None if made_id == wanted_id else made_id


def _create(conn: sa.Connection, retry: _Retry, blob: Blob) -> tuple[dict[str, Any], int | None]:
    """File, batch and task in one transaction, behind whoever deletes the old batch or retries under the same key."""
    context, tenant, old = retry.context, retry.tenant, retry.batch
    wanted_id = new_id(conn, BATCH_PREFIX)
    made_id = retry.repeats.claim(conn, tenant.id, retry.body, wanted_id)
    if made_id != wanted_id:
        return object_of(conn, find_batch(conn, tenant, made_id)), None
    if not lock_undeleted(conn, old.id, to_delete=False):
        raise not_found("batch_id")
    check_quota(conn, context, tenant)
    file = files.create_file(
        conn, tenant_id=tenant.id, filename=f"{old.id}_retry.jsonl", purpose=Purpose.BATCH, blob=blob
    )
    new = NewBatch(
        endpoint=old.endpoint,
        input_file_id=file.id,
        completion_window=old.completion_window,
        window_seconds=window_seconds_of(old.completion_window, context.settings.max_window_days),
        metadata=old.metadata,
        priority=old.priority,
        on_invalid_line=old.on_invalid_line,
        line_order=old.line_order,
        model_policy=old.model_policy,
        output_expires_after_seconds=old.output_expires_after_seconds,
        retry_of=old.id,
    )
    batches.create_batch(conn, tenant.id, new, made_id)
    task_id = create_task(conn, TaskKind.INTAKE, made_id, is_hinted=True)
    return object_of(conn, find_batch(conn, tenant, made_id)), task_id


def _write(retry: _Retry, writer: BlobWriter) -> None:
    url = strictjson.dumps(retry.batch.endpoint)
    after = 0
    while page := _page(retry, after):
        for line in page:
            custom_id = strictjson.dumps(line.custom_id)
            writer.write(b'{"custom_id":%b,"method":"POST","url":%b,"body":%b}\n' % (custom_id, url, line.body))
        after = page[-1].line_no
    if retry.batch.in_progress_at is not None and not retry.batch.intake_done:
        for raw in _never_taken_in(retry):
            writer.write(raw + b"\n")


def _page(retry: _Retry, after: int) -> list[retrying.RetryLine]:
    with retry.context.database.transaction() as conn:
        return retrying.lines_to_retry(conn, retry.batch.id, after, _PAGE_BYTES)


def _never_taken_in(retry: _Retry) -> Iterator[bytes]:
    """Valid lines behind intake's place, out of the original input file. Raises ApiError where that is gone."""
    context, batch = retry.context, retry.batch
    with context.database.transaction() as conn:
        file = files.get_file(conn, retry.tenant.id, batch.input_file_id)
        refused = lines.refused_lines(conn, batch.id, after=batch.intake_line, upto=2**31 - 1)
    if file is None or file.is_expired:
        raise _file_gone()
    try:
        chunks = context.blobs.read(file.store_path, batch.intake_offset)
        limit_bytes = context.settings.max_line_bytes
        place = {"offset": batch.intake_offset, "line_no": batch.intake_line + 1}
        for raw in iter_lines(chunks, limit_bytes=limit_bytes, **place):
            if raw.raw is not None and raw.line_no not in refused:
                yield raw.raw
    except BlobMissing as error:
        raise _file_gone() from error


def _file_gone() -> ApiError:
    message = "Lines that were never taken in are in the batch's input file alone, and that is gone."
    return ApiError(404, "file_expired", message, param="input_file_id")
