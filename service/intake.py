"""Intake: a batch's input file to job rows. Pass 1 validates every line, pass 2 tokenises and COPYs in chunks.

Each chunk is committed with the place in the file that it ends at, under the task's fence, so that a restart goes
on from there. Memory is bounded by a chunk (and 150 bytes a line for custom_ids, in pass 1). A batch that is
cancelled or expires meanwhile ends intake quietly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum, auto
from itertools import islice
from typing import Any

import sqlalchemy as sa

from service.core.batchfile import (
    FileValidator,
    LineError,
    ParsedLine,
    RawLine,
    iter_lines,
    parse_line,
)
from service.core.model import BatchStatus
from service.errors import StoreFailed
from service.file_tokens import TokenEstimate, rough_estimate, sampled_estimate
from service.findings import Findings, check_lines
from service.grouping import measure_batch
from service.store import batches, control, files, lines, quotas, tenants
from service.store.batches import Batch
from service.store.blobs import BlobMissing
from service.store.control import ControlTask
from service.store.lines import IntakePlace, NewLine
from service.tokenizing import KeyRequest
from service.work import Work

log = logging.getLogger(__name__)

CHUNK_LINES = 1_000
_CHUNK_BYTES = 16 * 2**20  # long lines make smaller chunks


class _Begun(Enum):
    """How an attempt to leave `validating` ended."""

    YES = auto()
    LEFT = auto()  # the batch was cancelled or expired meanwhile; the task is finished
    UNSURE = auto()  # whether its tokens fit: they must be looked at


def run_intake(work: Work, task: ControlTask) -> None:
    """The handler of INTAKE; idempotent. Raises Interrupted, FenceLost, StoreFailed and what the database raises."""
    batch = work.database.run(lambda conn: batches.load_batch(conn, task.subject))
    if batch is None or batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) or batch.intake_done:
        work.database.run(lambda conn: control.finish_task(conn, task))
        return
    path = _input_path(work, batch)
    if path is None:
        _fail(work, task, [_missing_file()])
        return
    try:
        if batch.status == BatchStatus.VALIDATING and not _validate(work, task, batch, path):
            return
        _take_in(work, task, batch, path)
    except BlobMissing:
        _fail(work, task, [_missing_file()])


def _input_path(work: Work, batch: Batch) -> str | None:
    found = work.database.run(lambda conn: files.get_file(conn, batch.tenant_id, batch.input_file_id))
    return None if found is None else found.store_path


# Pass 1


def _validate(work: Work, task: ControlTask, batch: Batch, path: str) -> bool:
    """Judge the file; True when the batch is in_progress now. Else the task is finished."""
    is_skipping = batch.on_invalid_line == "skip"
    findings = _read_all(work, task, batch, path, is_skipping)
    if findings is None:
        work.database.run(lambda conn: control.finish_task(conn, task))
        return False
    errors = findings.errors_shown(is_skipping=is_skipping)
    if errors:
        _fail(work, task, errors)
        return False
    return _begin(work, task, batch, findings, path)


def _read_all(work: Work, task: ControlTask, batch: Batch, path: str, is_skipping: bool) -> Findings | None:
    """Every line checked. None when the batch left `validating` meanwhile."""
    validator = FileValidator(
        endpoint=batch.endpoint,
        known_models=lambda name: _served(work, batch.endpoint, name),
        max_lines=work.settings.max_lines,
        model_policy=batch.model_policy,
    )
    findings = Findings()
    raw_lines = iter_lines(work.blobs.read(path), limit_bytes=work.settings.max_line_bytes)
    for number, chunk in enumerate(chunks_of(raw_lines)):
        refused = [error for error in check_lines(validator, chunk, findings) if isinstance(error, LineError)]
        if not _keep_errors(work, task, batch, refused if is_skipping else [], is_first=number == 0):
            return None
        if findings.of_file is not None:
            break
    findings.lines = validator.lines
    findings.of_file = findings.of_file or validator.finish()
    return findings


def _keep_errors(work: Work, task: ControlTask, batch: Batch, refused: list[LineError], *, is_first: bool) -> bool:
    """After a chunk of pass 1: renew the lease, keep what is refused; False when the batch is no longer validating."""
    work.pause()

    def keep(conn: sa.Connection) -> bool:
        work.hold(conn, task)
        found = batches.load_batch(conn, batch.id)
        if found is None or found.status != BatchStatus.VALIDATING:
            return False
        if is_first:
            lines.clear_line_errors(conn, batch.id)
        lines.add_line_errors(conn, batch.id, refused)
        return True

    return work.database.run(keep)


def _begin(work: Work, task: ControlTask, batch: Batch, findings: Findings, path: str) -> bool:
    """validating -> in_progress with the total, or failed over the tenant's quota; False when pass 2 has no place."""
    estimate = rough_estimate(work.blobs.size(path), findings.lines)
    begun = work.database.run(lambda conn: _try_to_begin(conn, work, task, batch, findings, estimate))
    if begun is _Begun.UNSURE:
        estimate = sampled_estimate(work, batch, path, findings.lines)
        begun = work.database.run(lambda conn: _try_to_begin(conn, work, task, batch, findings, estimate))
    if isinstance(begun, str):
        _fail(work, task, [{"code": "token_limit_exceeded", "line": None, "message": begun, "param": None}])
    return begun is _Begun.YES


def _try_to_begin(
    conn: sa.Connection, work: Work, task: ControlTask, batch: Batch, findings: Findings, estimate: TokenEstimate
) -> _Begun | str:
    """A text says why the file does not fit into the tenant's quota. Nothing is written unless YES or LEFT."""
    work.hold(conn, task)
    quotas.lock_tenant(conn, batch.tenant_id)
    has = quotas.standing(conn, batch.tenant_id, quotas.default_quota(work.settings))
    if has.lines + findings.lines > has.quota.lines:
        return f"The batch's {findings.lines} lines would take those queued of this tenant above {has.quota.lines}."
    if has.tokens + estimate.most > has.quota.tokens:
        if not estimate.is_sampled:
            return _Begun.UNSURE
        return f"The batch's {estimate.tokens} tokens would take those queued of this tenant above {has.quota.tokens}."
    model = next(iter(findings.models)) if len(findings.models) == 1 else None
    columns = {"total": findings.lines, "prompt_tokens": estimate.tokens, "model": model}
    if not batches.move_batch(conn, batch.id, BatchStatus.IN_PROGRESS, **columns):
        control.finish_task(conn, task)
        return _Begun.LEFT
    refused = lines.count_line_errors(conn, batch.id)
    if refused:
        batches.add_progress(conn, batch.id, batches.Progress(failed=refused, skipped=refused))
    return _Begun.YES


def _fail(work: Work, task: ControlTask, errors: list[dict[str, Any]]) -> None:
    """The batch is failed for its input; nothing was dispatched."""

    def fail(conn: sa.Connection) -> None:
        work.hold(conn, task)
        if batches.move_batch(conn, task.subject, BatchStatus.FAILED, errors=errors):
            lines.clear_line_errors(conn, task.subject)
        control.finish_task(conn, task)

    work.database.run(fail)
    log.info("batch %s failed validation: %d errors shown", task.subject, len(errors))


def _served(work: Work, endpoint: str, name: str) -> str | None:
    model = work.models.resolve(name)
    return model.name if model is not None and endpoint in model.endpoints else None


def _missing_file() -> dict[str, Any]:
    message = "The input file is no longer there."
    return {"code": "not_found", "line": None, "message": message, "param": "input_file_id"}


# Pass 2


def _take_in(work: Work, task: ControlTask, batch: Batch, path: str) -> None:
    place = work.database.run(lambda conn: lines.lock_intake(conn, batch.id))
    if place is None:
        work.database.run(lambda conn: control.finish_task(conn, task))
        return
    salt = work.database.run(lambda conn: tenants.load_tenant(conn, batch.tenant_id)).salt
    raw_lines = iter_lines(
        work.blobs.read(path, place.offset),
        limit_bytes=work.settings.max_line_bytes,
        offset=place.offset,
        line_no=place.line_no + 1,
    )
    for chunk in chunks_of(raw_lines):
        work.pause()
        new = _keyed(work, batch, salt, _valid(work, batch, chunk, place))
        upto = IntakePlace(offset=chunk[-1].end, line_no=chunk[-1].line_no)
        if not _commit_chunk(work, task, batch, new, upto):
            return
        place = upto
    _finish(work, task, batch)


def _valid(work: Work, batch: Batch, chunk: list[RawLine], place: IntakePlace) -> list[ParsedLine]:
    """The chunk's lines without those that pass 1 refused."""
    refused = work.database.run(
        lambda conn: lines.refused_lines(conn, batch.id, after=place.line_no, upto=chunk[-1].line_no)
    )
    parsed = []
    for raw in chunk:
        if raw.line_no in refused:
            continue
        line = None if raw.raw is None else parse_line(raw.raw, endpoint=batch.endpoint, line_no=raw.line_no)
        if not isinstance(line, ParsedLine):
            raise StoreFailed(f"(the input of {batch.id} changed at line {raw.line_no} after it was validated)")
        parsed.append(line)
    return parsed


def _keyed(work: Work, batch: Batch, salt: bytes, parsed: list[ParsedLine]) -> list[NewLine]:
    keys = work.tokenizing.keys(
        [KeyRequest(model=line.model, endpoint=batch.endpoint, body=line.body, salt=salt) for line in parsed]
    )
    return [
        NewLine(
            line_no=line.line_no,
            custom_id=line.custom_id,
            model=_served(work, batch.endpoint, line.model) or line.model,
            body=line.body_bytes,
            prefix_key=key.prefix_key,
            prompt_tokens=key.prompt_tokens,
            predicted_output_tokens=key.output_tokens,
        )
        for line, key in zip(parsed, keys, strict=True)
    ]


def _commit_chunk(work: Work, task: ControlTask, batch: Batch, new: list[NewLine], upto: IntakePlace) -> bool:
    """One transaction: fence, batch row, jobs, place. False when the batch left; the task is then finished."""

    def commit(conn: sa.Connection) -> bool:
        work.hold(conn, task)
        if lines.lock_intake(conn, batch.id) is None:
            control.finish_task(conn, task)
            return False
        lines.take_in(conn, batch, new, upto)
        return True

    return work.database.run(commit)


def _finish(work: Work, task: ControlTask, batch: Batch) -> None:
    groups, bound = measure_batch(work, batch.id)
    tokens = work.database.run(lambda conn: lines.prompt_tokens_of(conn, batch.id))

    def finish(conn: sa.Connection) -> None:
        work.hold(conn, task)
        if lines.lock_intake(conn, batch.id) is not None:
            counted = {"prefix_groups": groups, "bound_tokens": bound, "prompt_tokens": tokens}
            batches.update_batch(conn, batch.id, intake_done=True, **counted)
            lines.notify_dispatcher(conn)
        control.finish_task(conn, task)

    work.database.run(finish)
    log.info("batch %s taken in: %d prefix groups", batch.id, groups)


def chunks_of(raw_lines: Iterator[RawLine]) -> Iterator[list[RawLine]]:
    """Lists of lines to be tokenised together: at most CHUNK_LINES, and about _CHUNK_BYTES."""
    while chunk := _chunk(raw_lines):
        yield chunk


def _chunk(raw_lines: Iterator[RawLine]) -> list[RawLine]:
    chunk: list[RawLine] = []
    size = 0
    for line in islice(raw_lines, CHUNK_LINES):
        chunk.append(line)
        size += line.end - line.start
        if size >= _CHUNK_BYTES:
            break
    return chunk
