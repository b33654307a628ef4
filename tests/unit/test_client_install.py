"""What a producer installs: the package alone needs nothing of the server's, and says how to get it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"httpx", "pydantic", "rich", "typer", "trunkline"}

# As if the package had been installed without extras: what only they bring cannot be imported.
WITHOUT_EXTRAS = """
import sys
from importlib.abc import MetaPathFinder

ABSENT = {"alembic", "celery", "fastapi", "flower", "fsspec", "jinja2", "kombu", "numpy", "orjson", "psutil", "psycopg",
          "redis", "sqlalchemy", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "vllm"}

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_the_package_imports_nothing_of_the_server() -> None:
    done = run("import sys, trunkline, trunkline.cli; print('\\n'.join({n.partition('.')[0] for n in sys.modules}))")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"celery", "kombu", "sqlalchemy", "torch", "numpy", "fastapi", "service", "workers"}


def test_the_sources_import_nothing_else() -> None:
    found = set()
    for path in (ROOT / "trunkline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    assert found - set(sys.stdlib_module_names) <= ALLOWED


def test_the_command_line_works_without_extras() -> None:
    done = run(WITHOUT_EXTRAS + "from trunkline.cli import main; main()", "submit", "--help")
    assert done.returncode == 0, done.stderr
    assert "--wait" in done.stdout


@pytest.mark.parametrize("command", ["up", "demo", "keys", "stats"])
def test_a_command_of_the_server_says_how_to_install_it(command: str) -> None:
    done = run(WITHOUT_EXTRAS + "from trunkline.cli import main; main()", command)
    assert done.returncode in (1, 2)
    assert "pip install 'trunkline[server,embedded]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_without_extras_lists_the_producers_commands() -> None:
    done = run(WITHOUT_EXTRAS + "from trunkline.cli import main; main()", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("submit", "status", "results", "cancel", "batches", "job", "models"):
        assert command in done.stdout
