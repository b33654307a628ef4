"""Where the server is and which key to send: arguments first, then the environment, which only this file reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trunkline.errors import ConfigError

DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"
# The first that is set and not empty counts; the OpenAI names let a producer switch by installing this package only.
BASE_URL_NAMES = ("TRUNKLINE_BASE_URL", "OPENAI_BASE_URL")
API_KEY_NAMES = ("TRUNKLINE_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """An address that ends without a slash, and a key or None (a server on loopback may need none)."""

    base_url: str
    api_key: str | None = field(repr=False)


def read_config(
    base_url: str | None = None, api_key: str | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Raises ConfigError where the address is no http address, or the key cannot be a header."""
    environ = os.environ if environ is None else environ
    url = (base_url or _first(environ, BASE_URL_NAMES) or DEFAULT_BASE_URL).strip().rstrip("/")
    key = (api_key or _first(environ, API_KEY_NAMES) or "").strip()
    _check_address(url)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("The API key holds characters that no key has; check TRUNKLINE_API_KEY.")
    return Config(base_url=url, api_key=key or None)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no address of a server; TRUNKLINE_BASE_URL looks like {DEFAULT_BASE_URL}.")
