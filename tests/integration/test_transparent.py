"""The transparent endpoint over a whole line: unmodified SDK in front, an engine over HTTP behind."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from line_fixtures import Line, line, whole_line  # noqa: F401 - fixtures

MARKER = "marker-of-a-prompt-that-no-log-may-show"
MESSAGES: list[Any] = [{"role": "user", "content": f"{MARKER} one\0two \u2028 \U0001f600"}]
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": MESSAGES}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\u00e9"}'}}
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}


def completion(**message: Any) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": LOGPROBS,
        "message": {"role": "assistant", "content": "hi", **message},
    }
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "t", "choices": [choice], "usage": USAGE}
    return json.dumps(answer, indent=1).encode()


@pytest.fixture
def sdk(line: Line) -> Iterator[openai.OpenAI]:
    with line.api.sdk(max_retries=0) as client:
        yield client


def test_a_success_comes_back_byte_for_byte(line: Line) -> None:
    line.engine.reply = (
        200,
        b' {"choices" : [] ,"n":NaN, "\\u00e9": "\xc3\xa9", "usage": %b}\n' % json.dumps(USAGE).encode(),
    )
    answer = line.api.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.content) == line.engine.reply
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-trunkline-instance"] == "one"
    assert answer.headers["x-trunkline-cached-tokens"] == "8"
    assert answer.headers["x-request-id"].startswith("req_")


def test_nothing_is_said_of_cached_tokens_that_the_engine_does_not_report(line: Line) -> None:
    answer = line.api.http.post(CHAT, json=BODY)
    assert answer.status_code == 200
    assert "x-trunkline-cached-tokens" not in answer.headers


def test_tools_structured_outputs_and_logprobs_pass_both_ways(line: Line, sdk: openai.OpenAI) -> None:
    line.engine.reply = (200, completion(content=None, tool_calls=[CALL]))
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "auto",
        "response_format": SCHEMA,
        "logprobs": True,
        "seed": 3,
    }
    answer = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"top_k": 4, "cache_salt": "mine"}, **asked
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.model_dump() == CALL
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.model_dump(exclude_none=True)["content"] == LOGPROBS["content"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    ((path, body),) = line.engine.asked
    salt = body.pop("cache_salt")
    assert salt != "mine"
    del body["priority"]
    assert (path, body) == (CHAT, {**BODY, **asked, "top_k": 4})


async def test_the_async_sdk(line: Line) -> None:
    line.engine.reply = (200, completion())
    async with openai.AsyncOpenAI(base_url=f"{line.api.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="small", messages=MESSAGES)
        assert answer.choices[0].message.content == "hi"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="unknown", messages=MESSAGES)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_completions(line: Line, sdk: openai.OpenAI) -> None:
    choice = {"index": 0, "text": " there", "logprobs": None, "finish_reason": "stop"}
    text = {"id": "x", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice], "usage": USAGE}
    line.engine.reply = (200, json.dumps(text).encode())
    answer = sdk.completions.create(model="tiny", prompt="hello", max_tokens=2)
    assert answer.choices[0].text == " there"
    assert line.engine.asked[0][0] == "/v1/completions"


def test_embeddings_as_the_sdk_asks_for_them(line: Line, sdk: openai.OpenAI) -> None:
    vector = base64.b64encode(struct.pack("<3f", 0.5, -1.0, 2.0)).decode()
    data = [{"object": "embedding", "index": 0, "embedding": vector}]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    line.engine.reply = (200, json.dumps({"object": "list", "model": "tiny", "data": data, "usage": usage}).encode())
    answer = sdk.embeddings.create(model="tiny", input=["hello"])
    assert answer.data[0].embedding == [0.5, -1.0, 2.0]
    assert line.engine.asked[0][0] == "/v1/embeddings"
    assert line.engine.asked[0][1]["encoding_format"] == "base64"


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (
            400,
            b'{"error": {"message": "too long", "type": "BadRequestError", "param": "n", "code": 400}}',
            "too long",
            None,
        ),
        (400, b'{"object": "error", "message": "old vllm", "code": 40303}', "old vllm", None),
        (422, b'{"detail": [{"msg": "field required"}]}', "field required", None),
        (403, b'{"error": {"message": "no", "code": "nope"}}', "no", "nope"),
        (429, b'{"error": {"message": "slow down"}}', "slow down", None),
        (500, b"<html>oops</html>", "The engine answered with status 500.", None),
        (503, b"", "The engine answered with status 503.", None),
    ],
)
def test_an_error_keeps_status_and_message_in_the_envelope_and_is_not_repeated(
    line: Line,
    status: int,
    body: bytes,
    message: str,
    code: str | None,
) -> None:
    line.engine.reply = (status, body)
    with line.api.sdk(max_retries=2) as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"case": [status, message]})
    assert caught.value.status_code == status
    error = caught.value.response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["code"]) == (message, code)
    assert error["type"] == {429: "rate_limit_error", 403: "permission_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    assert len(line.engine.asked) == 1


def test_it_is_a_job_like_any_other(line: Line) -> None:
    line.engine.reply = (200, completion())
    assert line.api.http.post(CHAT, json={**BODY, "model": "small"}).status_code == 200
    (made,) = line.api.http.get("/v1/jobs?limit=1").json()["data"]
    assert (made["status"], made["priority"], made["model"]) == ("succeeded", "interactive", "tiny")
    assert (made["instance"], made["cache"]["cached_tokens"]) == ("one", 8)
    assert made["response"]["body"] == json.loads(completion())


def test_no_log_shows_what_was_asked_or_answered(line: Line) -> None:
    line.engine.reply = (200, completion(content=MARKER))
    assert line.api.http.post(CHAT, json=BODY).status_code == 200
    line.engine.reply = (500, json.dumps({"error": {"message": MARKER}}).encode())
    assert line.api.http.post(CHAT, json=BODY).status_code == 500
    assert "cohort done" in line.logs()
    assert MARKER not in line.logs()
