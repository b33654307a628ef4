"""How many prompt tokens a batch's input file holds, before intake has tokenised it: what a quota is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from service.core.batchfile import ParsedLine, RawLine, iter_lines, parse_line
from service.store import tenants
from service.store.batches import Batch
from service.tokenizing import KeyRequest
from service.work import Work

_SAMPLE_LINES = 500  # a file of no more is counted, not estimated
_GROUP_BYTES = 8 * 2**20  # tokenised at once
_ROUGH_BYTES_PER_TOKEN = 4
_LINE_TOKENS = 64  # that a chat template may add to a line


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """`most` is certain of a rough one, since a token stands for a byte at least; of a sampled one it is `tokens`."""

    tokens: int
    most: int
    is_sampled: bool


def rough_estimate(size_bytes: int, lines: int) -> TokenEstimate:
    """From the size of the file alone. Good enough where even `most` fits."""
    return TokenEstimate(
        tokens=size_bytes // _ROUGH_BYTES_PER_TOKEN, most=size_bytes + lines * _LINE_TOKENS, is_sampled=False
    )


def sampled_estimate(work: Work, batch: Batch, path: str, lines: int) -> TokenEstimate:
    """From up to 500 lines spread over the file, tokenised; `lines` are its non-blank lines. Memory is bounded."""
    salt = work.database.run(lambda conn: tenants.load_tenant(conn, batch.tenant_id)).salt
    step = -(-lines // _SAMPLE_LINES)
    total_bytes, sampled_bytes, tokens = 0, 0, 0
    group: list[ParsedLine] = []
    group_bytes = 0
    for number, raw in enumerate(_read(work, path)):
        total_bytes += raw.end - raw.start
        line = _parsed(batch, raw) if number % step == 0 else None
        if line is None:
            continue
        group.append(line)
        group_bytes += raw.end - raw.start
        if group_bytes >= _GROUP_BYTES:
            tokens += _count(work, batch, salt, group)
            sampled_bytes, group_bytes, group = sampled_bytes + group_bytes, 0, []
    tokens += _count(work, batch, salt, group)
    sampled_bytes += group_bytes
    if step > 1 and sampled_bytes:
        tokens = round(tokens * total_bytes / sampled_bytes)
    return TokenEstimate(tokens=tokens, most=tokens, is_sampled=True)


def _read(work: Work, path: str) -> Iterator[RawLine]:
    for number, raw in enumerate(iter_lines(work.blobs.read(path), limit_bytes=work.settings.max_line_bytes)):
        if number % 1_000 == 0:
            work.pause()
        yield raw


def _parsed(batch: Batch, raw: RawLine) -> ParsedLine | None:
    line = None if raw.raw is None else parse_line(raw.raw, endpoint=batch.endpoint, line_no=raw.line_no)
    return line if isinstance(line, ParsedLine) else None


def _count(work: Work, batch: Batch, salt: bytes, group: list[ParsedLine]) -> int:
    requests = [KeyRequest(model=line.model, endpoint=batch.endpoint, body=line.body, salt=salt) for line in group]
    return sum(key.prompt_tokens for key in work.tokenizing.keys(requests)) if requests else 0
