"""The command line and environment that start vLLM for one instance: pure, so that it can be read and tested."""

from __future__ import annotations

import os.path
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from service.errors import ModelMissing, SettingError
from service.fleet import Instance, Model

# What the worker decides; an instance that sets one of them would be unreachable, or would log prompts.
_OURS = ("--model", "--served-model-name", "--host", "--port", "--api-key", "--uds")
_LOGS_PROMPTS = ("--enable-log-requests", "--enable-log-outputs")

_CPU_MAX_NUM_SEQS = 16
_GPU_MAX_NUM_SEQS = 256
# vLLM on a CPU takes blocks of 128 tokens, and only multiples of 32: 32 shares most.
_CPU_BLOCK_SIZE = 32


def build_command(
    instance: Instance, model: Model, *, port: int, is_cpu: bool, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) of vLLM's API server; `environment` is what it inherits, without our own settings.

    What the instance gives in `arguments` and `environment` wins over every default here. Raises SettingError for an
    argument that is ours to set, ModelMissing for a folder of weights that is not there.
    """
    _check_arguments(instance, model)
    weights, is_local = find_weights(instance, model)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", weights, "--served-model-name", model.name, *model.aliases]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    # Cached tokens are null without the first; without the second the engine refuses `priority`.
    argv += ["--enable-prompt-tokens-details", "--scheduling-policy", "priority", "--disable-uvicorn-access-log"]
    argv += _default(instance, "--max-num-seqs", str(max_num_seqs(instance, is_cpu=is_cpu)))
    if is_cpu:
        argv += _default(instance, "--block-size", str(_CPU_BLOCK_SIZE))
    if len(instance.devices) > 1:
        argv += _default(instance, "--tensor-parallel-size", str(len(instance.devices)))
    if model.revision is not None and not is_local:
        argv += _default(instance, "--revision", model.revision)
    argv += instance.arguments
    return argv, {**environment, **_defaults(instance, is_local, is_cpu), **dict(instance.environment)}


def max_num_seqs(instance: Instance, *, is_cpu: bool) -> int:
    """How many jobs the engine runs at once. Always given to it, so that the feeder knows."""
    given = argument_value(instance.arguments, "--max-num-seqs")
    if given is None:
        return _CPU_MAX_NUM_SEQS if is_cpu else _GPU_MAX_NUM_SEQS
    if not given.isdigit() or int(given) == 0:
        raise SettingError(f"INSTANCES: [instances.{instance.name}] arguments: --max-num-seqs {given} is no number.")
    return int(given)


def find_weights(instance: Instance, model: Model) -> tuple[str, bool]:
    """What --model is given, and whether it is a folder of this machine (else a name on a model hub)."""
    weights = instance.weights or (str(model.tokenizer) if model.tokenizer is not None else None)
    if weights is None:
        raise SettingError(f"INSTANCES: [instances.{instance.name}] weights: a folder, or a name on a model hub.")
    folder = Path(os.path.expanduser(weights))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelMissing(f"INSTANCES: [instances.{instance.name}] weights: {folder} holds no config.json.")
        return str(folder.absolute()), True
    if folder.is_absolute() or weights.startswith(("./", "../")):
        raise ModelMissing(f"INSTANCES: [instances.{instance.name}] weights: {folder} is no folder.")
    return weights, False


def argument_value(arguments: tuple[str, ...], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one given; vLLM takes '_' for '-' too."""
    value = None
    for index, item in enumerate(arguments):
        key, equals, rest = item.partition("=")
        if _normal(key) != name:
            continue
        value = rest if equals else (arguments[index + 1] if index + 1 < len(arguments) else "")
    return value


def cause_in_log(text: str) -> str | None:
    """The line of vLLM's log that says why it ended: the first error that only points at no other one."""
    lines = [_strip_prefix(line) for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): \S", line)]
    errors += [line for line in lines if re.search(r": error: \S", line)]  # argparse
    causes = [line for line in errors if "root cause" not in line.lower()] or errors
    if causes:
        return causes[0]
    said = [line for line in lines if line and not line.startswith(("Traceback", "File "))]
    return said[-1] if said else None


def _check_arguments(instance: Instance, model: Model) -> None:
    where = f"INSTANCES: [instances.{instance.name}] arguments:"
    given = {_normal(item.partition("=")[0]) for item in instance.arguments}
    for name in _OURS:
        if name in given:
            raise SettingError(f"{where} {name} is set by the worker.")
    for name in _LOGS_PROMPTS:
        if name in given:
            raise SettingError(f"{where} {name} would log prompts.")
    if model.adapters and "--lora-modules" not in given:
        raise SettingError(f"{where} --enable-lora --lora-modules NAME=FOLDER for {', '.join(model.adapters)}.")


def _default(instance: Instance, name: str, value: str) -> list[str]:
    return [] if argument_value(instance.arguments, name) is not None else [name, value]


def _defaults(instance: Instance, is_local: bool, is_cpu: bool) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    if instance.devices:
        defaults["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in instance.devices)
    if is_cpu:
        # An explicit size, since start-up fails where 92 % of the memory is not free. One thread, unpinned: several
        # instances on one small machine must not fight for its cores; an instance that owns cores says which, with
        # VLLM_CPU_OMP_THREADS_BIND (and OMP_NUM_THREADS) in its environment.
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return defaults


def _normal(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _strip_prefix(line: str) -> str:
    """Without vLLM's '(EngineCore pid=1) ERROR 11-29 13:09:55 [core.py:1] '."""
    line = re.sub(r"^\(\w[\w.-]* pid=\d+\)\s*", "", line.strip())
    return re.sub(r"^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*", "", line).strip()
