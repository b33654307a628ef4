"""Lines that an engine cannot answer, or answers oddly, among good ones: each ends as the contract says, and no other
line is hurt. `tests/engine/test_poison.py` has the ones that a real vLLM can be sent."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from control_fixtures import jsonl, request
from openai.types import Batch
from plant import (  # noqa: F401 - two are fixtures
    ANSWER_TOKENS,
    CACHED_TOKENS,
    PROMPT_TOKENS,
    Plant,
    check_accounting,
    good_answer,
    plant,
    standing,
)

pytestmark = pytest.mark.embedded_only

GOOD = 12
TOO_LONG = "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens."

# What engines say of a request that they refuse, and what the error line must have of it: (status, body), message.
REFUSALS: dict[str, tuple[int, bytes, str]] = {
    "too long, as vLLM says it": (
        400,
        json.dumps({"error": {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}}).encode(),
        TOO_LONG,
    ),
    "too long, as older ones say it": (
        400,
        json.dumps({"object": "error", "message": TOO_LONG, "type": "BadRequestError", "code": 400}).encode(),
        TOO_LONG,
    ),
    "negative max_tokens": (
        422,
        json.dumps({"detail": [{"loc": ["body", "max_tokens"], "msg": "must be at least 1", "input": -1}]}).encode(),
        "must be at least 1",
    ),
    "invalid schema": (400, b'{"detail": "Grammar error: no such type: strin"}', "Grammar error: no such type: strin"),
    "a proxy's page": (413, b"<html>too large</html>", "The engine answered with status 413."),
    "no words": (404, b"", "The engine answered with status 404."),
}

# Successes that say little of what they used: usage, what is known of it (prompt, cached, answer), is cached known?
USAGES: dict[str, tuple[Any, tuple[int, int, int], bool]] = {
    "no usage": (..., (0, 0, 0), False),
    "usage null": (None, (0, 0, 0), False),
    "no details": ({"prompt_tokens": 7, "completion_tokens": 3}, (7, 0, 3), False),
    "details null": ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}, (7, 0, 3), False),
    "nonsense": ({"prompt_tokens": -4, "completion_tokens": "3", "prompt_tokens_details": [1]}, (0, 0, 0), False),
    "more cached than sent": (
        {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
        (7, 0, 3),
        False,
    ),
    "nothing cached": (
        {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
        (7, 0, 3),
        True,
    ),
}


def reply(body: dict[str, Any]) -> tuple[int, bytes] | None:
    asked = body["messages"][-1]["content"]
    if asked in REFUSALS:
        return REFUSALS[asked][:2]
    if asked in USAGES:
        answer = json.loads(good_answer(body))
        del answer["usage"]
        said = USAGES[asked][0]
        return 200, json.dumps(answer if said is ... else {**answer, "usage": said}).encode()
    return None


def mixed(poison: list[dict[str, Any]]) -> bytes:
    """The poison spread over good lines."""
    rows = [request(f"good-{n}", text=f"good {n}") for n in range(GOOD)]
    for number, row in enumerate(poison):
        rows.insert(2 * number + 1, row)
    return jsonl(rows)


def asked_times(plant: Plant) -> Counter[str]:
    return Counter(body["messages"][-1]["content"] for body in plant.server.requests)


def check_good_lines(plant: Plant, batch: Batch, lines: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every line in one file, every job with one result, good ones asked and answered once; both files by custom_id."""
    assert (batch.status, batch.errors) == ("completed", None)
    good, bad = check_accounting(plant, batch, lines)
    assert set(plant.results_per_line(batch.id).values()) == {1}
    answers = {line["custom_id"]: line for line in good}
    for number in range(GOOD):
        message = answers[f"good-{number}"]["response"]["body"]["choices"][0]["message"]
        assert message["content"] == f"good {number}"
        assert asked_times(plant)[f"good {number}"] == 1
    return answers, {line["custom_id"]: line for line in bad}


def test_refused_lines_end_with_the_engines_words_and_are_asked_once(plant: Plant) -> None:
    plant.server.reply = reply
    batch = plant.run(mixed([request(name, text=name) for name in REFUSALS]))
    _, bad = check_good_lines(plant, batch, GOOD + len(REFUSALS))
    for name, (status, _, message) in REFUSALS.items():
        line = bad.pop(name)
        assert line["error"] is None
        assert line["response"]["status_code"] == status
        assert line["response"]["body"]["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
        assert asked_times(plant)[name] == 1
    assert bad == {}


def test_a_body_that_no_planner_can_count_is_the_engines_to_judge(plant: Plant) -> None:
    """Intake predicts lengths from fields that nobody has checked."""
    odd: list[Any] = [-1, -(10**30), 10**30, 0, 1.5, "ten", None, [], True]
    rows = [
        {**request(f"odd-{n}"), "body": {**request("x", text=f"odd {n}")["body"], "max_tokens": value}}
        for n, value in enumerate(odd)
    ]
    rows += [{**request("no messages"), "body": {"model": "tiny", "messages": []}}]
    refused = (400, b'{"error": {"message": "no", "code": 400}}')
    plant.server.reply = lambda body: refused if not body["messages"] or "odd" in str(body["messages"]) else None
    batch = plant.run(mixed(rows[:-1]) + jsonl(rows[-1:]))
    good, bad = check_accounting(plant, batch, GOOD + len(rows))
    assert (len(good), len(bad)) == (GOOD, len(rows))
    sent = {str(body["messages"]): body.get("max_tokens") for body in plant.server.requests}
    for number, value in enumerate(odd):
        (arrived,) = [item for name, item in sent.items() if f"'odd {number}'" in name]
        assert arrived == value  # as it was written, for the engine to refuse


def test_sums_are_over_what_is_known(plant: Plant) -> None:
    plant.server.reply = reply
    batch = plant.run(mixed([request(name, text=name) for name in USAGES]))
    answers, bad = check_good_lines(plant, batch, GOOD + len(USAGES))
    assert bad == {}
    assert "usage" not in answers["no usage"]["response"]["body"]
    known = [tokens for _, tokens, _ in USAGES.values()]
    prompt, cached, completion = (sum(column) for column in zip(*known, strict=True))
    assert batch.usage is not None
    assert batch.usage.input_tokens == PROMPT_TOKENS * GOOD + prompt
    assert batch.usage.input_tokens_details.cached_tokens == CACHED_TOKENS * GOOD + cached
    assert batch.usage.output_tokens == ANSWER_TOKENS * GOOD + completion
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    cache = (batch.model_extra or {})["queue"]["cache"]
    assert cache["lines_unknown"] == sum(not is_known for _, _, is_known in USAGES.values())
    measured = sum(tokens[0] for _, tokens, is_known in USAGES.values() if is_known)
    assert (cache["prompt_tokens"], cache["cached_tokens"]) == (
        PROMPT_TOKENS * GOOD + measured,
        CACHED_TOKENS * GOOD + cached,
    )


def test_answers_that_are_none_are_asked_again_and_then_said(plant: Plant) -> None:
    broken = {"not json": b"<html>", "a list": b"[]", "nothing": b"", "cut": b'{"choices": [{"mess'}
    plant.server.reply = lambda body: (
        (200, broken[name]) if (name := body["messages"][-1]["content"]) in broken else None
    )
    batch = plant.run(mixed([request(name, text=name) for name in broken]))
    _, bad = check_good_lines(plant, batch, GOOD + len(broken))
    for name in broken:
        assert bad[name]["response"]["status_code"] == 502
        assert bad[name]["response"]["body"]["error"]["code"] == "bad_engine_answer"
        assert asked_times(plant)[name] == plant.api.settings.job_tries


def test_odd_answers_pass_through_as_ascii_that_the_sdk_can_read(plant: Plant) -> None:
    """NaN in logprobs, half a surrogate pair, raw separators: engines send them all."""
    odd = {
        "nan": b'{"choices": [{"logprobs": {"x": [NaN, -Infinity, 1e999]}}]}',
        "surrogate": b'{"choices": [{"message": {"content": "\\ud83d"}}]}',
        "separators": '{"choices": [{"message": {"content": "a\u2028b\u2029c\x85d"}}]}'.encode(),
    }
    plant.server.reply = lambda body: (200, odd[name]) if (name := body["messages"][-1]["content"]) in odd else None
    batch = plant.run(mixed([request(name, text=name) for name in odd]))
    answers, bad = check_good_lines(plant, batch, GOOD + len(odd))
    assert bad == {}
    assert plant.api.sdk().files.content(str(batch.output_file_id)).read().isascii()
    bodies = {name: answers[name]["response"]["body"]["choices"][0] for name in odd}
    assert bodies["nan"] == {"logprobs": {"x": [None, None, None]}}
    assert bodies["surrogate"]["message"]["content"] == "\ud83d"
    assert bodies["separators"]["message"]["content"] == "a\u2028b\u2029c\x85d"
