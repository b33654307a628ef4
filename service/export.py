"""Export: the output and the error file of a batch, written whole, published under the task's fence.

Every non-blank line of the input ends in exactly one of the two files (`core.accounting`). Both have fixed names in
a folder of the batch and are renamed into place inside the transaction that adds their rows and ends the batch, so
an attempt that was killed leaves nothing that the next one does not replace or sweep away.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import sqlalchemy as sa

from service.core.accounting import Counts, check_batch_accounting
from service.core.batchfile import iter_lines, parse_line
from service.core.ids import line_id, unsent_line_id
from service.core.model import BatchStatus, LineErrorCode, Outcome
from service.core.resultline import DEFAULT_MESSAGES, answer_line, skipped_line, unanswered_line
from service.store import batches, control, files, outputs
from service.store.batches import Batch, Progress
from service.store.blobs import Blob, BlobWriter
from service.store.control import ControlTask
from service.store.files import Purpose
from service.store.outputs import EndedLine, RefusedLine
from service.work import Work

log = logging.getLogger(__name__)

_PAGE_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentLine:
    """A valid line that was never taken in: the batch was cancelled or expired before."""

    line_no: int
    custom_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a batch ends, and what becomes of lines that were never taken in."""

    status: BatchStatus
    outcome: Outcome | None = None
    code: LineErrorCode | None = None


COMPLETED = Ending(status=BatchStatus.COMPLETED)
CANCELLED = Ending(status=BatchStatus.CANCELLED, outcome=Outcome.CANCELLED, code=LineErrorCode.BATCH_CANCELLED)
EXPIRED = Ending(status=BatchStatus.EXPIRED, outcome=Outcome.EXPIRED, code=LineErrorCode.BATCH_EXPIRED)


class _LeftStatus(Exception):
    """The batch is no longer where this ending may be reached from: undo, quietly."""


def run_export(work: Work, task: ControlTask) -> None:
    """The handler of EXPORT; idempotent. finalizing -> completed."""
    batch = work.database.run(lambda conn: batches.load_batch(conn, task.subject))
    if batch is None or batch.status != BatchStatus.FINALIZING:
        work.database.run(lambda conn: control.finish_task(conn, task))
        return
    export_batch(work, task, batch, COMPLETED)


def export_batch(work: Work, task: ControlTask, batch: Batch, ending: Ending) -> None:
    """Write both files, then in one fenced transaction publish them and end the batch and the task.

    Every job of the batch must have its result, and no line may be taken in any more. Raises AccountingBroken when
    the counts do not add up, and what the file store and the database raise; a batch that has left meanwhile is let be.
    """
    progress = work.database.run(lambda conn: batches.progress(conn, batch.id))
    unsent = batch.total - progress.ended if ending.outcome is not None else 0
    expected = _with_unsent(progress, ending, unsent)
    check_batch_accounting(total=batch.total, counts=expected)
    with ExitStack() as stack:
        writers = []
        for name in output_names(batch.id):
            work.blobs.sweep_drafts(name)
            writers.append(stack.enter_context(work.blobs.writer(name)))
        written = _write(work, batch, ending, writers[0], writers[1])
        check_batch_accounting(total=batch.total, counts=expected, written=written)
        work.pause()
        try:
            _publish(work, task, batch, ending, writers, unsent)
        except _LeftStatus:
            work.database.run(lambda conn: control.finish_task(conn, task))


def output_names(batch_id: str) -> tuple[str, str]:
    """Where the output and the error file of a batch are kept, relative to the file store."""
    return f"output/{batch_id}/output.jsonl", f"output/{batch_id}/error.jsonl"


def discard_outputs(work: Work, batch_id: str) -> None:
    """Remove what attempts that never ended have left of a batch's files: no row names them."""
    for name in output_names(batch_id):
        work.blobs.sweep_drafts(name)
        work.blobs.delete(name)


def _with_unsent(progress: Progress, ending: Ending, unsent: int) -> Counts:
    return Counts(
        completed=progress.completed,
        failed=progress.failed,
        cancelled=progress.cancelled + (unsent if ending.outcome == Outcome.CANCELLED else 0),
        expired=progress.expired + (unsent if ending.outcome == Outcome.EXPIRED else 0),
    )


def _publish(
    work: Work, task: ControlTask, batch: Batch, ending: Ending, writers: Sequence[BlobWriter], unsent: int
) -> None:
    """The fence row is locked while the files are renamed: no other attempt can be at it."""
    with work.database.transaction() as conn:
        work.hold(conn, task)
        if not batches.move_batch(conn, batch.id, ending.status):
            raise _LeftStatus
        if unsent:
            batches.add_progress(conn, batch.id, _unsent_progress(ending, unsent))
        output_id, error_id = (
            _add_file(conn, batch, kind, writer.publish()) if writer.bytes else None
            for kind, writer in zip(("output", "error"), writers, strict=True)
        )
        batches.update_batch(conn, batch.id, output_file_id=output_id, error_file_id=error_id)
        control.finish_task(conn, task)
    log.info("batch %s is %s: %d lines", batch.id, ending.status, batch.total)


def _unsent_progress(ending: Ending, unsent: int) -> Progress:
    if ending.outcome == Outcome.CANCELLED:
        return Progress(cancelled=unsent, lines_unknown=unsent)
    return Progress(expired=unsent, lines_unknown=unsent)


def _add_file(conn: sa.Connection, batch: Batch, kind: str, blob: Blob) -> str:
    return files.create_file(
        conn,
        tenant_id=batch.tenant_id,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=Purpose.BATCH_OUTPUT,
        blob=blob,
        expires_after_seconds=batch.output_expires_after_seconds,
    ).id


def _write(work: Work, batch: Batch, ending: Ending, output: BlobWriter, error: BlobWriter) -> Counts:
    """Both files in line order; how many lines of each outcome went into them."""
    counts = dict.fromkeys(Outcome, 0)
    for number, line in enumerate(_all_lines(work, batch, ending)):
        if number % _PAGE_LINES == 0:
            work.pause()
        if isinstance(line, EndedLine):
            outcome, data = line.outcome, result_line(line)
        elif isinstance(line, RefusedLine):
            outcome, data = Outcome.FAILED, refused_line(batch.id, line)
        else:
            outcome, data = _unsent(batch.id, line, ending)
        counts[outcome] += 1
        (output if outcome == Outcome.SUCCEEDED else error).write(data)
    return Counts(
        completed=counts[Outcome.SUCCEEDED],
        failed=counts[Outcome.FAILED],
        cancelled=counts[Outcome.CANCELLED],
        expired=counts[Outcome.EXPIRED],
    )


def _all_lines(work: Work, batch: Batch, ending: Ending) -> Iterator[EndedLine | RefusedLine | UnsentLine]:
    """Every line of the batch once, by line number. Of one number, the refusal goes before the unsent line."""
    sources: list[Iterator[EndedLine | RefusedLine | UnsentLine]] = [
        _paged(work, batch.id, outputs.ended_lines),
        _paged(work, batch.id, outputs.refused_lines),
    ]
    if ending.outcome is not None and not batch.intake_done:
        sources.append(_unsent_lines(work, batch))
    last_line = 0
    for line in heapq.merge(*sources, key=lambda line: line.line_no):
        if line.line_no > last_line:
            yield line
        last_line = line.line_no


_Read = Callable[[sa.Connection, str, int, int], Sequence[EndedLine | RefusedLine]]


def _paged(work: Work, batch_id: str, read: _Read) -> Iterator[EndedLine | RefusedLine]:
    after = 0
    while page := _page(work, batch_id, read, after):
        yield from page
        after = page[-1].line_no


def _page(work: Work, batch_id: str, read: _Read, after: int) -> Sequence[EndedLine | RefusedLine]:
    return work.database.run(lambda conn: read(conn, batch_id, after, _PAGE_LINES))


def _unsent_lines(work: Work, batch: Batch) -> Iterator[UnsentLine]:
    """The lines behind intake's place, read from the input file again."""
    found = work.database.run(lambda conn: files.get_file(conn, batch.tenant_id, batch.input_file_id))
    path = "" if found is None else found.store_path
    for raw in iter_lines(
        work.blobs.read(path, batch.intake_offset),
        limit_bytes=work.settings.max_line_bytes,
        offset=batch.intake_offset,
        line_no=batch.intake_line + 1,
    ):
        parsed = None if raw.raw is None else parse_line(raw.raw, endpoint=batch.endpoint, line_no=raw.line_no)
        yield UnsentLine(line_no=raw.line_no, custom_id=None if parsed is None else parsed.custom_id)


def result_line(line: EndedLine) -> bytes:
    """The line of a job that ended, for either file."""
    public_id = line_id(line.job_id)
    if line.status_code is not None:
        return answer_line(
            line_id=public_id,
            custom_id=line.custom_id,
            status_code=line.status_code,
            request_id=public_id,
            body=line.response or b"",
        )
    code = LineErrorCode(line.error_code or LineErrorCode.WORKER_LOST)
    message = line.error_message or DEFAULT_MESSAGES[code]
    return unanswered_line(line_id=public_id, custom_id=line.custom_id, code=code, message=message)


def refused_line(batch_id: str, line: RefusedLine) -> bytes:
    """The error line of an input line that was skipped."""
    return skipped_line(
        line_id=unsent_line_id(batch_id, line.line_no),
        custom_id=line.custom_id,
        code=line.code,
        message=line.message,
    )


def _unsent(batch_id: str, line: UnsentLine, ending: Ending) -> tuple[Outcome, bytes]:
    assert ending.outcome is not None
    assert ending.code is not None
    return ending.outcome, unanswered_line(
        line_id=unsent_line_id(batch_id, line.line_no),
        custom_id=line.custom_id,
        code=ending.code,
        message=DEFAULT_MESSAGES[ending.code],
    )
