"""From an instance's `engine` setting to the engine."""

from __future__ import annotations

from service.errors import SettingError
from service.fleet import Instance, Model
from service.settings import Settings
from workers.engines.base import Engine
from workers.engines.openai import OpenAIEngine
from workers.engines.simulated import SimulatedEngine
from workers.engines.vllm import VllmEngine


def make_engine(instance: Instance, model: Model, settings: Settings) -> Engine:
    """A new, not yet started engine. Raises SettingError for a kind that is not known; there is no default."""
    if instance.engine == "vllm":
        return VllmEngine(instance, model, settings)
    if instance.engine == "openai":
        return OpenAIEngine(instance, model, settings)
    if instance.engine == "simulated":
        return SimulatedEngine(instance, model)
    raise SettingError(f"INSTANCES: [instances.{instance.name}] engine: {instance.engine} is none.")
