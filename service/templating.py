"""Chat templates: a request's messages to the string that the engine will tokenise, as vLLM over transformers does it.

The Jinja environment is that of `transformers.utils.chat_template_utils`; the preparation of messages, tools and
variables is that of `vllm.renderers.chat_utils` and `vllm.renderers.hf` (0.32). Neither is imported: they pull torch.
A test compares both with the originals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.core.model import Endpoint
from service.messages import plain_messages, plain_tools, without_developer
from service.template_format import reads_content_as_list

# What a template may raise on a body that does not suit it.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which transformers uses to mask assistant tokens: here its body, unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 (local time: the engine renders it so)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    source: str
    compiled: jinja2.Template
    variables: frozenset[str]
    content_as_list: bool


class ChatTemplate:
    """The chat template of one model folder."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`templates` by name; "default" is used, and "tool_use" for requests with tools where there is one."""
        environment = _environment()
        self._templates = {name: _compile(environment, source) for name, source in templates.items()}
        self._special_tokens = dict(special_tokens)

    def render(self, body: Mapping[str, Any], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a chat body. Raises one of TEMPLATE_FAILURES where the engine would refuse the body too.

        `add_generation_prompt` is the default for a body that does not say (true for chat, false for embeddings).
        """
        if "chat_template" in body:
            raise ValueError("a template in the body is refused")
        variables = self._variables(body, add_generation_prompt)
        tools = variables.pop("tools", None)
        template = self._choose(tools)
        messages = plain_messages(body["messages"], content_as_list=template.content_as_list)
        if not messages:
            raise ValueError("no messages")
        if '"developer"' not in template.source and "'developer'" not in template.source:
            messages = without_developer(messages)
        is_continuing = bool(variables.pop("continue_final_message", False))
        if is_continuing and variables["add_generation_prompt"]:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        known = {name: value for name, value in variables.items() if name in template.variables}
        known = {**self._special_tokens, **known, "messages": messages, "tools": tools}
        known.setdefault("documents", None)
        known["add_generation_prompt"] = variables["add_generation_prompt"]
        if is_continuing:
            return _render_open_ended(template.compiled, known)
        return template.compiled.render(**known)

    def _choose(self, tools: Any) -> _Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError("the model has no default chat template")
        return self._templates["default"]

    def _variables(self, body: Mapping[str, Any], add_generation_prompt: bool) -> dict[str, Any]:
        """`chat_template_kwargs` under what the request says itself, as in vLLM's build_chat_params."""
        given = body.get("chat_template_kwargs") or {}
        if "chat_template" in given or "tokenize" in given:
            raise ValueError("a template in the body is refused")
        said = {
            "add_generation_prompt": body.get("add_generation_prompt", add_generation_prompt),
            "continue_final_message": body.get("continue_final_message", False),
            "documents": body.get("documents"),
            "reasoning_effort": body.get("reasoning_effort"),
        }
        if said["reasoning_effort"] is not None and "enable_thinking" not in given:
            said["enable_thinking"] = said["reasoning_effort"] != "none"
        tools = plain_tools(body.get("tools"))
        return {"tools": tools, **given, **{name: value for name, value in said.items() if value is not None}}


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> _Template:
    tree = environment.parse(source)
    return _Template(
        source=source,
        compiled=environment.from_string(source),
        variables=frozenset(jinja2.meta.find_undeclared_variables(tree)),
        content_as_list=reads_content_as_list(tree),
    )


def _render_open_ended(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The prompt cut off after the last message's text: transformers' render_jinja_template, in the same steps."""
    messages = deepcopy(variables["messages"])
    final = messages[-1]["content"]
    if isinstance(final, list):
        block = next((item for item in reversed(final) if "text" in item), None)
        if block is None:
            raise ValueError("the final message has no text to continue")
        text = block["text"]
        block["text"] = text + _CONTINUE_TAG
    elif isinstance(final, str):
        text = final
        messages[-1]["content"] = text + _CONTINUE_TAG
    else:
        raise ValueError("the final message has no text to continue")
    rendered = template.render(**{**variables, "messages": messages})
    if text.strip() not in rendered or _CONTINUE_TAG.strip() not in rendered:
        raise ValueError("the template drops the final message")
    place = rendered.rindex(_CONTINUE_TAG.strip())
    if rendered[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return rendered[:place]
    return rendered[:place].rstrip()


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, from chat_template.jinja (and chat_templates/) or tokenizer_config.json."""
    config = _json(folder / "tokenizer_config.json")
    templates = dict(_files(folder)) or _configured(config.get("chat_template"))
    if not templates:
        return None
    special = {**_json(folder / "special_tokens_map.json"), **config}
    texts = {name: _token_text(special.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(templates, {name: text for name, text in texts.items() if text is not None})


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    main = folder / "chat_template.jinja"
    if main.is_file():
        yield "default", main.read_text(encoding="utf-8")
    for path in sorted((folder / "chat_templates").glob("*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")


def _configured(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    return {item["name"]: item["template"] for item in value or ()}


def _token_text(value: Any) -> str | None:
    """A special token is a string, or an object with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return document if isinstance(document, dict) else {}


def serves_chat(endpoint: str, body: Mapping[str, Any]) -> bool:
    """Whether the prompt is made by the chat template: chat, and embeddings of messages."""
    return endpoint == Endpoint.CHAT or (endpoint == Endpoint.EMBEDDINGS and "messages" in body)
