"""service.core.trace: keys share what leading ids share, bad lines are named, and the public trace is read as known."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import trace_folder

from service.core import prefix
from service.core.trace import TraceError, keys_of_blocks, read_trace


def line(**changes: object) -> bytes:
    fields = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]}
    return json.dumps({name: value for name, value in (fields | changes).items() if value != "absent"}).encode()


@given(
    common=st.integers(0, 90),
    tails=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    last_tokens=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    block_tokens=st.sampled_from([16, 100, 512]),
)
def test_keys_share_as_many_blocks_as_there_are_leading_ids_in_common(
    common: int, tails: tuple[int, int], last_tokens: tuple[int, int], block_tokens: int
) -> None:
    ids = [[*range(common), *(1000 * (1 + side) + n for n in range(tail + 1))] for side, tail in enumerate(tails)]
    lengths = [
        (len(path) - 1) * block_tokens + min(last, block_tokens) for path, last in zip(ids, last_tokens, strict=True)
    ]
    keys = keys_of_blocks(ids, np.array(lengths), block_tokens)
    assert [len(key) // 4 for key in keys] == [prefix.rungs_covered(length) for length in lengths]
    shared = common * block_tokens
    covered = min(shared, *lengths)
    assert prefix.shared_tokens(*keys) == prefix.rungs_to_tokens(prefix.rungs_covered(covered))


def test_an_id_means_the_same_in_every_line_and_depth_tells_blocks_of_one_id_apart() -> None:
    first, second, longer = keys_of_blocks([[7, 8], [7, 9], [7, 8, 7]], np.array([1024, 1000, 1536]), 512)
    assert prefix.shared_tokens(first, second) == 512
    assert prefix.shared_tokens(first, longer) == 1024
    assert first[:4] != longer[32 * 4 :][:4]
    assert len({first[i : i + 4] for i in range(0, len(first), 4)}) == 32


def test_a_line_is_read_as_it_stands() -> None:
    trace = read_trace([line(), b"\n", line(timestamp="absent", input_length=0, hash_ids=[], output_length=0)])
    assert trace.jobs.job_ids.tolist() == [0, 2]  # the blank line counts
    assert trace.jobs.prompt_tokens.tolist() == [700, 0]
    assert trace.jobs.output_tokens.tolist() == [9, 0]
    assert trace.jobs.body_bytes.tolist() == [2800, 0]
    assert trace.timestamp_seconds[0] == 1.5
    assert math.isnan(trace.timestamp_seconds[1])
    at_once = trace.at_once()
    assert at_once.arrival_seconds.tolist() == [0, 0]
    assert at_once.output_tokens.tolist() == [9, 0]


def test_endings_marks_and_text_make_no_difference() -> None:
    plain = read_trace([line(), line()])
    for lines in ([b"\xef\xbb\xbf" + line() + b"\r\n", line() + b"\r\n"], [line().decode(), line().decode() + "\n"]):
        assert read_trace(lines).jobs.keys == plain.jobs.keys


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"input_length": NaN}', "is not JSON"),
        (b'{"input_length": 1, "input_length": 2}', "is not JSON"),
        (line(input_length="absent"), "input_length must be an integer, and is missing"),
        (line(output_length="absent"), "output_length must be an integer, and is missing"),
        (line(hash_ids="absent"), "hash_ids must be a list of integers, and is missing"),
        (line(input_length="700"), "input_length must be an integer."),
        (line(input_length=700.0), "input_length must be an integer."),
        (line(input_length=None), "input_length must be an integer."),
        (line(input_length=True), "input_length must be an integer."),
        (line(output_length=False), "output_length must be an integer."),
        (line(input_length=-1), "input_length must be between 0 and"),
        (line(output_length=-5), "output_length must be between 0 and"),
        (line(output_length=10**30), "output_length must be between 0 and"),
        (line(hash_ids=[3, True]), "hash_ids must hold integers"),
        (line(hash_ids=[3, 4.0]), "hash_ids must hold integers"),
        (line(hash_ids=[3, -4]), "hash_ids must hold integers"),
        (line(hash_ids=[3, 2**64]), "hash_ids must hold integers"),
        (line(hash_ids={"3": 4}), "hash_ids must be a list"),
        (line(hash_ids=[3]), "1 hash_ids do not match input_length 700, which is 2 blocks of 512 tokens"),
        (line(hash_ids=[3, 4, 5]), "3 hash_ids do not match"),
        (line(timestamp=-1), "timestamp must be"),
        (line(timestamp=True), "timestamp must be"),
        (line(timestamp="now"), "timestamp must be"),
        (line(timestamp=10**40), "timestamp must be"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_why(bad: bytes, why: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace([line(), b"  \n", bad, b"also bad"])
    assert str(caught.value).startswith("Line 3")
    assert why in str(caught.value)


@pytest.mark.parametrize("lines", [[], [b"", b"\n", b"  \r\n"]])
def test_a_trace_without_lines_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(TraceError, match="no line"):
        read_trace(lines)


def test_another_block_size_is_told() -> None:
    assert len(read_trace([line(hash_ids=[*range(44)])], block_tokens=16).jobs.keys[0]) == 4 * 21
    with pytest.raises(TraceError, match="which is 44 blocks of 16"):
        read_trace([line()], block_tokens=16)
    with pytest.raises(ValueError, match="block_tokens"):
        read_trace([line()], block_tokens=0)


def test_the_conversation_trace_is_as_its_readme_says() -> None:
    with (trace_folder() / "conversation_trace.jsonl").open("rb") as lines:
        began = time.process_time()
        jobs = read_trace(lines).jobs
        took = time.process_time() - began
    assert len(jobs.keys) == 12_031
    assert round(jobs.prompt_tokens.sum() / 1e6, 1) == 144.8
    assert took < 3  # a third of a second on the machine this was written on
    bound = prefix.bound_tokens(jobs.keys, jobs.prompt_tokens, 512)
    assert bound / jobs.prompt_tokens.sum() == pytest.approx(0.373, abs=0.0005)
    fitting = np.flatnonzero(-(-(jobs.prompt_tokens + jobs.output_tokens - 1) // 512) <= 100_000 // 512)
    assert len(fitting) == 11_963
    prompts = jobs.prompt_tokens[fitting]
    bound = prefix.bound_tokens([jobs.keys[index] for index in fitting.tolist()], prompts, 512)
    assert bound / prompts.sum() == pytest.approx(0.380, abs=0.0005)
