"""A stand-in for an engine's process tree: server -> core -> worker; the worker leads a session and ignores SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

GENERATIONS = ("server", "core", "worker")


def main(folder: Path, generation: str) -> None:
    index = GENERATIONS.index(generation)
    if generation == "worker":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        child = GENERATIONS[index + 1]
        subprocess.Popen([sys.executable, __file__, str(folder), child], start_new_session=child == "worker")
    draft = folder / f"{generation}.draft"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / generation)  # seen whole or not at all
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
