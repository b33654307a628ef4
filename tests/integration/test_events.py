"""Server-sent events as engines write them: cut anywhere, in either line ending, with errors among them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from stream_script import HELLO, TEXT, USAGE

from service.core.model import Endpoint
from workers.engines.base import EngineGone, EngineReply
from workers.engines.events import relay_answer, split_events, streaming_fields


class Sink:
    def __init__(self) -> None:
        self.events: list[str] = []

    async def send(self, event: str) -> None:
        self.events.append(event)


async def pieces(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


async def relayed(raw: bytes, size: int = 7) -> tuple[list[str], EngineReply]:
    sink = Sink()
    reply = await relay_answer(pieces(raw, size), Endpoint.CHAT, sink)
    return sink.events, reply


@pytest.mark.parametrize("size", [1, 2, 3, 50, 10_000])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
async def test_events_are_cut_at_blank_lines_alone(size: int, line_end: str) -> None:
    raw = ": a comment\n\n" + "\n\n".join(f"id: {number}\n{event}" for number, event in enumerate(HELLO)) + "\n\n\n"
    found = [event async for event in split_events(pieces(raw.replace("\n", line_end).encode(), size))]
    assert found == [f"id: {number}\n{event}" for number, event in enumerate(HELLO)]


@pytest.mark.parametrize("end", ["data: [DONE]\n\ndata: late\n\n", "data:[DONE]\n\n", ""])
async def test_an_answer_is_whole_with_its_last_word_or_when_every_choice_has_ended(end: str) -> None:
    raw = "".join(f"{event}\n\n" for event in HELLO) + end
    events, reply = await relayed(raw.encode())
    assert events == HELLO
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == TEXT
    assert json.loads(reply.body)["usage"] == USAGE
    assert (reply.status_code, reply.usage.cached_tokens) == (200, 8)


async def test_an_engine_that_goes_silent_in_the_middle_is_gone() -> None:
    with pytest.raises(EngineGone):
        await relayed("".join(f"{event}\n\n" for event in HELLO[:3]).encode())
    with pytest.raises(EngineGone):
        await relayed(b"")
    with pytest.raises(EngineGone, match="does not end"):
        await relayed(b"data: " + b"x" * (33 * 2**20), 2**20)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"error": {"message": "no", "code": 400}}, 400),
        ({"error": {"message": "no", "code": "bad"}}, 500),
        ({"error": "no"}, 500),
        ({"object": "error", "message": "no", "code": 503}, 503),
        ({"error": {"message": "no", "code": True}}, 500),
    ],
)
async def test_an_error_as_an_event_is_the_answer(error: object, status: int) -> None:
    raw = f"{HELLO[0]}\n\ndata: {json.dumps(error)}\n\ndata: [DONE]\n\n"
    events, reply = await relayed(raw.encode())
    assert events == HELLO[:1]
    assert (reply.status_code, json.loads(reply.body)) == (status, error)


def test_the_clients_other_options_stay() -> None:
    assert streaming_fields(b'{"stream_options": {"include_usage": false, "x": 1}}') == {
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
    }
    assert streaming_fields(b"[]")["stream_options"] == {"include_usage": True}
