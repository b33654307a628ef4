"""The whole answer out of the chunks of a streamed one."""

from __future__ import annotations

import json
from typing import Any

from service.core.assembly import Assembly
from service.core.model import Endpoint

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "m", "system_fingerprint": None}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def whole(*chunks: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> dict[str, Any]:
    assembly = Assembly(endpoint=endpoint)
    for chunk in chunks:
        assembly.add(chunk)
    return dict(json.loads(assembly.body()))


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**HEAD, "choices": list(choices), **more}


def choice(index: int = 0, reason: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def test_texts_grow_and_names_do_not() -> None:
    made = whole(
        chunk(choice(role="assistant", content="")),
        chunk(choice(role="assistant", content="He", reasoning_content="think")),
        chunk(choice(content="y", reasoning_content="ing", refusal=None)),
        chunk(choice(reason="stop"), system_fingerprint="fp"),
        chunk(usage=USAGE),
    )
    assert made == {
        "id": "c1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hey", "reasoning_content": "thinking", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_several_choices_come_interleaved() -> None:
    made = whole(
        chunk(choice(1, content="x")),
        chunk(choice(0, content="a"), choice(1, content="y")),
        chunk(choice(1, "length")),
        chunk(choice(0, "stop", content="b")),
    )
    said = [(it["index"], it["message"]["content"], it["finish_reason"]) for it in made["choices"]]
    assert said == [(0, "ab", "stop"), (1, "xy", "length")]


def test_logprobs_are_put_one_behind_the_other() -> None:
    first, second = ({"content": [{"token": token, "logprob": -0.5}], "refusal": None} for token in "ab")
    made = whole(chunk(choice(content="a", logprobs=first)), chunk(choice(content="b", logprobs=second)))
    assert made["choices"][0]["logprobs"]["content"] == [*first["content"], *second["content"]]
    lists = [{"tokens": [token], "token_logprobs": [-1.0], "text_offset": [place]} for place, token in enumerate("ab")]
    chunks = [chunk({"index": 0, "text": "t", "logprobs": it}) for it in lists]
    made = whole(*chunks, endpoint=Endpoint.COMPLETIONS)
    assert made["choices"][0] == {
        "index": 0,
        "text": "tt",
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "text_offset": [0, 1]},
        "finish_reason": None,
    }
    assert made["object"] == "text_completion"


def test_tool_calls_are_put_together_by_their_index() -> None:
    def call(index: int | None, arguments: str | None, **names: Any) -> dict[str, Any]:
        place = {} if index is None else {"index": index}
        return {**place, "function": {"arguments": arguments, "name": names.pop("name", None)}, **names}

    made = whole(
        chunk(choice(content="", tool_calls=[call(0, "", id="c1", type="function", name="f")])),
        chunk(choice(tool_calls=[call(0, '{"a"', id="c1", type="function", name="f")])),
        chunk(choice(tool_calls=[call(1, "{}", id="c2", type="function", name="g"), call(0, ":1}")])),
        chunk(choice(reason="tool_calls")),
    )
    message = made["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"arguments": '{"a":1}', "name": "f"}},
        {"id": "c2", "type": "function", "function": {"arguments": "{}", "name": "g"}},
    ]
    alone = whole(
        chunk(choice(tool_calls=[call(None, "{", id="c", name="f")])), chunk(choice(tool_calls=[call(None, "}")]))
    )
    assert alone["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_it_is_finished_when_every_choice_is() -> None:
    assembly = Assembly(endpoint=Endpoint.CHAT)
    assert not assembly.is_finished
    assembly.add(chunk(choice(0, "stop"), choice(1, content="x")))
    assert not assembly.is_finished
    assembly.add(chunk(choice(1, "length")))
    assert assembly.is_finished


def test_what_is_odd_is_survived() -> None:
    made = whole({"choices": None}, {"choices": [1, {"delta": {"content": "a\ud800 \u2028"}, "stop_reason": 7}]}, {})
    assert made["choices"][0]["message"]["content"] == "a\ud800 \u2028"
    assert made["choices"][0]["stop_reason"] == 7
    assert made["id"] is None
