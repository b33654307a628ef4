"""How long the demo takes and what it saves: from a bare clone, and again with everything set up.

`python -m bench.demo [--cold 1] [--warm 3] [--json]` clones this checkout (its last commit) into a folder of its own,
runs `make demo` there, and prints each figure's median, least and most. Nothing outside that folder is used but the
package client's own cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SHOWN = ("wall_seconds", "servers_and_model", "engines", "batch", "hit_rate", "bound_rate", "round_robin_hit_rate")


def run_demo(clone: Path, state: Path) -> dict[str, Any]:
    """One `make demo`, whole: what it printed as JSON, flattened, and the wall seconds around it."""
    started = time.monotonic()
    done = subprocess.run(
        ["make", "--silent", "demo", f"ARGS=--json --state '{state}'"],
        cwd=clone,
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    wall_seconds = time.monotonic() - started
    if done.returncode != 0:
        sys.exit(f"make demo ended with status {done.returncode}")
    numbers: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return {
        **numbers,
        **numbers["seconds"],
        "round_robin_hit_rate": numbers["round_robin_simulated"]["hit_rate"],
        "wall_seconds": wall_seconds,
    }


def measure(cold: int, warm: int, keep: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Cold runs each in a new clone with a new state folder; warm runs in the last of them."""
    base = keep or Path(tempfile.mkdtemp(prefix="trunkline-bench-"))
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o711)  # as root, Postgres runs as a user of its own
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    clone, state = base / "clone", base / "state"
    try:
        for _ in range(max(cold, 1)):
            shutil.rmtree(clone, ignore_errors=True)
            shutil.rmtree(state, ignore_errors=True)
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            runs["cold"].append(run_demo(clone, state))
        for _ in range(warm):
            runs["warm"].append(run_demo(clone, state))
    finally:
        if keep is None:
            shutil.rmtree(base, ignore_errors=True)
    return runs


def table(runs: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    """One row per figure: median (least to most) for cold and for warm runs."""
    yield f"{'':24}" + "".join(f"{f'{name} ({len(found)})':>28}" for name, found in runs.items())
    for figure in _SHOWN:
        cells = (f"{_spread([run[figure] for run in found]):>28}" for found in runs.values())
        yield f"{figure:24}" + "".join(cells)
    last = (runs["warm"] or runs["cold"])[-1]
    for name, size in sorted(last["memory_bytes"].items()):
        yield f"memory of {name:14}{size / 1e6:>28,.0f} MB (with what it started, shared pages shared out)"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--cold", type=int, default=1, help="runs from a bare clone (at least 1)")
    parser.add_argument("--warm", type=int, default=3, help="runs after that, everything set up")
    parser.add_argument("--keep", type=Path, help="use and keep this folder")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    options = parser.parse_args()
    runs = measure(options.cold, options.warm, options.keep)
    print("\n".join(table(runs)))
    if options.json:
        print(json.dumps(runs))


if __name__ == "__main__":
    main()
