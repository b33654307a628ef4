"""What schemathesis cannot guess: the name of the served model, ids of what is there. Every other time it gets one.

`bench.contract` leaves them in a file beside schemathesis's configuration.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import schemathesis

KNOWN_FILE = "known.json"
_turns = itertools.count()


@cache
def _known() -> dict[str, list[str]]:
    folder = Path(sys.argv[sys.argv.index("--config-file") + 1]).parent
    known: dict[str, list[str]] = json.loads((folder / KNOWN_FILE).read_text())
    return known


def _one(name: str) -> str:
    return _known()[name][next(_turns) // 2 % len(_known()[name])]


def _is_turn() -> bool:
    return next(_turns) % 2 == 0


@schemathesis.hook
def map_path_parameters(context: schemathesis.HookContext, path_parameters: Any) -> Any:
    if not path_parameters or not _is_turn():
        return path_parameters
    return {name: _one(name) if name in _known() else value for name, value in path_parameters.items()}


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    if not isinstance(body, dict) or not _is_turn():
        return body
    if "model" in body:
        body["model"] = "tiny"
    if "input_file_id" in body:
        body["input_file_id"] = _one("file_id")
    inner = body.get("body")
    if isinstance(inner, dict):
        body["body"] = {**inner, "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return body
