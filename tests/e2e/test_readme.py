"""The examples of the README, as they stand there, against every process of Trunkline with a simulated engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack
from worker_processes import write_fleet

from service.settings import Settings
from service.store.session import Database

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def stack(settings: Settings, database: Database, broker_url: str) -> Iterator[Stack]:
    write_fleet(settings, speed=20)
    settings.models_path.write_text('[models.tiny]\naliases = ["smollm2"]\n')
    stack = Stack(settings)
    try:
        stack.start(instances=1)
        yield stack
    finally:
        assert stack.stop() == []


def run(stack: Stack, argv: list[str], folder: Path) -> str:
    """What it prints; the supervisor lives on meanwhile."""
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "TRUNKLINE_BASE_URL": f"{stack.url}/v1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "TRUNKLINE_API_KEY": "none",
    }
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            stack.wait(lambda: process.poll() is not None, 90)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text
    return text


def test_the_examples_run_as_they_are_written(stack: Stack, tmp_path: Path) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]}
    line = {"custom_id": "mine", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "support.jsonl").write_text(json.dumps(line) + "\n")
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", README, re.M | re.S)
    python = [block for language, block in blocks if language == "python"]
    shell = [
        line
        for language, block in blocks
        if language == "sh"
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith(("trunkline submit", "trunkline job", "curl")) and '"file-..."' not in line
    ]
    said = [run(stack, [sys.executable, "-c", block], tmp_path) for block in python]
    assert said[0].count("simulated answer") == 3
    assert "request-1 simulated answer" in said[0]
    assert "simulated answer" in said[1]
    assert json.loads(said[2])["custom_id"] == "1"
    assert len(shell) == 4
    for command in shell:
        (tmp_path / "answers.jsonl").unlink(missing_ok=True)
        printed = run(stack, ["bash", "-c", command], tmp_path)
        if "answers.jsonl" in command:
            assert json.loads((tmp_path / "answers.jsonl").read_text())["custom_id"] == "mine"
        elif command.startswith("trunkline job"):
            assert "simulated answer" in printed
        else:
            assert json.loads(printed)["purpose"] == "batch"
