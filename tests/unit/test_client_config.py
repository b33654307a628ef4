"""trunkline.config: arguments, then our names, then OpenAI's, then loopback; the server tolerates the names."""

from __future__ import annotations

import pytest

from service.settings import read_settings
from trunkline.config import DEFAULT_BASE_URL, read_config
from trunkline.errors import ConfigError

OURS = {"TRUNKLINE_BASE_URL": "http://ours:1/v1", "TRUNKLINE_API_KEY": "ours"}
OPENAI = {"OPENAI_BASE_URL": "https://openai:2/v1/", "OPENAI_API_KEY": "theirs"}


@pytest.mark.parametrize(
    ("arguments", "environ", "url", "key"),
    [
        ((None, None), {}, DEFAULT_BASE_URL, None),
        ((None, None), OPENAI, "https://openai:2/v1", "theirs"),
        ((None, None), {**OPENAI, **OURS}, "http://ours:1/v1", "ours"),
        ((None, None), {**OPENAI, "TRUNKLINE_BASE_URL": ""}, "https://openai:2/v1", "theirs"),
        (("http://given:3/v1", "given"), {**OPENAI, **OURS}, "http://given:3/v1", "given"),
    ],
)
def test_the_first_that_is_set_counts(
    arguments: tuple[str | None, str | None], environ: dict[str, str], url: str, key: str | None
) -> None:
    config = read_config(*arguments, environ)
    assert (config.base_url, config.api_key) == (url, key)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://h/v1?a=b"]
)
def test_no_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="TRUNKLINE_BASE_URL"):
        read_config(url, None, {})


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(None, key, {})
    assert key not in str(raised.value)


def test_the_key_is_not_in_the_repr() -> None:
    assert "ours" not in repr(read_config("http://h/v1", None, OURS))


def test_the_server_tolerates_the_producers_names() -> None:
    read_settings(OURS)
