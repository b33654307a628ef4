"""Settings from the environment: switches, and that a process started from ours reads what we have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.errors import SettingError
from service.settings import child_environment, describe_settings, read_settings

SWITCH = "TRUNKLINE_WEBHOOKS_ALLOW_PRIVATE"


@pytest.mark.parametrize("raw", ["on", "ON", "true", "True", "yes", "1"])
def test_a_switch_that_is_on(raw: str) -> None:
    assert read_settings({SWITCH: raw}).webhooks_allow_private is True


@pytest.mark.parametrize("raw", ["off", "Off", "false", "False", "no", "0", ""])
def test_a_switch_that_is_off(raw: str) -> None:
    """bool("off") is True: a switch is not parsed so."""
    assert read_settings({SWITCH: raw}).webhooks_allow_private is False


def test_a_switch_that_is_neither() -> None:
    with pytest.raises(SettingError, match=f"{SWITCH} is 'maybe'; on or off was expected"):
        read_settings({SWITCH: "maybe"})


def test_a_child_reads_the_same_settings() -> None:
    ours = replace(read_settings({}), webhooks_allow_private=True, webhooks_retry_seconds=0.5)
    names = {name for name, *_ in describe_settings()}
    environ = {name: value for name, value in child_environment(ours).items() if name in names}
    assert read_settings(environ) == ours


def test_a_relay_must_outwait_two_lost_acknowledgements() -> None:
    with pytest.raises(SettingError, match="TRUNKLINE_RELAY_SILENCE_SECONDS must be at least 3"):
        read_settings({"TRUNKLINE_RELAY_SILENCE_SECONDS": "2.9"})
    assert read_settings({"TRUNKLINE_RELAY_SILENCE_SECONDS": "3"}).relay_silence_seconds == 3.0
