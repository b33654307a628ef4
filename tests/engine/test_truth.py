"""Predicted against measured on a real vLLM that nothing else uses, and a cause for every token that is missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from stack import Stack

from service.core.model import MissCause, Outcome
from service.core.prefix import rung_span
from service.demo_files import MODEL, model_folder_of, write_fleet
from service.settings import Settings
from service.store.session import Database
from service.store.tables import instance_boot, job_result

pytestmark = pytest.mark.engine
BLOCK = 32
GROUPS, LINES = 4, 26
NIGHT_LINES = 50
BYPASSING = 4
GUESTS = 6  # of about 800 tokens each: together they are more than the engine's cache of 4,096 tokens holds


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


def body(system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}


def rules(name: str, count: int) -> str:
    return " ".join(f"Rule {number} of house {name}: answer in a word." for number in range(count))


def submit(stack: Stack, bodies: list[dict[str, Any]]) -> str:
    """A batch of these lines; its id."""
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": each}
        for number, each in enumerate(bodies)
    ]
    sdk = stack.sdk()
    data = "\n".join(map(json.dumps, lines)).encode()
    uploaded = sdk.files.create(file=("in.jsonl", data), purpose="batch")
    return sdk.batches.create(
        input_file_id=uploaded.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    ).id


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    predicted: int
    cached: int
    cause: str | None

    @property
    def is_true(self) -> bool:
        """Within one block or one rung, whichever is larger."""
        return abs(self.cached - self.predicted) <= max(BLOCK, rung_span(self.predicted))


def rows_of(database: Database, batch_id: str | None) -> list[Row]:
    query = sa.select(job_result.c.predicted_cached_tokens, job_result.c.cached_tokens, job_result.c.miss_cause).where(
        job_result.c.outcome == Outcome.SUCCEEDED, job_result.c.batch_id.is_not_distinct_from(batch_id)
    )
    with database.transaction() as conn:
        return [Row(predicted=row[0], cached=row[1], cause=row[2]) for row in conn.execute(query)]


def missing(rows: list[Row]) -> Counter[str | None]:
    """Tokens that were predicted and not served, by cause."""
    tokens: Counter[str | None] = Counter()
    for row in rows:
        tokens[row.cause] += max(0, row.predicted - row.cached)
    return +tokens


@pytest.mark.timeout(900)
def test_predictions_hold_and_what_is_missing_has_a_cause(
    stack: Stack, database: Database, record_property: Any
) -> None:
    stack.start(instances=1, seconds=400)
    alone = submit(
        stack, [body(rules(f"{group}", 16), f"Question {line}?") for line in range(LINES) for group in range(GROUPS)]
    )
    stack.wait(lambda: stack.sdk().batches.retrieve(alone).status == "completed", 300)
    rows = rows_of(database, alone)
    assert len(rows) == GROUPS * LINES
    wrong = [row for row in rows if not row.is_true]
    record_property("alone", f"{len(wrong)} of {len(rows)} off by more than a block; missing {missing(rows)}")
    assert len(wrong) <= 0.01 * len(rows), wrong
    firsts = [row for row in rows if row.cause == MissCause.FIRST_OF_GROUP]
    assert len(firsts) == GROUPS
    assert all(row.cause is not None for row in rows if row.cached < row.predicted)

    night = submit(
        stack,
        [body(rules("night", 44), f"Question {line}?") for line in range(NIGHT_LINES)]
        + [{**body(rules("night", 44), f"Riddle {line}?"), "prompt_logprobs": 0} for line in range(BYPASSING)],
    )
    stack.wait(lambda: stack.completed(night) >= 1, 200)
    for guest in range(GUESTS):  # single jobs go first, and push out of the cache what the batch shares
        asked = {"endpoint": "/v1/chat/completions", "body": body(rules(f"guest {guest}", 66), "Well?")}
        assert stack.http.post("/v1/jobs", json=asked).status_code == 202
    stack.wait(lambda: stack.sdk().batches.retrieve(night).status == "completed", 300)
    stack.wait(lambda: len(rows_of(database, None)) == GUESTS, 120)
    tokens = missing([*rows_of(database, night), *rows_of(database, None)])
    record_property("with guests", f"missing {dict(tokens)}")
    # Whether the batch's prefix is evicted depends on who comes when; a request that reads no cache misses for sure.
    assert tokens[MissCause.CACHE_BYPASSED] > 0
    explained = tokens.total() - tokens[MissCause.UNKNOWN] - tokens[None]
    assert explained >= 0.99 * tokens.total(), tokens
    with database.transaction() as conn:
        assert conn.execute(sa.select(instance_boot.c.key_agrees, instance_boot.c.alarm)).one() == (True, None)
