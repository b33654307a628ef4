"""Whether the OpenAPI document is true: schemathesis against all of Trunkline's own processes.

`python -m bench.contract [--examples 50] [--seed 1] [--json]` starts them with a simulated engine, has schemathesis
make requests of the document (coverage, fuzzing, stateful) and judges every answer: no 5xx, no status, type or shape
that the document does not name. Exit status 1 where an answer is not as documented.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from bench.contract_hooks import KNOWN_FILE
from bench.stack import Stack, running_stack

_MODEL = "tiny"
_INSTANCES = f'[instances.one]\nengine = "simulated"\nmodel = "{_MODEL}"\noptions = {{ speed = 100 }}\n'
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
_LONGEST_SECONDS = 3_600.0
_TAIL_CHARACTERS = 8_000
_KNOWN = 20  # of each kind


def command(url: str, folder: Path, examples: int, seed: int) -> list[str]:
    """How schemathesis is called. Its hooks make bodies name the served model, which nothing would guess."""
    config = folder / "schemathesis.toml"
    config.write_text('hooks = "bench.contract_hooks"\n')
    return [
        *(str(Path(sys.executable).parent / "schemathesis"), "--no-color", "--config-file", str(config)),
        *("run", f"{url}/openapi.json", "--phases", "examples,coverage,fuzzing,stateful"),
        *("--checks", ",".join(_CHECKS), "--max-examples", str(examples), "--seed", str(seed)),
        *("--request-timeout", "90", "--suppress-health-check", "all", "--generation-database", "none"),
        *("--continue-on-failure", "--report", "json", "--report-json-path", str(folder / "report.json")),
    ]


def run(stack: Stack, folder: Path, examples: int, seed: int) -> dict[str, Any]:
    """One run; what it sent, and what it found."""
    make_known(stack, folder)
    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command(stack.url, folder, examples, seed), stdout=output, stderr=output)
        stack.wait(lambda: process.poll() is not None, _LONGEST_SECONDS, "schemathesis")
    said = (folder / "output").read_text(errors="replace")
    if process.returncode:
        sys.stderr.write(said[-_TAIL_CHARACTERS:])
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        **count(folder / "report.json"),
        "is_true": process.returncode == 0,
    }


def count(report: Path) -> dict[str, int]:
    """What schemathesis says of its own run."""
    said = json.loads(report.read_text())
    return {
        "operations": said["operations"]["tested"],
        "cases": said["test_cases"]["generated"],
        "cases_with_failures": said["test_cases"]["with_failures"],
        "unique_failures": said["test_cases"]["unique_failures"],
        "errors": said["test_cases"]["errored"],
        "accepted": sum(rate["accepted"] for rates in said["valid_rates"].values() for rate in rates.values()),
    }


def make_known(stack: Stack, folder: Path) -> None:
    """Files, batches and jobs that are there, for the hooks: what is made up meets nothing but 404."""
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none is configured")
    body = {"model": _MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    known: dict[str, list[str]] = {"file_id": [], "batch_id": [], "job_id": [], "name": [_MODEL]}
    for _ in range(_KNOWN):
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        job = stack.http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body}).json()
        for name, made in (("file_id", file.id), ("batch_id", batch.id), ("job_id", job["id"])):
            known[name].append(made)
    statuses = {"completed"}
    stack.wait(lambda: {item.status for item in client.batches.list(limit=100)} == statuses, 120, "the known batches")
    (folder / KNOWN_FILE).write_text(json.dumps(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="most for each operation and phase (50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="trunkline-contract-") as folder,
        running_stack(f"[models.{_MODEL}]\n", _INSTANCES, 1) as stack,
    ):
        found = run(stack, Path(folder), asked.examples, asked.seed)
    for name, value in found.items():
        print(f"{name:>14}  {value}")
    if asked.json:
        print(json.dumps(found))
    sys.exit(0 if found["is_true"] else 1)


if __name__ == "__main__":
    main()
