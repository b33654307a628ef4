"""The two TOML files that say what is served (MODELS) and by which engines of this host (INSTANCES)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.core.model import Endpoint
from service.errors import SettingError

_GENERATIVE = (Endpoint.CHAT, Endpoint.COMPLETIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model. `tokenizer` None: prefix keys are made of bytes, and stats say so."""

    name: str
    tokenizer: Path | None = None  # folder with tokenizer.json, tokenizer_config.json and the chat template
    revision: str | None = None
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = _GENERATIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine of this host, and so one worker and one queue."""

    name: str
    engine: str  # vllm, openai, simulated; never defaulted
    model: str  # the name in MODELS
    weights: str | None = None  # vllm: what --model is given; default: the model's tokenizer folder
    url: str | None = None  # openai: the server to attach to
    api_key: str | None = None  # openai: its key
    devices: tuple[int, ...] = ()  # vllm: GPU indices; more than one is tensor parallelism
    arguments: tuple[str, ...] = ()  # vllm: passed through to the engine
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, float], ...] = ()  # simulated: its capacities and rates


@dataclass(frozen=True, slots=True)
class Models:
    """The registry: what a request may name."""

    by_name: dict[str, Model]

    def resolve(self, name: str) -> Model | None:
        """The model that `name` means: itself, an alias, or an adapter of it."""
        return self.by_name.get(name) or next(
            (model for model in self.by_name.values() if name in model.aliases or name in model.adapters), None
        )

    def names(self) -> list[str]:
        """Every name that a request may carry."""
        return [name for model in self.by_name.values() for name in (model.name, *model.aliases, *model.adapters)]


def load_models(path: Path) -> Models:
    """Raises SettingError naming MODELS and the entry."""
    models = {}
    for name, entry in _tables(path, "MODELS", "models").items():
        where = f"MODELS: [models.{name}]"
        _check_keys(where, entry, {"tokenizer", "revision", "aliases", "adapters", "endpoints"})
        tokenizer = entry.get("tokenizer")
        folder = (path.parent / str(tokenizer)).resolve() if tokenizer is not None else None
        if folder is not None and not (folder / "tokenizer.json").is_file():
            raise SettingError(f"{where} tokenizer: {folder} holds no tokenizer.json.")
        try:
            endpoints = tuple(Endpoint(item) for item in entry.get("endpoints", _GENERATIVE))
        except ValueError as error:
            raise SettingError(f"{where} endpoints: {error}.") from error
        models[name] = Model(
            name=name,
            tokenizer=folder,
            revision=entry.get("revision"),
            aliases=_strings(where, entry, "aliases"),
            adapters=_strings(where, entry, "adapters"),
            endpoints=endpoints,
        )
    return Models(models)


def load_instances(path: Path) -> dict[str, Instance]:
    """Raises SettingError naming INSTANCES and the entry."""
    instances = {}
    for name, entry in _tables(path, "INSTANCES", "instances").items():
        where = f"INSTANCES: [instances.{name}]"
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", name):
            raise SettingError(f"{where}: a name is lower-case letters, digits, '-' and '_', at most 63.")
        _check_keys(where, entry, set(Instance.__dataclass_fields__) - {"name"})
        engine = entry.get("engine")
        if engine not in ("vllm", "openai", "simulated"):
            raise SettingError(f"{where} engine: one of vllm, openai, simulated.")
        if not isinstance(entry.get("model"), str):
            raise SettingError(f"{where} model: the name of an entry in MODELS.")
        if engine == "openai" and not entry.get("url"):
            raise SettingError(f"{where} url: the address of the server to attach to.")
        instances[name] = _instance(where, name, entry)
    return instances


def _instance(where: str, name: str, entry: dict[str, Any]) -> Instance:
    devices = entry.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(item, int) and item >= 0 for item in devices):
        raise SettingError(f"{where} devices: a list of GPU indices.")
    try:
        options = tuple((str(key), float(value)) for key, value in dict(entry.get("options", {})).items())
    except (TypeError, ValueError) as error:
        raise SettingError(f"{where} options: numbers.") from error
    return Instance(
        name=name,
        engine=entry["engine"],
        model=entry["model"],
        weights=entry.get("weights"),
        url=entry.get("url"),
        api_key=entry.get("api_key"),
        devices=tuple(devices),
        arguments=_strings(where, entry, "arguments"),
        environment=tuple((str(k), str(v)) for k, v in dict(entry.get("environment", {})).items()),
        options=options,
    )


def _tables(path: Path, setting: str, top: str) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{setting}: {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise SettingError(f"{setting}: {path} is not TOML: {error}.") from error
    tables = document.get(top)
    if not isinstance(tables, dict) or not tables or not all(isinstance(item, dict) for item in tables.values()):
        raise SettingError(f"{setting}: {path} needs tables named [{top}.NAME].")
    return tables


def _check_keys(where: str, entry: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise SettingError(f"{where} {unknown[0]}: unknown; known are {', '.join(sorted(known))}.")


def _strings(where: str, entry: dict[str, Any], key: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SettingError(f"{where} {key}: a list of strings.")
    return tuple(value)
