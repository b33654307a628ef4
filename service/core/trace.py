"""Reading a trace: one JSON object a line, with `input_length`, `output_length` and `hash_ids`, tokens but no text.

The format is Mooncake's (FAST '25, https://github.com/kvcache-ai/Mooncake): an id stands for the whole prefix up to
and including its block, so two requests share as many blocks as they have leading ids in common; the last block may be
partial. `timestamp`, milliseconds, may be missing. Other members are ignored, blank lines are skipped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.core.cut import FloatArray
from service.core.plan import Backlog
from service.core.prefix import BYTES_PER_TOKEN, RUNG_BYTES, IntArray, rung_depths
from service.core.scenario import FleetJobs, jobs_at_once
from service.core.strictjson import AmbiguousJson, NotJson, loads

TRACE_BLOCK_TOKENS = 512  # what an id stands for, in the traces that are public
_MOST_TOKENS = 100_000_000  # of a prompt or an answer; far beyond any model, and sums stay within 64 bits
_CHUNK_JOBS = 4096  # hashed at a time: bounds the memory
_BOM = b"\xef\xbb\xbf"


class TraceError(ValueError):
    """A line that cannot be read, or no line at all: the message names the line, from 1, and why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The requests in the order of their lines. A job's id is the number of its line, from 0."""

    jobs: Backlog
    timestamp_seconds: FloatArray  # [n]; nan where the line has none

    def at_once(self) -> FleetJobs:
        """As a backlog that is known at the start, its output lengths too."""
        return jobs_at_once(self.jobs)


def read_trace(lines: Iterable[bytes | str], block_tokens: int = TRACE_BLOCK_TOKENS) -> Trace:
    """Raises TraceError for the first line that is not as it must be, or where there is none."""
    if block_tokens < 1:
        raise ValueError("block_tokens must be at least 1")
    numbers, prompts, outputs, ids, stamps = [], [], [], [], []
    for number, record in _records(lines):
        prompt, output, blocks, stamp = _checked(number, record, block_tokens)
        numbers.append(number - 1)
        prompts.append(prompt)
        outputs.append(output)
        ids.append(blocks)
        stamps.append(stamp)
    if not numbers:
        raise TraceError("The trace has no line.")
    prompt_tokens = np.array(prompts, dtype=np.int64)
    jobs = Backlog(
        job_ids=np.array(numbers, dtype=np.int64),
        keys=keys_of_blocks(ids, prompt_tokens, block_tokens),
        prompt_tokens=prompt_tokens,
        output_tokens=np.array(outputs, dtype=np.int64),
        body_bytes=prompt_tokens * BYTES_PER_TOKEN,
    )
    return Trace(jobs=jobs, timestamp_seconds=np.array(stamps) / 1000)


def _records(lines: Iterable[bytes | str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number from 1, and the object."""
    for number, line in enumerate(lines, 1):
        raw = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if not raw.strip():
            continue
        try:
            record = loads(raw)
        except (NotJson, AmbiguousJson) as error:
            raise TraceError(f"Line {number} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise TraceError(f"Line {number} is not a JSON object.")
        yield number, record


def _checked(number: int, record: dict[str, Any], block_tokens: int) -> tuple[int, int, list[int], float]:
    """Prompt tokens, output tokens, ids, and milliseconds or nan."""
    prompt = _tokens(number, record, "input_length")
    output = _tokens(number, record, "output_length")
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise TraceError(f"Line {number}: hash_ids must be a list of integers{_missing(record, 'hash_ids')}.")
    if not all(type(one) is int and 0 <= one < 2**64 for one in ids):
        raise TraceError(f"Line {number}: hash_ids must hold integers from 0 to 2**64 - 1.")
    expected = -(-prompt // block_tokens)
    if len(ids) != expected:
        raise TraceError(
            f"Line {number}: {len(ids)} hash_ids do not match input_length {prompt}, "
            f"which is {expected} blocks of {block_tokens} tokens."
        )
    stamp = record.get("timestamp")
    if stamp is None:
        return prompt, output, ids, math.nan
    if type(stamp) not in (int, float) or not 0 <= stamp < 2**63:
        raise TraceError(f"Line {number}: timestamp must be milliseconds, 0 or more.")
    return prompt, output, ids, float(stamp)


def _tokens(number: int, record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int:  # a bool is an int to isinstance
        raise TraceError(f"Line {number}: {name} must be an integer{_missing(record, name)}.")
    if not 0 <= value <= _MOST_TOKENS:
        raise TraceError(f"Line {number}: {name} must be between 0 and {_MOST_TOKENS:,}.")
    return value


def _missing(record: dict[str, Any], name: str) -> str:
    return "" if name in record else ", and is missing"


def keys_of_blocks(ids: Sequence[Sequence[int]], prompt_tokens: IntArray, block_tokens: int) -> list[bytes]:
    """Prefix keys from block ids: the rungs inside a block get hashes made from its id and their depth.

    `ids` has one list per prompt, [ceil(prompt_tokens / block_tokens)] each. Keys share what the prompts' leading ids
    share, rounded down to a rung, as far as 4-byte hashes tell ids apart.
    """
    depths = np.array(rung_depths(int(prompt_tokens.max(initial=0))), dtype=np.int64)
    keys: list[bytes] = []
    for start in range(0, len(ids), _CHUNK_JOBS):
        some = ids[start : start + _CHUNK_JOBS]
        keys += _keys(some, prompt_tokens[start : start + _CHUNK_JOBS], depths, block_tokens)
    return keys


def _keys(ids: Sequence[Sequence[int]], prompt_tokens: IntArray, depths: IntArray, block_tokens: int) -> list[bytes]:
    n_ids = np.array([len(some) for some in ids], dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.uint64, count=int(n_ids.sum()))
    n_rungs = np.searchsorted(depths, prompt_tokens, side="right")
    ends = np.cumsum(n_rungs)
    rung = np.arange(int(ends[-1])) - np.repeat(ends - n_rungs, n_rungs)  # index of each rung in its own key
    block = np.repeat(np.cumsum(n_ids) - n_ids, n_rungs) + (depths[rung] - 1) // block_tokens
    hashes = _mixed(_mixed(flat[block]) + depths[rung].astype(np.uint64))
    packed = (hashes >> np.uint64(32)).astype(">u4").tobytes()
    bounds = [0, *(ends * RUNG_BYTES).tolist()]
    return [packed[start:end] for start, end in pairwise(bounds)]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose every bit depends on every other."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
