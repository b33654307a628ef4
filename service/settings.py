"""The only reader of the environment. Frozen; a bad or unknown value stops start-up with one sentence."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from service.core.model import PolicyName
from service.errors import SettingError

# Read by trunkline/config.py, the producer's side; a server started from the same shell must not stumble over them.
_CLIENT_NAMES = ("TRUNKLINE_BASE_URL", "TRUNKLINE_API_KEY")


_LEAST_RELAY_SILENCE_SECONDS = 3.0


def _setting(env: str, default: Any, help: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"env": env, "help": help, "secret": secret})


def default_state_folder() -> Path:
    """Root's state must be readable by the user that Postgres runs as, so it is not below /root."""
    if os.geteuid() == 0:
        return Path("/var/lib/trunkline")
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "trunkline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, its environment variable, its default and what it does; docs/settings.md is made from this."""

    database_url: str | None = _setting(
        "DATABASE_URL", None, "Postgres, 15 or newer. Unset: the embedded server.", secret=True
    )
    broker_url: str | None = _setting(
        "BROKER_URL", None, "Redis, Valkey or RabbitMQ. Unset: the embedded server.", secret=True
    )
    store_url: str | None = _setting(
        "STORE_URL", None, "Where files live: a folder, s3://bucket/path or gs://. Unset: a folder in the state folder."
    )
    secret_key: str | None = _setting(
        "SECRET_KEY",
        None,
        "Shared by all hosts; signs cursors and derives secrets. Unset: made once and kept in the state folder.",
        secret=True,
    )
    models_file: Path | None = _setting(
        "MODELS", None, "TOML file of the served models. Unset: models.toml in the state folder."
    )
    instances_file: Path | None = _setting(
        "INSTANCES", None, "TOML file of this host's engine instances. Unset: instances.toml in the state folder."
    )
    state_folder: Path = _setting(
        "TRUNKLINE_STATE",
        None,
        "Embedded servers, model cache, logs, files. Default: ~/.local/state/trunkline, as root /var/lib/trunkline.",
    )
    instance: str | None = _setting("TRUNKLINE_INSTANCE", None, "Name of the instance that a worker process owns.")
    host: str = _setting("TRUNKLINE_HOST", "127.0.0.1", "Address that the API binds.")
    port: int = _setting("TRUNKLINE_PORT", 8000, "Port of the API.")
    flower_port: int = _setting("TRUNKLINE_FLOWER_PORT", 5555, "Port of Flower.")
    flower_auth: str | None = _setting(
        "TRUNKLINE_FLOWER_AUTH", None, "user:password of Flower; needed outside loopback.", secret=True
    )
    log_level: str = _setting("TRUNKLINE_LOG_LEVEL", "INFO", "DEBUG, INFO, WARNING or ERROR.")
    max_file_bytes: int = _setting("TRUNKLINE_MAX_FILE_BYTES", 200_000_000, "Largest upload.")
    max_line_bytes: int = _setting("TRUNKLINE_MAX_LINE_BYTES", 8 * 2**20, "Longest line of an input file.")
    max_lines: int = _setting("TRUNKLINE_MAX_LINES", 50_000, "Most lines in one batch.")
    max_window_days: int = _setting("TRUNKLINE_MAX_WINDOW_DAYS", 30, "Longest completion_window.")
    max_queued_lines: int = _setting(
        "TRUNKLINE_MAX_QUEUED_LINES", 10_000_000, "Unfinished lines a tenant may have before a create answers 429."
    )
    max_queued_tokens: int = _setting(
        "TRUNKLINE_MAX_QUEUED_TOKENS", 10_000_000_000, "The same for the prompt tokens of those lines."
    )
    default_output_tokens: int = _setting(
        "TRUNKLINE_DEFAULT_OUTPUT_TOKENS", 256, "Predicted answer length of a job that sets no max_tokens."
    )
    lease_seconds: float = _setting(
        "TRUNKLINE_LEASE_SECONDS", 30.0, "A worker that does not renew for this long loses its cohorts."
    )
    heartbeat_seconds: float = _setting(
        "TRUNKLINE_HEARTBEAT_SECONDS", 5.0, "How often a worker renews its leases and learns of cancels."
    )
    stale_boot_seconds: float = _setting(
        "TRUNKLINE_STALE_BOOT_SECONDS", 15.0, "An instance silent for this long gets no new work."
    )
    republish_seconds: float = _setting(
        "TRUNKLINE_REPUBLISH_SECONDS", 10.0, "A message unclaimed for this long by an idle worker is sent again."
    )
    task_lease_seconds: float = _setting(
        "TRUNKLINE_TASK_LEASE_SECONDS", 60.0, "Lease of a piece of control work (intake, export, cancel)."
    )
    sweep_seconds: float = _setting("TRUNKLINE_SWEEP_SECONDS", 5.0, "How often control work is published again.")
    cancel_grace_seconds: float = _setting(
        "TRUNKLINE_CANCEL_GRACE_SECONDS", 600.0, "How long a cancel waits for lines in flight."
    )
    drain_seconds: float = _setting(
        "TRUNKLINE_DRAIN_SECONDS", 20.0, "How long running jobs may take to end when a worker is told to stop."
    )
    job_timeout_seconds: float = _setting(
        "TRUNKLINE_JOB_TIMEOUT_SECONDS", 600.0, "How long an engine may take over one job."
    )
    answer_seconds: float = _setting(
        "TRUNKLINE_ANSWER_SECONDS",
        590.0,
        "How long a call of chat completions, completions or embeddings may wait and run before it is answered 504; a "
        "little less than the 600 s that the openai SDK waits.",
    )
    relay_silence_seconds: float = _setting(
        "TRUNKLINE_RELAY_SILENCE_SECONDS",
        10.0,
        "A streamed answer that no API process has acknowledged for this long is relayed no further; it is recorded.",
    )
    job_tries: int = _setting("TRUNKLINE_JOB_TRIES", 4, "Tries of a job whose engine answers 408, 429 or 5xx.")
    webhooks_retry_seconds: float = _setting(
        "TRUNKLINE_WEBHOOKS_RETRY_SECONDS",
        10.0,
        "When a webhook that failed is sent again; each further wait is 8 times the one before, and 5 tries are made.",
    )
    webhooks_timeout_seconds: float = _setting(
        "TRUNKLINE_WEBHOOKS_TIMEOUT_SECONDS", 15.0, "How long a receiver of webhooks may take to answer."
    )
    webhooks_allow_private: bool = _setting(
        "TRUNKLINE_WEBHOOKS_ALLOW_PRIVATE",
        False,
        "on: webhooks may go to private and loopback addresses; off: only to servers on the internet.",
    )
    engine_start_seconds: float = _setting(
        "TRUNKLINE_ENGINE_START_SECONDS", 900.0, "How long an engine may take to load."
    )
    plan_window_jobs: int = _setting(
        "TRUNKLINE_PLAN_WINDOW_JOBS",
        200_000,
        "Jobs of a tenant and model that are planned at once, and kept in the dispatcher's memory.",
    )
    plan_policy: str = _setting(
        "TRUNKLINE_PLAN_POLICY",
        "prefix",
        "prefix is the planner; round_robin, least_loaded, affinity, cache_aware, prefix_hash and shared_queue are "
        "there to compare it with.",
    )
    dispatch_poll_seconds: float = _setting(
        "TRUNKLINE_DISPATCH_POLL_SECONDS", 1.0, "How often the dispatcher looks when nothing wakes it."
    )
    cohort_jobs: int = _setting("TRUNKLINE_COHORT_JOBS", 512, "Most jobs in one cohort.")
    plans_at_once: int = _setting(
        "TRUNKLINE_PLANS_AT_ONCE", 2, "Batch plans that an API process makes at once, one of each tenant; then 429."
    )
    plan_seconds: float = _setting(
        "TRUNKLINE_PLAN_SECONDS", 600.0, "How long `POST /v1/batches/plan` may take; a file that takes longer is 400."
    )

    def __post_init__(self) -> None:
        if self.state_folder is None:
            object.__setattr__(self, "state_folder", default_state_folder())
        check_settings(self)

    @property
    def store_location(self) -> str:
        return self.store_url or str(self.state_folder / "files")

    @property
    def models_path(self) -> Path:
        return self.models_file or self.state_folder / "models.toml"

    @property
    def instances_path(self) -> Path:
        return self.instances_file or self.state_folder / "instances.toml"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


def check_settings(settings: Settings) -> None:
    """Refuse values that cannot work together, naming the variable."""
    positive = ("port", "flower_port", "max_file_bytes", "max_line_bytes", "max_lines", "plan_window_jobs")
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value < 0 or (value == 0 and (spec.name in positive or spec.name.endswith("_seconds")))):
            raise SettingError(f"{spec.metadata['env']} is {value}; it must be above 0.")
    _check_url("BROKER_URL", settings.broker_url, ("redis://", "rediss://", "amqp://", "amqps://"))
    if settings.heartbeat_seconds * 2 > settings.lease_seconds:
        raise SettingError("TRUNKLINE_HEARTBEAT_SECONDS must be at most half of TRUNKLINE_LEASE_SECONDS.")
    if settings.heartbeat_seconds * 2 > settings.stale_boot_seconds:
        raise SettingError("TRUNKLINE_HEARTBEAT_SECONDS must be at most half of TRUNKLINE_STALE_BOOT_SECONDS.")
    if settings.relay_silence_seconds < _LEAST_RELAY_SILENCE_SECONDS:
        raise SettingError(
            f"TRUNKLINE_RELAY_SILENCE_SECONDS must be at least {_LEAST_RELAY_SILENCE_SECONDS:g}: an API process "
            "acknowledges once a second."
        )
    if settings.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingError("TRUNKLINE_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR.")
    if settings.plan_policy not in tuple(PolicyName):
        raise SettingError(f"TRUNKLINE_PLAN_POLICY must be one of {', '.join(PolicyName)}.")
    if settings.instance is not None and not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", settings.instance):
        raise SettingError("TRUNKLINE_INSTANCE must be lower-case letters, digits, '-' and '_', at most 63.")


def _check_url(name: str, url: str | None, starts: tuple[str, ...]) -> None:
    if url is not None and not url.startswith(starts):
        raise SettingError(f"{name} must start with {' or '.join(starts)}.")


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. Raises SettingError for a bad value or an unknown TRUNKLINE_ name."""
    environ = os.environ if environ is None else environ
    specs = {spec.metadata["env"]: spec for spec in fields(Settings)}
    unknown = sorted(name for name in environ if name.startswith("TRUNKLINE_") and name not in {*specs, *_CLIENT_NAMES})
    if unknown:
        raise SettingError(f"{unknown[0]} is no setting of Trunkline; see docs/settings.md.")
    kinds = _kinds()
    values: dict[str, Any] = {
        spec.name: _parse(env, environ[env], kinds[spec.name])
        for env, spec in specs.items()
        if environ.get(env, "") != ""
    }
    return Settings(**values)


@cache
def _kinds() -> dict[str, type]:
    """Field name -> the type a string is parsed to (the non-None member of an optional)."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(Settings).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[name] = next(member for member in members if member is not type(None))
    return kinds


def _parse(env: str, raw: str, kind: type) -> object:
    try:
        if kind is Path:
            return Path(raw).expanduser().absolute()
        if kind is bool:
            return _parse_switch(raw)
        return kind(raw)
    except ValueError as error:
        expected = "on or off" if kind is bool else f"a {kind.__name__}"
        raise SettingError(f"{env} is {raw!r}; {expected} was expected.") from error


def _parse_switch(raw: str) -> bool:
    """Raises ValueError for what is neither: bool("off") would be True."""
    words = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
    if raw.lower() not in words:
        raise ValueError(raw)
    return words[raw.lower()]


def describe_settings() -> list[tuple[str, str, str, bool]]:
    """(variable, default, help, secret) in file order: the source of docs/settings.md and compose/env.example."""
    rows = []
    for spec in fields(Settings):
        default = "" if spec.default is None or spec.default is MISSING else str(spec.default)
        if isinstance(spec.default, bool):
            default = "on" if spec.default else "off"
        rows.append((spec.metadata["env"], default, spec.metadata["help"], spec.metadata["secret"]))
    return rows


def child_environment(settings: Settings, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process that Trunkline starts: ours, with every non-default setting made explicit."""
    environ = dict(os.environ)
    # Without cached bytecode each of vLLM's three processes compiles it all again: 25 s of CPU time instead of 11.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if value is not None and value != spec.default:
            environ[spec.metadata["env"]] = str(value)
    environ.update(extra or {})
    return environ
