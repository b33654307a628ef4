"""`trunkline plan` as a process with a real tokenizer and no server at all: pipes, exit statuses, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from test_tokenizing import TEMPLATE, build_tokenizer, user

from service.core import prefix
from service.core.model import Endpoint
from service.fleet import load_models
from service.tokenizing import Tokenizing

SHAPE = ("--instances", "3", "--kv-tokens", "1e5", "--no-baselines")
Cli = Callable[..., subprocess.CompletedProcess[bytes]]


def body(number: int) -> dict[str, object]:
    """Two kinds of prompts, long enough to share blocks."""
    system = {"role": "system", "content": ["You are terse. ", "You are verbose. "][number % 2] * 20}
    return {"model": "small", "messages": [system, user(f"Hello {number}, how are you?")], "max_tokens": 7}


def batch_file(count: int) -> bytes:
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body(number)}
        for number in range(count)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One served model with a tokenizer; a state folder that is not there, and no server."""
    build_tokenizer(tmp_path / "tiny model", TEMPLATE)
    (tmp_path / "models.toml").write_text('[models.tiny]\ntokenizer = "tiny model"\naliases = ["small"]\n')
    more = {"MODELS": str(tmp_path / "models.toml"), "TRUNKLINE_STATE": str(tmp_path / "no state"), "COLUMNS": "80"}
    return {**os.environ, **more}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    def run(*arguments: str, data: bytes = b"", stdout: int | IO[bytes] = subprocess.PIPE) -> object:
        argv = [sys.executable, "-m", "trunkline", "plan", *arguments]
        return subprocess.run(
            argv,
            input=data,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=tmp_path,
            timeout=120,
            check=False,
        )

    return run  # type: ignore[return-value]


def test_a_batch_is_tokenised_as_intake_does(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    done = cli("-", *SHAPE, "--json", "--export", "plan.jsonl", data=batch_file(40))
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    keys = [
        Tokenizing(load_models(Path(environment["MODELS"]))).key("small", Endpoint.CHAT, body(number), b"")
        for number in range(40)
    ]
    assert found["prompt_tokens"] == sum(key.prompt_tokens for key in keys)
    assert found["output_tokens"] == 40 * 7
    assert (found["model"], found["byte_keyed_jobs"]) == ("tiny", 0)
    shared = prefix.shared_tokens(keys[0].prefix_key, keys[2].prefix_key)
    cacheable = prefix.cacheable_tokens(shared, keys[0].prompt_tokens, 16)
    assert cacheable >= 32
    assert found["bound"] >= 38 * cacheable / found["prompt_tokens"]
    lines = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(40))
    assert done.stderr == b"Wrote the plan of 40 jobs to plan.jsonl.\n"
    assert not (tmp_path / "no state").exists()


def test_an_error_is_one_line_and_status_2(cli: Cli) -> None:
    for options, data in (
        (("-", *SHAPE), b""),
        (("-", *SHAPE), batch_file(3) + b"\n{"),
        (("nowhere.jsonl", *SHAPE), b""),
        ((".", *SHAPE), b""),
        (("-", "--instances", "0", "--kv-tokens", "1e5"), batch_file(3)),
        (("-", "--instances", "1", "--kv-tokens", "64"), batch_file(3)),
        (("-", *SHAPE, "--model", "unknown"), batch_file(3)),
    ):
        done = cli(*options, data=data)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"trunkline: Cannot plan: ")
        assert done.stderr.count(b"\n") == 1


def test_a_reader_that_leaves_gets_no_traceback(cli: Cli) -> None:
    for options in ((), ("--json",)):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as closed:
            done = cli("-", *SHAPE, *options, data=batch_file(10), stdout=closed)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr


def test_ctrl_c_ends_it_quietly(environment: dict[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trunkline", "plan", "-", *SHAPE, "--export", "plan.jsonl"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"\n" * (1 << 20))  # more than a pipe holds: it returns once the command reads
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        process.stdin.close()
    assert process.returncode == 130
    assert said == b""
    assert not (tmp_path / "plan.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_output_that_cannot_be_written_is_one_sentence(cli: Cli, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = cli("-", *SHAPE, *form, data=batch_file(4), stdout=full)
    assert done.returncode == 1
    assert done.stderr.decode() == "trunkline: the output could not be written: No space left on device.\n"


def test_a_closed_output_is_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m trunkline plan - --json >&-'
    done = subprocess.run(
        ["bash", "-c", command], input=b"", stderr=subprocess.PIPE, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert done.stderr.decode() == "trunkline: the output could not be written: standard output is closed.\n"
