"""What the demo needs on disk: the input file, the model, and the MODELS and INSTANCES files of its state folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from service.children import spawn
from service.errors import SettingError
from service.fleet import load_instances, load_models
from service.settings import Settings, child_environment

MODEL = "smollm2"
_MODEL_FOLDER = Path("models") / "smollm2-135m"
# KV is capped at 128 blocks of 32 tokens: on a busy GPU the working set does not fit either, and with ample cache
# every policy looks alike.
_ENGINE_ARGUMENTS = (
    *("--num-gpu-blocks-override", "128"),
    *("--block-size", "32"),
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "16"),
)


def input_file(file: Path | None) -> Path:
    """The lines to answer. Raises SettingError."""
    found = file or Path(__file__).resolve().parents[1] / "examples" / "support.jsonl"
    if not found.is_file():
        raise SettingError(f"{found} is not there; name an input file with --file.")
    return found


def model_folder_of(settings: Settings) -> Path:
    """Where the demo's model lies once it is prepared."""
    return settings.state_folder / _MODEL_FOLDER


def prepare_model(settings: Settings, log_path: Path) -> subprocess.Popen[bytes]:
    """Start what makes the model's folder; it ends at once where the folder is there already."""
    argv = [sys.executable, "-m", "workers.models", "prepare", "--output", str(model_folder_of(settings))]
    with log_path.open("ab") as output:
        return spawn(argv, environment=child_environment(settings), output=output)


def write_fleet(settings: Settings) -> None:
    """models.toml and instances.toml, unless they are there. Raises SettingError where those do not serve the model."""
    if not settings.models_path.exists():
        _write(settings.models_path, f'[models.{MODEL}]\ntokenizer = "{_MODEL_FOLDER.as_posix()}"\n')
    if not settings.instances_path.exists():
        cores = sorted(os.sched_getaffinity(0))
        tables = [_instance_table(f"cpu{number}", cores[number % len(cores)]) for number in range(2)]
        _write(settings.instances_path, "\n".join(tables))
    if load_models(settings.models_path).resolve(MODEL) is None:
        raise SettingError(f"MODELS: {settings.models_path} has no [models.{MODEL}]; use --state with another folder.")
    if not any(instance.model == MODEL for instance in load_instances(settings.instances_path).values()):
        raise SettingError(f"INSTANCES: {settings.instances_path} serves no {MODEL}; use --state with another folder.")


def _instance_table(name: str, core: int) -> str:
    """One vLLM bound to one core. JSON strings and lists of strings are TOML too."""
    return (
        f"[instances.{name}]\n"
        'engine = "vllm"\n'
        f'model = "{MODEL}"\n'
        f"arguments = {json.dumps(list(_ENGINE_ARGUMENTS))}\n"
        f"[instances.{name}.environment]\n"
        f'VLLM_CPU_OMP_THREADS_BIND = "{core}"\n'
        'VLLM_CPU_KVCACHE_SPACE = "1"\n'
        'OMP_NUM_THREADS = "1"\n'
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
