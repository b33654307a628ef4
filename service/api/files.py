"""Files: upload, read, page, download, delete."""

from __future__ import annotations

import logging
from contextlib import nullcontext

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from service.api import validate
from service.api.answers import json_answer, page_answer
from service.api.auth import Caller
from service.api.context import Context, context_of
from service.api.errors import ApiError, invalid_value, missing, not_found
from service.api.inputs import after_of, checked_expiry, limit_of
from service.api.multipart import FORM_BYTES, UploadParser, file_too_large, safe_filename
from service.api.objects import file_object
from service.api.ranges import byte_range
from service.core.ids import FILE_PREFIX, is_id
from service.errors import DatabaseUnreachable, StoreFailed
from service.store import batches, files
from service.store.blobs import CHUNK_BYTES, Blob, BlobWriter, new_blob_path
from service.store.files import File, Purpose
from service.store.session import DATABASE_AWAY
from service.store.tenants import Tenant

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/files")

_MAX_LIMIT = 10_000


@router.post("")
async def upload_file(request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    limit_bytes = context.settings.max_file_bytes
    is_judged = validate.is_asked(request)
    parser = UploadParser(request.headers.get("content-type", ""), max_file_bytes=limit_bytes)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes + FORM_BYTES:
        raise file_too_large(limit_bytes)  # before a byte of it was sent, to a client that asked (Expect)
    writer = await run_in_threadpool(context.blobs.writer, new_blob_path("input"))
    try:
        await _receive(request, parser, writer)
        _check_form(parser, writer.bytes)
        async with context.judging if is_judged else nullcontext():
            return await run_in_threadpool(_keep, context, tenant, parser, writer, is_judged)
    finally:
        await run_in_threadpool(writer.discard)


async def _receive(request: Request, parser: UploadParser, writer: BlobWriter) -> None:
    async for chunk in request.stream():
        parser.feed(chunk)
        if parser.pending_bytes >= CHUNK_BYTES:
            await run_in_threadpool(writer.write, parser.take())
    parser.finish()
    await run_in_threadpool(writer.write, parser.take())


def _check_form(parser: UploadParser, size: int) -> None:
    """The upload's errors, in the contract's order."""
    if parser.filename is None:
        raise missing("file")
    purpose = parser.fields.get("purpose")
    if purpose is None:
        raise missing("purpose")
    if purpose != Purpose.BATCH:
        raise invalid_value("purpose", "purpose must be 'batch'.")
    if not safe_filename(parser.filename).lower().endswith(".jsonl"):
        raise ApiError(400, "invalid_file_format", "The file's name must end in .jsonl.", param="file")
    if size == 0:
        raise ApiError(400, "empty_file", "The file is empty.", param="file")
    _expiry(parser.fields)


def _expiry(fields: dict[str, str]) -> int | None:
    """Seconds from now until the file expires; None for never."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    return checked_expiry("expires_after", anchor, int(seconds) if seconds and is_number else None)


def _keep(context: Context, tenant: Tenant, parser: UploadParser, writer: BlobWriter, is_judged: bool) -> Response:
    blob = writer.publish()
    try:
        report = validate.judge(context, blob.path) if is_judged else None
        shown = file_object(_record(context, tenant, parser, blob))
    except _MayBeKept:
        log.warning("the bytes of an upload are left in the file store, its row may be there: %s", blob.path)
        raise
    except BaseException:
        context.blobs.delete(blob.path)  # no row names it
        raise
    return json_answer(shown) if report is None else validate.report_answer(shown, report)


class _MayBeKept(DatabaseUnreachable):
    """The commit of a file's row was not answered, and whether it is there cannot be told."""


def _record(context: Context, tenant: Tenant, parser: UploadParser, blob: Blob) -> File:
    """The row of an upload. Raises what the database raises, and _MayBeKept from it."""
    file: File | None = None
    try:
        with context.database.transaction() as conn:
            file = files.create_file(
                conn,
                tenant_id=tenant.id,
                filename=safe_filename(parser.filename or ""),
                purpose=Purpose.BATCH,
                blob=blob,
                expires_after_seconds=_expiry(parser.fields),
            )
    except DATABASE_AWAY as error:
        if file is None:
            raise
        if not _is_kept(context, tenant, file.id):
            raise _MayBeKept from error
    return file


def _is_kept(context: Context, tenant: Tenant, file_id: str) -> bool:
    try:
        with context.database.transaction() as conn:
            return files.get_file(conn, tenant.id, file_id) is not None
    except DATABASE_AWAY:
        return False


@router.get("")
def list_files(request: Request, tenant: Caller) -> Response:
    limit = limit_of(request, default=_MAX_LIMIT, least=1, most=_MAX_LIMIT)
    after = after_of(request, FILE_PREFIX)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", "order must be asc or desc.")
    purpose = request.query_params.get("purpose")
    if purpose is not None and purpose not in set(Purpose):
        return page_answer([], limit=limit)
    with context_of(request).database.transaction() as conn:
        found = files.list_files(
            conn, tenant.id, purpose=purpose, after=after, limit=limit + 1, newest_first=order == "desc"
        )
    return page_answer([file_object(file) for file in found], limit=limit)


@router.get("/{file_id}")
def get_file(file_id: str, request: Request, tenant: Caller) -> Response:
    return json_answer(file_object(_find(context_of(request), tenant, file_id)))


@router.get("/{file_id}/content")
def download_file(file_id: str, request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    file = _find(context, tenant, file_id)
    if file.is_expired:
        raise ApiError(404, "file_expired", "The file has expired.", param="file_id")
    etag = f'"{file.sha256.hex()}"'
    same_file = request.headers.get("if-range", etag) == etag
    part = byte_range(request.headers.get("range"), file.size_bytes) if same_file else None
    start, stop = part or (0, file.size_bytes)
    headers = {"accept-ranges": "bytes", "etag": etag, "content-length": str(stop - start)}
    if part is not None:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{file.size_bytes}"
    chunks = context.blobs.read(file.store_path, start, stop)
    return StreamingResponse(chunks, 206 if part else 200, headers, media_type="application/jsonl")


@router.delete("/{file_id}")
def delete_file(file_id: str, request: Request, tenant: Caller) -> Response:
    context = context_of(request)
    _check_id(file_id)
    with context.database.transaction() as conn:
        file = files.lock_file(conn, tenant.id, file_id)
        if file is None:
            raise not_found("file_id")
        if batches.reads_file(conn, file_id):
            raise ApiError(409, "file_in_use", "A batch that has not ended reads this file.", param="file_id")
        files.delete_file(conn, file_id)
    try:
        context.blobs.delete(file.store_path)
    except StoreFailed as error:
        log.warning("file=%s is deleted, its bytes are left in the file store: %s", file_id, error)
    return json_answer({"id": file_id, "object": "file", "deleted": True})


def _check_id(file_id: str) -> None:
    if not is_id(FILE_PREFIX, file_id):
        raise not_found("file_id")


def _find(context: Context, tenant: Tenant, file_id: str) -> File:
    _check_id(file_id)
    with context.database.transaction() as conn:
        file = files.get_file(conn, tenant.id, file_id)
    if file is None:
        raise not_found("file_id")
    return file
