"""The engine `openai`: what it finds out about a server that others run, and what it then sends to it."""

from __future__ import annotations

import json

import pytest
from fake_server import FakeServer, serving

from service.errors import EngineFailed
from service.fleet import Instance, Model
from service.ports import free_port
from service.settings import Settings
from workers.engines.base import EngineFacts, EngineGone, EngineReply, EngineRequest, EngineTimeout
from workers.engines.http import count_prompts, with_fields
from workers.engines.openai import OpenAIEngine

REQUEST = EngineRequest(
    job_id=1,
    endpoint="/v1/chat/completions",
    body=b'{"model":"tiny","messages":[]}',
    salt="ours",
    priority=7,
    prefix_key=b"",
    prompt_tokens=200,
    expected_output_tokens=1,
    timeout_seconds=10,
)


def engine_at(url: str, settings: Settings, model: str = "tiny", **options: float) -> OpenAIEngine:
    instance = Instance(name="one", engine="openai", model=model, url=url, options=tuple(options.items()))
    return OpenAIEngine(instance, Model(name=model), settings)


async def attach(server: FakeServer, settings: Settings) -> tuple[OpenAIEngine, EngineFacts]:
    engine = engine_at(server.url, settings)
    return engine, await engine.start()


@pytest.mark.parametrize(
    ("mode", "salt", "priority", "sent"),
    [
        ("honours", True, True, {"cache_salt": "ours", "priority": 7}),
        ("refuses", False, False, {}),
        ("ignores", False, True, {"priority": 7}),
    ],
)
async def test_only_what_is_honoured_is_sent(
    settings: Settings, mode: str, salt: bool, priority: bool, sent: dict[str, object]
) -> None:
    with serving(mode) as server:
        engine, facts = await attach(server, settings)
        assert (facts.honours_salt, facts.honours_priority) == (salt, priority)
        assert facts.reports_cached_tokens
        assert facts.max_model_len == 2048
        await engine.submit(REQUEST)
        last = server.requests[-1]
        assert last == {"model": "tiny", "messages": [], **sent}
        assert await engine.tokenize(REQUEST.endpoint, REQUEST.body) is None
        await engine.stop(0)


async def test_a_refusal_is_the_engines_answer(settings: Settings) -> None:
    with serving("honours") as server:
        engine, _ = await attach(server, settings)
        server.status = 422
        reply = await engine.submit(REQUEST)
        assert isinstance(reply, EngineReply)
        assert (reply.status_code, reply.usage.prompt_tokens) == (422, None)
        await engine.stop(0)


async def test_a_slow_answer_is_a_timeout_and_a_dead_server_is_gone(settings: Settings) -> None:
    with serving("honours") as server:
        engine, _ = await attach(server, settings)
        server.seconds = 5
        quick = EngineRequest(
            **{name: getattr(REQUEST, name) for name in EngineRequest.__dataclass_fields__} | {"timeout_seconds": 0.05}
        )
        with pytest.raises(EngineTimeout):
            await engine.submit(quick)
    with pytest.raises(EngineGone):
        await engine.submit(REQUEST)
    await engine.stop(0)


async def test_options_say_what_a_server_does_not(settings: Settings) -> None:
    with serving("ignores") as server:
        engine = engine_at(server.url, settings, kv_capacity_tokens=5000, block_size=64, max_num_seqs=3)
        facts = await engine.start()
        assert (facts.kv_capacity_tokens, facts.block_size, facts.max_num_seqs) == (5000, 64, 3)
        await engine.stop(0)


async def test_what_cannot_be_attached_to_is_named(settings: Settings) -> None:
    with pytest.raises(EngineFailed, match=r"\[instances\.one\] url: .* does not answer"):
        await engine_at(f"http://127.0.0.1:{free_port()}", settings).start()
    with serving("honours") as server, pytest.raises(EngineFailed, match="serves tiny, not other"):
        await engine_at(server.url, settings, model="other").start()


async def test_no_message_holds_the_password_of_a_url(settings: Settings) -> None:
    port = free_port()
    url = f"http://user:se%40cret@127.0.0.1:{port}/v1?key=hidden"
    with pytest.raises(EngineFailed, match=rf"url: http://127\.0\.0\.1:{port}/v1 does not answer"):
        await engine_at(url, settings).start()
    with serving("honours") as server:
        address = server.url.removeprefix("http://")
        with pytest.raises(EngineFailed, match=rf"model: http://{address} serves tiny, not other") as caught:
            await engine_at(f"http://user:secret@{address}", settings, model="other").start()
        assert "secret" not in str(caught.value)
    with pytest.raises(EngineFailed, match="url: //here/v1 does not answer"):
        await engine_at("user:secret@here/v1", settings).start()


async def test_a_url_that_is_none_is_said_to_be_so(settings: Settings) -> None:
    for url in ("http://[::1", "http://127.0.0.1:port"):
        with pytest.raises(EngineFailed, match=r"\[instances\.one\] url is no URL"):
            await engine_at(url, settings).start()


async def test_an_engine_says_whether_it_lives(settings: Settings) -> None:
    with serving("honours") as server:
        engine, _ = await attach(server, settings)
        assert await engine.is_alive()
        server.die()
        assert not await engine.is_alive()
    assert not await engine.is_alive()
    await engine.stop(0)


async def test_what_is_no_json_has_no_tokens_and_is_one_prompt(settings: Settings) -> None:
    with serving("honours") as server:
        engine, _ = await attach(server, settings)
        server.tokenize = b"<html>"
        assert await engine.tokenize(REQUEST.endpoint, REQUEST.body) is None
        server.tokenize = b"[1, 2]"
        assert await engine.tokenize(REQUEST.endpoint, REQUEST.body) is None
        server.tokenize = b'{"tokens": [1, 2]}'
        assert await engine.tokenize(REQUEST.endpoint, REQUEST.body) == [1, 2]
        assert await engine.tokenize(REQUEST.endpoint, b"{") is None
        await engine.stop(0)
    assert count_prompts("/v1/completions", b"{") == 1
    assert count_prompts("/v1/completions", b"[]") == 1


@pytest.mark.parametrize("answer", [b"", b"null", b"[]", b"<html>", b"\xff"])
async def test_a_success_without_a_json_object_is_no_success(settings: Settings, answer: bytes) -> None:
    with serving("honours") as server:
        engine, _ = await attach(server, settings)
        server.answer = answer
        reply = await engine.submit(REQUEST)
        await engine.stop(0)
    assert reply.status_code == 502
    assert b"bad_engine_answer" in reply.body


@pytest.mark.parametrize("body", [b"{}", b'{"n": 12345678901234567890123}', b'{"a": "\\ud800"} '])
def test_our_fields_leave_the_clients_bytes_alone(body: bytes) -> None:
    sent = with_fields(body, {"priority": 7})
    assert sent.startswith(body.rstrip()[:-1])
    assert json.loads(sent)["priority"] == 7
    assert with_fields(body, {}) == body
