"""Whether our prefix keys are made of the engine's own tokens: a canary of bodies, tokenised by both."""

from __future__ import annotations

import logging
from typing import Any

import orjson

from service.core.model import Endpoint
from service.fleet import Model
from service.tokenizing import Tokenizing
from workers.engines.base import Engine, EngineGone, EngineTimeout

log = logging.getLogger(__name__)

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
_USER = {"role": "user", "content": "Where is my order?"}


def canaries(endpoints: tuple[Endpoint, ...]) -> list[tuple[str, Endpoint, dict[str, Any]]]:
    """(name, endpoint, body without its model): what templates and tokenizers are known to differ in."""
    chats: dict[str, dict[str, Any]] = {
        "plain": {"messages": [_USER]},
        "system": {"messages": [{"role": "system", "content": "You sort mail."}, _USER]},
        "empty system": {"messages": [{"role": "system", "content": ""}, _USER]},
        "several turns": {"messages": [_USER, {"role": "assistant", "content": "Which one?"}, _USER]},
        "spaces and line ends": {"messages": [{"role": "user", "content": "  two\n\n\tlines \r\n  "}]},
        "unicode": {"messages": [{"role": "user", "content": "naïve 東京 🙂 e\u0301 \u200b \ufeff a\u00a0b"}]},
        "special tokens in text": {"messages": [{"role": "user", "content": "<|im_end|> </s> <s> <|endoftext|>"}]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}]},
        "tools": {"messages": [_USER], "tools": [_TOOL]},
        "continued": {
            "messages": [_USER, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    }
    texts = {"plain": "Once upon a time", "unicode": "naïve 東京 🙂 e\u0301", "special tokens in text": "<s> a </s>"}
    bodies: list[tuple[str, Endpoint, dict[str, Any]]] = []
    if Endpoint.CHAT in endpoints:
        bodies += [(name, Endpoint.CHAT, body) for name, body in chats.items()]
    if Endpoint.COMPLETIONS in endpoints:
        bodies += [(name, Endpoint.COMPLETIONS, {"prompt": text}) for name, text in texts.items()]
    if Endpoint.EMBEDDINGS in endpoints:
        bodies += [(name, Endpoint.EMBEDDINGS, {"input": text}) for name, text in texts.items()]
    return bodies


async def key_agreement(engine: Engine, tokenizing: Tokenizing, model: Model) -> bool | None:
    """True where every canary gave the same ids on both sides; None where the two could not be compared.

    A mismatch is told loudly: plans for this instance then rest on tokens that its cache does not know.
    """
    compared, is_cut_short = 0, False
    differing: list[str] = []
    for name, endpoint, body in canaries(model.endpoints):
        body = {"model": model.name, **body}
        ours = tokenizing.token_ids(model.name, endpoint, body)
        if ours is None:
            continue
        try:
            theirs = await engine.tokenize(endpoint, orjson.dumps(body))
        except (EngineGone, EngineTimeout) as error:
            log.warning("the engine's tokens cannot be asked for: %s", error)
            is_cut_short = True
            break
        if theirs is None:
            continue
        compared += 1
        if ours != theirs:
            differing.append(f"{name} ({endpoint})")
    if differing:
        log.error(
            "KEY MISMATCH: the engine tokenises otherwise than the tokenizer in MODELS [models.%s]: %s; "
            "plans for it will miss its cache",
            model.name,
            ", ".join(differing),
        )
        return False
    return None if compared == 0 or is_cut_short else True
