"""Chat messages and tools as a template sees them: vLLM's normalisation of a request (`vllm.renderers.chat_utils`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_ATTRIBUTION_HEADER = "x-anthropic-billing-header"  # vLLM drops this line of a system message

Message = dict[str, Any]


def plain_messages(messages: Any, *, content_as_list: bool) -> list[Message]:
    """Messages with only the fields that reach a template; content a string, or a list of text parts.

    Raises ValueError, TypeError or LookupError on what is no text (images, audio) and on what vLLM refuses.
    """
    plain = [_message(message, content_as_list) for message in messages]
    for message in plain:
        if "tool_calls" in message:
            _open_arguments(message)
    return plain


def _message(message: Mapping[str, Any], content_as_list: bool) -> Message:
    role = message["role"]
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_attribution(parts)
    texts = [text for text in map(_text, parts) if text is not None]
    plain: Message = {"role": role, "content": "\n".join(texts)}
    if content_as_list and role != "tool":
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if message.get("tool_calls") is not None:
            plain["tool_calls"] = list(message["tool_calls"])
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            plain["reasoning"] = plain["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        plain["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if role == "developer":
        plain["tools"] = message.get("tools")
    return plain


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else list(content)


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    field = _TEXT_FIELDS[part["type"]]  # KeyError: an image, audio or an unknown kind
    value = part.get(field)
    if value is not None and not isinstance(value, str):
        raise TypeError("the text of a part is a string")
    return value


def _without_attribution(parts: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text")
        if not (isinstance(text, str) and text.startswith(_ATTRIBUTION_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest)
    return kept


def _open_arguments(message: Message) -> None:
    """Tool call arguments as an object: OpenAI sends a JSON string, templates expect a mapping."""
    if not message["tool_calls"]:
        del message["tool_calls"]
        return
    calls = []
    for call in message["tool_calls"]:
        if call.get("type", "function") != "function":
            raise ValueError("tool calls are functions")
        calls.append({**call, "function": {**call["function"], "arguments": _arguments(call["function"])}})
    message["tool_calls"] = calls


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return {}  # so does vLLM: a malformed call in the history must not end the conversation
    return given if isinstance(given, dict) else {}


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools in the field order and with the nulls of vLLM's request model, as `tojson` then prints them."""
    if tools is None:
        return None
    if not tools:
        raise ValueError("an empty list of tools is refused")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"]
    function = {"name": given["name"], "description": given.get("description"), "parameters": given.get("parameters")}
    deferred = tool.get("defer_loading")
    for name, value in (("strict", given.get("strict")), ("defer_loading", given.get("defer_loading", deferred))):
        if value is not None:
            function[name] = value
    plain = {"type": tool.get("type", "function"), "function": function}
    return plain if deferred is None else {**plain, "defer_loading": deferred}


def without_developer(messages: list[Message]) -> list[Message]:
    """For a template that knows no developer role: such messages become system ones, merged into the first place."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    converted = [
        {name: value for name, value in {**message, "role": "system"}.items() if name != "tools"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [place for place, message in enumerate(converted) if message["role"] == "system"]
    if systems == [0]:
        return converted
    texts = [_joined(converted[place]["content"]) for place in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
