"""The whole answer, put together from the chunks of a streamed one: what the engine would have answered unstreamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from service.core.model import Endpoint

_OBJECTS = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_NAMES = frozenset({"id", "type", "role", "name"})  # said once, some engines say them again: never put together
_LAST = frozenset({"index", "finish_reason", "stop_reason", "matched_stop"})


@dataclass(slots=True)
class _Text:
    """A text that grows."""

    parts: list[str]


@dataclass(slots=True, kw_only=True)
class Assembly:
    """Give it every chunk, in order. Unknown fields are kept: texts and lists grow, else the last word counts."""

    endpoint: Endpoint
    _top: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any]) -> None:
        """One parsed event."""
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._top):
                self._top[name] = value
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                index = choice.get("index")
                place = index if isinstance(index, int) else 0
                _merge(self._choices.setdefault(place, {"index": place}), choice)

    @property
    def is_finished(self) -> bool:
        """Whether every choice that began has said why it ended, and one has begun."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def body(self) -> bytes:
        """The answer as JSON. NaN and Infinity stay as the engine wrote them."""
        choices = [_choice(self._choices[index], self.endpoint) for index in sorted(self._choices)]
        usage = {"usage": self._top["usage"]} if "usage" in self._top else {}
        rest = {name: value for name, value in self._top.items() if name not in ("object", "usage", "id")}
        head = {"id": self._top.get("id"), "object": _OBJECTS[self.endpoint]}
        return json.dumps({**head, **rest, "choices": choices, **usage}, separators=(",", ":")).encode("ascii")


def _choice(choice: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    made = _plain(choice)
    message = made.pop("delta", None) or {}
    if endpoint is Endpoint.CHAT:
        calls = message.pop("tool_calls", None)
        message = {"role": "assistant", "content": None, **message}
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        made = {"index": made.pop("index"), "message": message, **made}
    return {"logprobs": None, "finish_reason": None, **made}


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if value is None:
            into.setdefault(name, None)
        elif name == "tool_calls" and isinstance(value, list):
            into[name] = _with_calls(into.get(name), value)
        else:
            into[name] = _merged(name, into.get(name), value)


def _merged(name: str, had: Any, value: Any) -> Any:
    if name in _LAST or (name in _NAMES and had):
        return had if name in _NAMES else value
    if isinstance(value, str) and name not in _NAMES:
        if isinstance(had, _Text):
            had.parts.append(value)
            return had
        return _Text([value])
    if isinstance(value, list):
        return [*value] if not isinstance(had, list) else _extended(had, value)
    if isinstance(value, dict):
        made = had if isinstance(had, dict) else {}
        _merge(made, value)
        return made
    return value


def _extended(had: list[Any], value: list[Any]) -> list[Any]:
    had.extend(value)
    return had


def _with_calls(had: Any, deltas: list[Any]) -> dict[int, dict[str, Any]]:
    """Tool calls by their index; a delta without one belongs to its place in the list."""
    calls: dict[int, dict[str, Any]] = had if isinstance(had, dict) else {}
    for place, delta in enumerate(deltas):
        if isinstance(delta, dict):
            index = delta.get("index")
            _merge(calls.setdefault(index if isinstance(index, int) else place, {}), delta)
    return calls


def _plain(value: Any, name: str = "") -> Any:
    """Texts joined, tool calls a list in order without their indices."""
    if isinstance(value, _Text):
        return "".join(value.parts)
    if name == "tool_calls" and isinstance(value, dict):
        calls = [_plain(value[index]) for index in sorted(value)]
        return [{key: item for key, item in call.items() if key != "index"} for call in calls]
    if isinstance(value, dict):
        return {key: _plain(item, key) for key, item in value.items()}
    return value
