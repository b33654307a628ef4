"""Prefix keys and token counts of requests: chat template, the model's own tokenizer, then `service.core.prefix`.

Where a model has no tokenizer, or its template refuses a body, the key is made of bytes of a canonical rendering
(kind "bytes"): such a job shares nothing with keys of tokens, and loses only its place in the order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tokenizers import Tokenizer

from service.core import prefix
from service.core.model import Endpoint
from service.errors import ModelMissing
from service.fleet import Model, Models
from service.templating import TEMPLATE_FAILURES, ChatTemplate, load_chat_template, serves_chat

KeyKind = Literal["tokens", "bytes"]

_DEFAULT_OUTPUT_TOKENS = 256
_LONGEST_PREDICTION = 4  # times the default


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """What decides a key: the model as the request names it (alias and adapter too), and the tenant's salt."""

    model: str
    endpoint: str
    body: Mapping[str, Any]
    salt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """`output_tokens` is predicted: the limit that the body sets, up to 4 times the default, which it is where the
    body sets none; 0 for embeddings."""

    prefix_key: bytes
    prompt_tokens: int
    output_tokens: int
    kind: KeyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One prompt of a request: text still to be encoded, or the token ids themselves."""

    text: str | None = None
    ids: tuple[int, ...] = ()
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFiles:
    tokenizer: Any
    template: ChatTemplate | None


class Tokenizing:
    """Keys for every served model. Files are read at first use and kept; threads share one."""

    def __init__(self, models: Models, *, default_output_tokens: int = _DEFAULT_OUTPUT_TOKENS) -> None:
        self._models = models
        self._default_output_tokens = default_output_tokens
        self._files: dict[str, _ModelFiles | None] = {}
        self._lock = threading.Lock()

    def key(self, model: str, endpoint: str, body: Mapping[str, Any], salt: bytes) -> Keyed:
        """The key of one request."""
        return self.keys([KeyRequest(model=model, endpoint=endpoint, body=body, salt=salt)])[0]

    def keys(self, requests: Sequence[KeyRequest]) -> list[Keyed]:
        """The keys of `requests`, in their order; texts of one model are encoded together, on every core.

        A request with several prompts (completions, embeddings) is keyed by its first; its prompt_tokens are the sum.
        """
        prompts = [self._prompts(request) for request in requests]
        ids = self._encode(requests, prompts)
        return [
            self._keyed_by_bytes(request) if found is None else self._keyed(request, found)
            for request, found in zip(requests, ids, strict=True)
        ]

    def token_ids(self, model: str, endpoint: str, body: Mapping[str, Any]) -> list[int] | None:
        """Ids of the (first) prompt, to compare with an engine's own; None where only bytes are to be had."""
        request = KeyRequest(model=model, endpoint=endpoint, body=body, salt=b"")
        (found,) = self._encode([request], [self._prompts(request)])
        return None if found is None else list(found[0])

    def _prompts(self, request: KeyRequest) -> list[_Prompt] | None:
        files = self._files_of(request.model)
        if files is None:
            return None
        try:
            return _prompts_of(request.endpoint, request.body, files.template)
        except TEMPLATE_FAILURES:
            return None  # the engine will refuse it, or it holds media; its key is made of bytes

    def _encode(
        self, requests: Sequence[KeyRequest], prompts: Sequence[list[_Prompt] | None]
    ) -> list[list[Sequence[int]] | None]:
        """Token ids of every prompt of every request; None where there are no prompts."""
        found: list[list[Sequence[int]] | None] = [
            None if each is None else [prompt.ids for prompt in each] for each in prompts
        ]
        texts = [
            (requests[place].model, prompt.add_special_tokens, place, number, prompt.text)
            for place, each in enumerate(prompts)
            for number, prompt in enumerate(each or ())
            if prompt.text is not None
        ]
        texts.sort(key=lambda item: item[:4])
        for (model, special), group in groupby(texts, key=lambda item: item[:2]):
            batch = list(group)
            files = self._files_of(model)
            if files is None:
                continue
            encodings = files.tokenizer.encode_batch_fast([item[4] for item in batch], add_special_tokens=special)
            for (_, _, place, number, _), encoding in zip(batch, encodings, strict=True):
                slots = found[place]
                if slots is not None:
                    slots[number] = _truncated(encoding.ids, requests[place].body)
        return found

    def _keyed(self, request: KeyRequest, ids: Sequence[Sequence[int]]) -> Keyed:
        return Keyed(
            prefix_key=prefix.prefix_key(ids[0], self._root(request, "tokens")) if ids else b"",
            prompt_tokens=sum(map(len, ids)),
            output_tokens=self._output_tokens(request),
            kind="tokens",
        )

    def _keyed_by_bytes(self, request: KeyRequest) -> Keyed:
        data = _canonical(request.body)
        return Keyed(
            prefix_key=prefix.prefix_key_bytes(data, self._root(request, "bytes")),
            prompt_tokens=prefix.tokens_of_bytes(len(data)),
            output_tokens=self._output_tokens(request),
            kind="bytes",
        )

    def _root(self, request: KeyRequest, kind: KeyKind) -> bytes:
        model = self._models.resolve(request.model) or Model(name=request.model)
        return prefix.root_digest(
            model=model.name,
            revision=model.revision,
            adapter=request.model if request.model in model.adapters else None,
            salt=request.salt,
            kind=kind,
        )

    def _output_tokens(self, request: KeyRequest) -> int:
        """A prediction, not the limit that the engine gets: limits are often set far above what is ever written."""
        if request.endpoint == Endpoint.EMBEDDINGS:
            return 0
        for name in ("max_completion_tokens", "max_tokens"):
            limit = request.body.get(name)
            if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
                return min(limit, _LONGEST_PREDICTION * self._default_output_tokens)
        return self._default_output_tokens

    def _files_of(self, name: str) -> _ModelFiles | None:
        """Raises ModelMissing where MODELS names a tokenizer that cannot be read."""
        model = self._models.resolve(name)
        if model is None or model.tokenizer is None:
            return None
        with self._lock:
            if model.name not in self._files:
                self._files[model.name] = _load(model)
            return self._files[model.name]


def _load(model: Model) -> _ModelFiles:
    assert model.tokenizer is not None
    path = model.tokenizer / "tokenizer.json"
    try:
        # Not from_file: it raises a bare Exception for a missing file.
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
        template = load_chat_template(model.tokenizer)
    except (OSError, ValueError, *TEMPLATE_FAILURES) as error:
        raise ModelMissing(f"({model.name}: {path.parent} holds no readable tokenizer)") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _ModelFiles(tokenizer=tokenizer, template=template)


def _prompts_of(endpoint: str, body: Mapping[str, Any], template: ChatTemplate | None) -> list[_Prompt]:
    """The prompts of a body with the special tokens that vLLM would add. Raises one of TEMPLATE_FAILURES."""
    if serves_chat(endpoint, body):
        if template is None:
            raise ValueError("the model has no chat template")
        text = template.render(body, add_generation_prompt=endpoint == Endpoint.CHAT)
        return [_text_prompt(text, bool(body.get("add_special_tokens", False)))]
    if body.get("prompt_embeds") is not None:
        raise ValueError("embeddings in place of a prompt have no tokens")
    value = body["input" if endpoint == Endpoint.EMBEDDINGS else "prompt"]
    special = bool(body.get("add_special_tokens", True))
    if isinstance(value, str):
        return [_text_prompt(value, special)]
    if all(isinstance(item, int) for item in value):
        return [_Prompt(ids=_ids(value))]
    return [_text_prompt(item, special) if isinstance(item, str) else _Prompt(ids=_ids(item)) for item in value]


def _text_prompt(text: str, special: bool) -> _Prompt:
    text.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate: no tokenizer takes it
    return _Prompt(text=text, add_special_tokens=special)


def _ids(value: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(item, int) and 0 <= item < 2**32 for item in value):
        raise ValueError("a prompt is a string or token ids")
    return tuple(value)


def _truncated(ids: Sequence[int], body: Mapping[str, Any]) -> Sequence[int]:
    """vLLM keeps the last `truncate_prompt_tokens` (the first, where truncation_side is "right")."""
    limit = body.get("truncate_prompt_tokens")
    if not isinstance(limit, int) or limit <= 0 or limit >= len(ids):
        return ids
    return ids[:limit] if body.get("truncation_side") == "right" else ids[-limit:]


def _canonical(body: Mapping[str, Any]) -> bytes:
    """What a body's prompt is made of, in the order in which templates print it: tools, documents, then messages."""
    first = [body[name] for name in ("tools", "documents", "chat_template_kwargs") if body.get(name)]
    text = _json(first) if first else ""
    for name in ("messages", "prompt", "input"):
        value = body.get(name)
        for item in value if isinstance(value, list) else [value]:
            text += _canonical_item(item)
    return text.encode("utf-8", "surrogatepass")


def _canonical_item(item: Any) -> str:
    if item is None:
        return ""
    if not isinstance(item, dict):
        return item if isinstance(item, str) else _json(item)
    content = item.get("content")
    rest = {name: value for name, value in item.items() if name not in ("role", "content")}
    text = content if isinstance(content, str) else _json(content)
    return f"{item.get('role')}\n{text}\n{_json(rest) if rest else ''}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
