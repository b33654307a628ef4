"""Finding out, with real requests, what an engine honours: our salt, our priority, cached tokens in usage."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import orjson

from service.core.model import Endpoint
from service.core.usage import read_usage
from workers.engines.http import EngineHttp

# Long enough to fill a block of 128 tokens, the largest default in use, and short on a CPU (0.5 s each).
_PROBE_WORDS = 200
_PROBE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was seen. `honours_salt` is True only where two salts were seen not to share."""

    honours_salt: bool
    honours_priority: bool
    reports_cached_tokens: bool


async def probe(http: EngineHttp, model: str, endpoints: tuple[Endpoint, ...]) -> Probed:
    """Ask one prompt plain and again, then under a salt, again, and under another. Raises EngineGone, EngineTimeout."""
    endpoint = next((item for item in (Endpoint.CHAT, Endpoint.COMPLETIONS) if item in endpoints), Endpoint.EMBEDDINGS)
    salts = [secrets.token_hex(16) for _ in range(2)]

    async def ask(nonce: str, **fields: object) -> tuple[int, int | None]:
        status, body = await http.post(endpoint, _body(endpoint, model, nonce), fields, _PROBE_SECONDS)
        return status, read_usage(body).cached_tokens

    nonce = secrets.token_hex(8)
    first_status, _ = await ask(nonce, cache_salt=salts[0])
    _, again = await ask(nonce, cache_salt=salts[0])
    _, other = await ask(nonce, cache_salt=salts[1])
    priority_status, _ = await ask(nonce, cache_salt=salts[0], priority=1)
    if first_status != 200:  # the field is refused: ask the rest without it
        await ask(nonce)
        _, again = await ask(nonce)
        priority_status, _ = await ask(nonce, priority=1)
    reports = again is not None and again > 0
    return Probed(
        honours_salt=first_status == 200 and reports and not other,
        honours_priority=priority_status == 200,
        reports_cached_tokens=reports,
    )


def _body(endpoint: Endpoint, model: str, nonce: str) -> bytes:
    text = f"{nonce} " + " ".join(f"probe {number}" for number in range(_PROBE_WORDS // 2))
    if endpoint is Endpoint.CHAT:
        messages = [{"role": "user", "content": text}]
        return orjson.dumps({"model": model, "messages": messages, "max_tokens": 1, "temperature": 0})
    if endpoint is Endpoint.COMPLETIONS:
        return orjson.dumps({"model": model, "prompt": text, "max_tokens": 1, "temperature": 0})
    return orjson.dumps({"model": model, "input": text})
