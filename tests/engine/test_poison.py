"""Lines that a real vLLM cannot run, among good ones: each gets vLLM's own words, and the engine lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from openai.types import Batch
from stack import Stack

from service.demo_files import MODEL, model_folder_of, write_fleet
from service.settings import Settings
from service.store.session import Database
from service.store.tables import instance_boot, job, job_result

pytestmark = pytest.mark.engine

GOOD = 6


def schema(content: Any) -> dict[str, Any]:
    """Asks for answers of this JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": content}}}


POISON: dict[str, dict[str, Any]] = {
    "prompt longer than the context": {"messages": [{"role": "user", "content": "word " * 4_000}]},
    "answer longer than the context": {"max_tokens": 1_000_000},
    "negative max_tokens": {"max_tokens": -1},
    "max_tokens is no number": {"max_tokens": "ten"},
    "schema of an unknown type": schema({"type": "strin"}),
    "schema that is no schema": schema({"type": "object", "properties": {"a": 7}}),
    "schema that refers to nothing": schema({"$ref": "#/definitions/absent"}),
    "negative temperature": {"temperature": -3},
    "no messages": {"messages": []},
    "a role that is none": {"messages": [{"role": 5, "content": "hi"}]},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
}


@pytest.fixture
def stack(settings: Settings, database: Database, broker_url: str, model_folder: Path) -> Iterator[Stack]:
    """One vLLM of the demo."""
    folder = model_folder_of(settings)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model_folder)
    write_fleet(settings)
    head, *_ = settings.instances_path.read_text().partition("[instances.cpu1]")
    settings.instances_path.write_text(head)
    stack = Stack(settings, model=MODEL)
    yield stack
    assert stack.stop() == []


def line(custom_id: str, **changes: Any) -> bytes:
    messages = [{"role": "user", "content": f"{custom_id}: say a word."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 3, "temperature": 0, **changes}
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row).encode()


def run(stack: Stack, data: bytes) -> Batch:
    sdk = stack.sdk()
    uploaded = sdk.files.create(file=("in.jsonl", data), purpose="batch")
    made = sdk.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    stack.wait(lambda: sdk.batches.retrieve(made.id).status == "completed", 300)
    return sdk.batches.retrieve(made.id)


def read(stack: Stack, file_id: str | None) -> dict[str, dict[str, Any]]:
    lines = stack.sdk().files.content(file_id).iter_lines() if file_id else ()
    return {record["custom_id"]: record for record in map(json.loads, lines)}


@pytest.mark.timeout(1200)
def test_poison_ends_with_the_engines_words_and_costs_no_other_line(
    stack: Stack, database: Database, record_property: Any
) -> None:
    stack.start(instances=1, seconds=400)
    rows = [line(f"good-{n}") for n in range(GOOD)]
    for number, (name, changes) in enumerate(POISON.items()):
        rows.insert(min(2 * number + 1, len(rows)), line(name, **changes))
    batch = run(stack, b"\n".join(rows))
    good, bad = read(stack, batch.output_file_id), read(stack, batch.error_file_id)
    said = {
        name: (
            record["response"] and record["response"]["status_code"],
            (record["error"] or record["response"]["body"]["error"])["message"][:120],
        )
        for name, record in bad.items()
    }
    record_property("said", json.dumps(said))
    assert {f"good-{n}" for n in range(GOOD)} <= set(good), said
    assert set(good) | set(bad) == {f"good-{n}" for n in range(GOOD)} | set(POISON)
    assert not set(good) & set(bad)
    for name in ("prompt longer than the context", "negative max_tokens", "schema of an unknown type"):
        status, message = said[name]
        assert status == 400, said
        assert message
    for record in bad.values():
        assert set(record["response"]["body"]["error"]) == {"message", "type", "param", "code"}
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(good), len(bad))
    known = [record["response"]["body"]["usage"] for record in good.values()]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in known)
    assert (batch.model_extra or {})["queue"]["cache"]["lines_unknown"] == len(bad)

    after = run(stack, b"\n".join(line(f"after-{n}") for n in range(4)))
    assert len(read(stack, after.output_file_id)) == 4
    with database.transaction() as conn:
        assert conn.scalar(sa.select(sa.func.count()).select_from(instance_boot)) == 1  # it never died
        assert conn.scalar(sa.select(sa.func.count()).select_from(job_result)) == conn.scalar(
            sa.select(sa.func.count()).select_from(job)
        )
