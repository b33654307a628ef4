"""Where this process finds Postgres, the broker and the shared secret: settings first, else the state folder."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from service.errors import SettingError
from service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Ports and passwords of the embedded servers: drawn once per state folder, so every command finds them."""

    postgres_port: int
    postgres_password: str
    valkey_port: int
    valkey_password: str
    secret_key: str

    @property
    def database_url(self) -> str:
        return f"postgresql://trunkline:{self.postgres_password}@127.0.0.1:{self.postgres_port}/trunkline"

    @property
    def broker_url(self) -> str:
        return f"redis://:{self.valkey_password}@127.0.0.1:{self.valkey_port}/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """What a process needs to take part."""

    database_url: str
    broker_url: str
    secret_key: str


def embedded_path(settings: Settings) -> Path:
    return settings.state_folder / "embedded.json"


def load_embedded(settings: Settings) -> Embedded | None:
    """What the embedded servers of this state folder use; None where none was ever started."""
    path = embedded_path(settings)
    try:
        return Embedded(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise SettingError(f"{path} cannot be read; remove it or mend TRUNKLINE_STATE.") from error


def save_embedded(settings: Settings, embedded: Embedded) -> None:
    """Written for its owner alone, whole or not at all."""
    path = embedded_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    record = {name: getattr(embedded, name) for name in Embedded.__dataclass_fields__}
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(record, file)
    draft.replace(path)


def new_secret() -> str:
    return secrets.token_urlsafe(24)


def find_connections(settings: Settings) -> Connections:
    """Raises SettingError, naming the variable, where neither a setting nor an embedded server is to be had."""
    embedded = load_embedded(settings)
    database_url = settings.database_url or (embedded.database_url if embedded else None)
    broker_url = settings.broker_url or (embedded.broker_url if embedded else None)
    secret_key = settings.secret_key or (embedded.secret_key if embedded else None)
    hint = "set it, or start `trunkline up`, which brings its own."
    for name, value in (("DATABASE_URL", database_url), ("BROKER_URL", broker_url), ("SECRET_KEY", secret_key)):
        if value is None:
            raise SettingError(f"{name} is not set and {settings.state_folder} holds no embedded server: {hint}")
    assert database_url is not None
    assert broker_url is not None
    assert secret_key is not None
    return Connections(database_url=database_url, broker_url=broker_url, secret_key=secret_key)
