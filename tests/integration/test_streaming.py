"""`stream: true` over a whole line: unmodified SDK in front, an engine behind that streams when the test says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import redis
import sqlalchemy as sa
from api_fixtures import check_refused, serve_api
from line_fixtures import Line, line_of
from server_kinds import Servers
from stream_script import DIES, HELLO, TEXT, USAGE, USAGE_EVENT, WORDS, Script, chat_event
from worker_processes import wait_until

from service.relay import Chunk, Sender
from service.store.tables import job

CHAT = "/v1/chat/completions"
MARKER = "marker-of-a-prompt-that-no-log-may-show"
MESSAGES: list[Any] = [{"role": "user", "content": MARKER}]
BODY = {"model": "tiny", "messages": MESSAGES, "stream": True}
ABORT_SECONDS = 1.0


@pytest.fixture(scope="module")
def line(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with line_of(servers, tmp_path_factory.mktemp("line"), job_tries=2) as whole:
        yield whole
        assert MARKER not in whole.logs()


@pytest.fixture
def sdk(line: Line) -> Iterator[openai.OpenAI]:
    with line.api.sdk(max_retries=0) as client:
        yield client


def play(line: Line, *events: Any, **options: Any) -> Script:
    line.engine.asked.clear()
    script = Script(events or HELLO, **options)
    line.engine.script = script
    return script


def job_of(line: Line, job_id: str) -> dict[str, Any]:
    """The job once it has ended."""
    answer = line.api.http.get(f"/v1/jobs/{job_id}?wait=20").json()
    assert answer["finished_at"] is not None, answer
    return dict(answer)


def last_job(line: Line) -> dict[str, Any]:
    (made,) = line.api.http.get("/v1/jobs?limit=1").json()["data"]
    return job_of(line, made["id"])


def test_events_arrive_one_by_one_before_the_engine_has_finished(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, gated=True)
    script.let()  # the head comes with the first event
    with sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
        seen = []
        for number in range(len(HELLO) - 1):
            chunk = next(stream)
            assert script.sent == number + 1
            seen.append(chunk.choices[0].delta.content or "")
            script.let()
        script.let(2)
        assert list(stream) == []
    assert "".join(seen) == TEXT
    ((path, body),) = line.engine.asked
    assert path == CHAT
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_the_bytes_are_the_engines_and_the_recorded_result_is_a_whole_answer(line: Line) -> None:
    play(line)
    with line.api.http.stream("POST", CHAT, json={**BODY, "stream_options": {"include_usage": True}}) as answer:
        raw = answer.read()
    assert raw == "".join(f"{event}\n\n" for event in [*HELLO, "data: [DONE]"]).encode()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-trunkline-instance"] == "one"
    made = job_of(line, answer.headers["x-trunkline-job"])
    assert made["status"] == "succeeded"
    assert made["cache"]["cached_tokens"] == 8
    message = {"role": "assistant", "content": TEXT}
    choice = {"logprobs": None, "finish_reason": "stop", "index": 0, "message": message}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 5, "model": "tiny"}
    assert made["response"]["body"] == {**head, "choices": [choice], "usage": USAGE}


def test_json_may_write_the_wish_for_a_stream_with_escapes(line: Line) -> None:
    play(line)
    raw = json.dumps(BODY).replace("stream", "\\u0073tream").encode()
    answer = line.api.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("asks", [True, False, None])
def test_usage_comes_to_whoever_asked_for_it(line: Line, sdk: openai.OpenAI, asks: bool | None) -> None:
    continuous = chat_event({"content": "x"})[:-1] + ', "usage": null}'
    play(line, continuous, *HELLO)
    options: dict[str, Any] = {} if asks is None else {"stream_options": {"include_usage": asks}}
    chunks = list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options))
    assert [bool(chunk.usage) for chunk in chunks] == [False] * len(HELLO) + [True] * bool(asks)
    assert ("usage" in chunks[0].model_fields_set) == bool(asks)
    assert line.engine.asked[0][1]["stream_options"]["include_usage"] is True
    assert last_job(line)["usage"]["prompt_tokens"] == 9


def test_tool_calls(line: Line, sdk: openai.OpenAI) -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    second = {"index": 1, "id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    parts = [{"index": 0, "function": {"arguments": part}} for part in ('{"city"', ': "Bern"}')]
    play(
        line,
        chat_event({"role": "assistant", "content": "", "reasoning": "Hm"}),
        *(chat_event({"tool_calls": [call]}) for call in (first, *parts, second)),
        chat_event({}, "tool_calls"),
        USAGE_EVENT,
    )
    chunks = list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in deltas[:3] if call.function) == '{"city": "Bern"}'
    message = last_job(line)["response"]["body"]["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
            {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


def test_completions_stream_too(line: Line, sdk: openai.OpenAI) -> None:
    pieces = [(0, "a", None), (1, "x", None), (0, "b", "stop"), (1, "y", "length")]
    choices = [{"index": index, "text": text, "finish_reason": reason} for index, text, reason in pieces]
    events = ["data: " + json.dumps({"id": "c", "object": "text_completion", "choices": [it]}) for it in choices]
    play(line, *events)
    chunks = list(sdk.completions.create(model="tiny", prompt="p", n=2, stream=True))
    assert [(chunk.choices[0].index, chunk.choices[0].text) for chunk in chunks] == [it[:2] for it in pieces]
    made = last_job(line)["response"]["body"]
    assert made["object"] == "text_completion"
    assert [(it["text"], it["finish_reason"]) for it in made["choices"]] == [("ab", "stop"), ("xy", "length")]


async def test_two_streams_at_once_with_the_async_sdk(line: Line) -> None:
    script = play(line, gated=True)
    async with openai.AsyncOpenAI(base_url=f"{line.api.url}/v1", api_key="none", max_retries=0) as client:
        script.let(2 * (len(HELLO) + 1))

        async def one() -> str:
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(one(), one()) == [TEXT, TEXT]
    assert script.requests == 2


@pytest.mark.parametrize("as_event", [False, True])
def test_an_error_before_the_first_event_is_an_error(line: Line, sdk: openai.OpenAI, as_event: bool) -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    if as_event:
        play(line, "data: " + json.dumps(error))
    else:
        play(line, first=(400, json.dumps(error).encode()))
    with pytest.raises(openai.BadRequestError, match="too long") as caught:
        sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert caught.value.type == "invalid_request_error"
    assert last_job(line)["status"] == "failed"


def test_a_retry_before_the_first_event_is_not_seen(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, first=(503, b'{"error": {"message": "busy"}}'))
    chunks = list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert script.requests == 2


def test_an_engine_that_breaks_off_ends_the_stream_with_an_error(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, *HELLO[:2], DIES)
    stream = sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", WORDS[0]]
    with pytest.raises(openai.APIError, match="failed in the middle") as caught:
        next(stream)
    assert caught.value.code == "engine_crash"
    made = last_job(line)
    assert (made["status"], made["error"]["code"]) == ("failed", "worker_lost")
    assert "in the middle" in made["error"]["message"]
    assert script.requests == 1  # it is not run again for nobody


def test_an_error_event_in_the_middle_ends_the_stream(line: Line, sdk: openai.OpenAI) -> None:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
    play(line, *HELLO[:2], "data: " + json.dumps(error))
    with pytest.raises(openai.APIError, match="out of memory"):
        list(sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert last_job(line)["status"] == "failed"
    assert len(line.engine.asked) == 1


def test_an_engine_that_does_not_stream_answers_whole(line: Line) -> None:
    whole = json.dumps({"choices": [{"index": 0, "message": {"content": "whole"}}]}).encode()
    play(line, first=(200, whole))
    answer = line.api.http.post(CHAT, json=BODY)
    assert (answer.status_code, answer.content) == (200, whole)


def test_a_slow_client_holds_the_engine_up(line: Line) -> None:
    big = [chat_event({"content": f"{number:06d}" + "x" * 4000}) for number in range(6000)]
    script = play(line, *big, chat_event({}, "stop"))
    relay = line.api.app.state.context.relay
    with line.api.http.stream("POST", CHAT, json=BODY, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        assert script.paused.wait(30)
        assert script.sent < 5000  # what the sockets between hold, and the window
        (stream,) = relay._streams.values()
        assert len(stream._events) <= 256
        data = [first, *(text for text in lines if text)]
    assert data == [*big, chat_event({}, "stop"), "data: [DONE]"]
    assert job_of(line, answer.headers["x-trunkline-job"])["status"] == "succeeded"


def test_a_client_that_goes_away_ends_the_engines_request(line: Line) -> None:
    script = play(line, gated=True)
    script.let(2)
    with httpx.Client(base_url=line.api.url) as client, client.stream("POST", CHAT, json=BODY) as answer:
        next(answer.iter_lines())
        job_id = answer.headers["x-trunkline-job"]
    gone_at = time.monotonic()
    wait_until(lambda: bool(script.aborted), 20)
    assert script.aborted[0] - gone_at < ABORT_SECONDS
    assert job_of(line, job_id)["status"] == "cancelled"
    assert not line.api.app.state.context.relay._streams


def test_a_client_that_goes_away_before_the_first_event(line: Line) -> None:
    script = play(line, gated=True)
    with httpx.Client(base_url=line.api.url, timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=BODY)
    wait_until(lambda: bool(script.aborted), 20)
    assert last_job(line)["status"] == "cancelled"


def test_a_gap_ends_the_stream_with_an_error_and_the_result_is_whole(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, gated=True)
    script.let()
    relay = line.api.app.state.context.relay
    with sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
        next(stream)
        (open_stream,) = relay._streams.values()
        later = Chunk(
            stream=open_stream.key, run=open_stream.run, first=7, data=["x"], reply_to="signal.one", instance="one"
        )
        sender = Sender(line.broker_url)
        sender.start()
        sender.send(relay.address, later)
        sender.stop()
        with pytest.raises(openai.APIError, match="lost on its way") as caught:
            next(stream)
        assert caught.value.code == "stream_lost"
        job_id = stream.response.headers["x-trunkline-job"]
    script.let(len(HELLO))
    made = job_of(line, job_id)
    assert made["response"]["body"]["choices"][0]["message"]["content"] == TEXT


def test_an_emptied_broker_does_not_touch_a_stream(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, gated=True)
    script.let(2)
    with sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
        next(stream)
        redis.Redis.from_url(line.broker_url).flushall()
        script.let(len(HELLO))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
    keys = redis.Redis.from_url(line.broker_url).keys("*relay*")
    assert all(redis.Redis.from_url(line.broker_url).type(key) == b"set" for key in keys), keys  # bindings, no chunks


def test_a_relay_that_breaks_ends_in_a_whole_answer_or_in_an_error(line: Line, sdk: openai.OpenAI) -> None:
    script = play(line, gated=True)
    script.let()
    with sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
        next(stream)
        job_id = stream.response.headers["x-trunkline-job"]
        redis.Redis.from_url(line.broker_url).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        script.let(len(HELLO))
        text, code = "", None
        try:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        except openai.APIError as error:  # as a rule: the listener is back half a second later
            code = error.code
        assert code == "stream_lost" or text == TEXT
    assert job_of(line, job_id)["response"]["body"]["choices"][0]["message"]["content"] == TEXT


def test_what_cannot_stream_is_refused(line: Line) -> None:
    post = line.api.http.post
    body = {"model": "tiny", "input": "x", "stream": True}
    check_refused(post("/v1/embeddings", json=body), 400, "streaming_unsupported", "stream")
    job_body = {"endpoint": CHAT, "body": BODY}
    check_refused(post("/v1/jobs", json=job_body), 400, "streaming_unsupported", "body.stream")
    check_refused(post(CHAT, json={**BODY, "stream_options": 1}), 400, "invalid_type", "stream_options")
    check_refused(post(CHAT, json={**BODY, "messages": None}), 400, "missing_required_parameter", "messages")
    check_refused(post(CHAT, json={**BODY, "model": "none"}), 404, "model_not_found", "model")
    check_refused(post(CHAT, json={**BODY, "stream": "yes"}), 400, "invalid_type", "stream")


def test_the_job_of_a_stream_is_its_tenants_alone(line: Line) -> None:
    play(line)
    with line.api.http.stream("POST", CHAT, json=BODY) as answer:
        answer.read()
    path = f"/v1/jobs/{answer.headers['x-trunkline-job']}"
    stranger = line.api.as_tenant(line.api.make_key("stranger"))
    try:
        check_refused(stranger.get(path), 404, "not_found", "job_id")
        check_refused(stranger.post(f"{path}/cancel"), 404, "not_found", "job_id")
    finally:
        with line.api.database.transaction() as conn:
            conn.execute(sa.text("delete from api_key"))  # the other tests send none


def test_without_a_broker_nothing_is_created(line: Line) -> None:
    before = jobs(line)
    models = line.api.app.state.context.models
    with serve_api(line.api.settings, line.api.database, "redis://127.0.0.1:1/0", models) as api:
        check_refused(api.http.post(CHAT, json=BODY), 503, "service_unavailable")
    assert jobs(line) == before


def jobs(line: Line) -> int:
    with line.api.database.transaction() as conn:
        return int(conn.execute(sa.select(sa.func.count()).select_from(job)).scalar_one())
