"""The producer's command line as a process against the real API: pipes, exit statuses, one sentence for an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from api_fixtures import Api, api  # noqa: F401 - `api` is a fixture
from client_steps import complete, run_open_tasks
from control_fixtures import Desk, jsonl, request

pytestmark = pytest.mark.embedded_only

INPUT = jsonl(request(f"c{n}") for n in range(3))
Cli = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def desk(api: Api) -> Desk:
    return api.desk()


@pytest.fixture
def environment(api: Api) -> dict[str, str]:
    return {**os.environ, "TRUNKLINE_BASE_URL": f"{api.url}/v1", "COLUMNS": "200"}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    def run(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "trunkline", *arguments]
        return subprocess.run(
            argv, input=data, capture_output=True, env=environment, cwd=tmp_path, timeout=60, check=False
        )

    return run


def lines(data: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in data.split(b"\n") if line]


def test_submit_waits_and_pipes_the_results(desk: Desk, environment: dict[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trunkline", "submit", "-", "--wait", "--metadata", "run=7", "--priority", "low"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, env=environment, cwd=tmp_path, **streams) as process:  # type: ignore[call-overload]
        process.stdin.write(INPUT)
        process.stdin.close()
        batch_id = process.stderr.readline().decode().split()[1].rstrip(".")
        run_open_tasks(desk)
        complete(desk, batch_id)
        output, said = process.stdout.read(), process.stderr.read().decode()
    assert process.returncode == 0, said
    assert {line["custom_id"] for line in lines(output)} == {"c0", "c1", "c2"}
    assert f"Batch {batch_id} is completed: 3 of 3 lines succeeded, token hit rate 40.0%." in said
    batch = desk.batch(batch_id)
    assert (batch.metadata, batch.priority.label) == ({"run": "7"}, "low")


def test_a_batch_is_submitted_looked_at_and_read(cli: Cli, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "in put.jsonl").write_bytes(INPUT)
    submitted = cli("submit", "in put.jsonl")
    batch_id = submitted.stdout.decode().strip()
    assert (submitted.returncode, submitted.stderr) == (0, b"")
    run_open_tasks(desk)
    desk.answer(batch_id, ["c1"])
    part = cli("results", batch_id)
    assert [line["custom_id"] for line in lines(part.stdout)] == ["c1"]
    assert b"in_progress: 1 of 3 lines so far" in part.stderr
    shown = cli("status", batch_id).stdout.decode()
    assert "in_progress" in shown
    assert "3: 1 completed, 0 failed" in shown
    assert "40.0% (4 of 10 prompt tokens" in shown
    desk.answer(batch_id, ["c0"])
    desk.answer(batch_id, ["c2"], status_code=400)
    desk.finalize()
    run_open_tasks(desk)
    read = cli("results", batch_id, "-o", "answers.jsonl")
    assert (read.returncode, read.stdout) == (3, b"")
    assert {line["custom_id"] for line in lines((tmp_path / "answers.jsonl").read_bytes())} == {"c0", "c1", "c2"}
    assert cli("status", batch_id, "--wait").returncode == 3
    listed = cli("batches")
    assert batch_id in listed.stdout.decode()
    assert "3/3" in listed.stdout.decode()
    (found,) = lines(cli("batches", "--json").stdout)
    assert found["id"] == batch_id
    assert lines(cli("status", batch_id, "--json").stdout) == [found]


def test_a_failed_batch_shows_its_lines(cli: Cli, desk: Desk) -> None:
    batch_id = cli("submit", "-", data=b"{}\nno json\n" + INPUT).stdout.decode().strip()
    run_open_tasks(desk)
    shown = cli("status", batch_id).stdout.decode()
    assert "line 2: " in shown
    assert "invalid_json_line" in shown
    waited = cli("status", batch_id, "--wait")
    assert waited.returncode == 3
    assert waited.stderr.decode().startswith(f"trunkline: Batch {batch_id} failed; line 1: ")
    assert waited.stderr.count(b"\n") == 1


def test_the_endpoint_comes_from_the_first_line(cli: Cli, desk: Desk) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
    batch_id = cli("submit", "-", data=json.dumps(line).encode()).stdout.decode().strip()
    assert desk.batch(batch_id).endpoint == "/v1/completions"


def test_skip_order_and_cancel_are_passed_on(cli: Cli, desk: Desk) -> None:
    made = cli("submit", "-", "--skip-invalid", "--in-order", "--window", "3d", "--json", data=INPUT)
    (batch,) = lines(made.stdout)
    batch_id = str(batch["id"])
    kept = desk.batch(batch_id)
    assert (kept.on_invalid_line, kept.line_order, kept.completion_window) == ("skip", "input", "3d")
    cancelled = cli("cancel", batch_id)
    assert cancelled.stdout.decode() == f"Batch {batch_id} is cancelling.\n"
    run_open_tasks(desk)
    again = cli("results", batch_id)
    assert (again.returncode, again.stdout) == (3, b"")


def test_a_job_is_submitted_shown_and_cancelled(cli: Cli) -> None:
    job_id = cli("job", "submit", "What is it?", "--model", "tiny").stdout.decode().strip()
    assert job_id.startswith("job_")
    assert b"queued" in cli("job", "get", job_id).stdout
    late = cli("job", "get", job_id, "--wait", "--timeout", "0")
    assert late.returncode == 4
    assert late.stderr.startswith(b"trunkline: Job job_")
    assert b"cancelled" in cli("job", "cancel", job_id).stdout
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
    (job,) = lines(cli("job", "submit", "--body", "-", "--priority", "low", "--json", data=body).stdout)
    assert job["priority"] == "low"


def test_models_are_listed(cli: Cli) -> None:
    assert "tiny" in cli("models").stdout.decode().split()


ERRORS = [
    (("status", "batch_none"), 1, "not_found"),
    (("results", "../files"), 1, "404"),
    (("cancel", "batch_none"), 1, "not_found"),
    (("submit", "not there.jsonl"), 2, "not there.jsonl cannot be read"),
    (("submit", "."), 2, "cannot be read"),
    (("submit", "-"), 1, "empty_file"),
    (("submit", "-", "-o", "x"), 2, "--wait"),
    (("submit", "-", "--metadata", "novalue"), 2, "KEY=VALUE"),
    (("job", "submit"), 2, "--body"),
    (("job", "submit", "x"), 2, "model"),
    (("job", "submit", "x", "--model", "none"), 1, "model_not_found"),
    (("status", "x", "--url", "here"), 2, "TRUNKLINE_BASE_URL"),
]


def test_an_error_is_one_sentence_and_a_status(cli: Cli) -> None:
    for arguments, status, said in ERRORS:
        done = cli(*arguments)
        assert (done.returncode, done.stdout) == (status, b""), (arguments, done.stderr)
        text = done.stderr.decode()
        assert said in text
        assert text.startswith("trunkline: ")
        assert text.count("\n") == 1


def test_wrong_usage_is_status_2_without_traceback(cli: Cli) -> None:
    for arguments in (("submit",), ("batches", "--limit", "0"), ("no-such-command",), ("status", "--x")):
        done = cli(*arguments)
        assert done.returncode == 2, arguments
        assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_it_quietly(environment: dict[str, str], desk: Desk, cli: Cli) -> None:
    batch_id = cli("submit", "-", data=INPUT).stdout.decode().strip()
    run_open_tasks(desk)
    complete(desk, batch_id)
    argv = [sys.executable, "-m", "trunkline", "results", batch_id]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        killer = threading.Timer(30, process.kill)
        killer.start()
        assert b"Traceback" not in process.stderr.read()
        killer.cancel()


def test_the_version_is_printed_without_a_command(cli: Cli) -> None:
    done = cli("--version")
    assert done.returncode == 0
    assert done.stdout.decode().strip() == version("trunkline")


def test_a_batch_is_paused_changed_looked_into_retried_and_deleted(cli: Cli, desk: Desk) -> None:
    batch_id = cli("submit", "-", data=INPUT).stdout.decode().strip()
    for arguments, said in (
        (("pause", batch_id), f"Batch {batch_id} is paused.\n"),
        (("resume", batch_id), f"Batch {batch_id} goes on.\n"),
        (("priority", batch_id, "low"), f"Batch {batch_id} has priority low.\n"),
        (("window", batch_id, "3d"), f"Batch {batch_id} has 3d from its creation.\n"),
    ):
        done = cli(*arguments)
        assert (done.returncode, done.stdout.decode()) == (0, said), done.stderr
    run_open_tasks(desk)
    desk.answer(batch_id, ["c1"])
    assert [line["status"] for line in lines(cli("requests", batch_id, "--json").stdout)] == [
        "queued", "succeeded", "queued",
    ]  # fmt: skip
    assert "c2" in cli("requests", batch_id, "--status", "queued").stdout.decode()
    refused = cli("delete", batch_id)
    assert (refused.returncode, refused.stderr.count(b"\n")) == (1, 1)
    assert b"batch_not_terminal" in refused.stderr
    cli("cancel", batch_id)
    run_open_tasks(desk)
    retried = cli("retry", batch_id).stdout.decode().strip()
    assert desk.batch(retried).retry_of == batch_id
    assert cli("delete", batch_id).stdout.decode() == f"Batch {batch_id} is deleted.\n"
    assert cli("status", batch_id).returncode == 1
