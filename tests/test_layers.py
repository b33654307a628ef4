"""The layer rules of DESIGN.md section 9, checked over the syntax tree of every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("service", "trunkline", "workers", "migrations", "bench")

# Who may import whom within service/: a module imports its own rank and lower ones. Unlisted modules are WORK.
CORE, GROUND, STORE, WORK, SURFACE = range(5)
RANKS = {
    "service.core": CORE,
    "service.errors": GROUND,
    "service.settings": GROUND,
    "service.connections": GROUND,
    "service.fleet": GROUND,
    "service.logs": GROUND,
    "service.locks": GROUND,
    "service.children": GROUND,
    "service.ports": GROUND,
    "service.wheels": GROUND,
    "service.postgres": GROUND,
    "service.store": STORE,
    "service.broker": STORE,
    "service.tokenizing": STORE,
    "service.templating": STORE,
    "service.template_format": STORE,
    "service.messages": STORE,
    "service.api": SURFACE,
    "service.celery_app": SURFACE,
    "service.cli": SURFACE,
    "service.cli_stats": SURFACE,
    "service.cli_doctor": SURFACE,
    "service.cli_fit": SURFACE,
    "service.cli_keys": SURFACE,
    "service.cli_tenants": SURFACE,
    "service.cli_plan": SURFACE,
    "service.cli_webhooks": SURFACE,
    "service.demo": SURFACE,
    "service.demo_files": SURFACE,
    "service.demo_report": SURFACE,
    "service.demo_screen": SURFACE,
    "service.up": SURFACE,
    "service.supervisor": SURFACE,
    "service.__main__": SURFACE,
}
IMPURE = {"os", "sys", "io", "time", "random", "secrets", "logging", "socket", "subprocess", "pathlib", "threading"}
IMPURE |= {"asyncio", "sqlalchemy", "celery", "kombu", "redis", "httpx", "fsspec", "psutil", "tempfile", "uuid"}
ENGINE_PACKAGES = {"torch", "vllm", "transformers", "workers", "gguf"}
PRODUCER_PACKAGES = {"trunkline", "httpx", "pydantic", "rich", "typer", "click"}
SQL_CALLS = {"text", "select", "insert", "update", "delete", "func", "exists", "literal_column", "union_all", "Table"}
SQL_TEXT = re.compile(
    r"\b(select\s.+\sfrom|insert\s+into|update\s+\w+\s+set|delete\s+from|create\s+table)\s", re.I | re.S
)
SQL_HOMES = ("service/store/", "migrations/")
CELERY_HOMES = {"service/broker.py", "service/relay.py", "service/celery_app.py"}


@dataclass(frozen=True, slots=True)
class Source:
    path: str
    module: str
    text: str
    tree: ast.Module

    def imports(self) -> Iterator[str]:
        """Dotted names; `from a import b` gives both a and a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.level == 0, f"{self.path}:{node.lineno} relative import"
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def top_level_packages(self) -> set[str]:
        return {name.partition(".")[0] for name in self.imports()}


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            text = file.read_text(encoding="utf-8")
            found.append(Source(path, module, text, ast.parse(text, path)))
    return tuple(found)


def below(*prefixes: str) -> list[Source]:
    return [source for source in sources() if source.path.startswith(prefixes)]


def rank_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        rank = RANKS.get(".".join(parts[:length]))
        if rank is not None:
            return rank
    return WORK


def test_a_module_imports_only_its_own_rank_and_lower_ones() -> None:
    modules = {source.module for source in sources()}
    wrong = [
        f"{source.path} imports {name}"
        for source in below("service/")
        for name in source.imports()
        if name in modules and name.startswith("service.") and rank_of(name) > rank_of(source.module)
    ]
    assert wrong == []


def test_core_is_pure() -> None:
    allowed = {"numpy", "service", "orjson"}
    for source in below("service/core/"):
        assert not source.top_level_packages() & IMPURE, source.path
        assert all(name.startswith("service.core") for name in source.imports() if name.startswith("service.")), (
            source.path
        )
        third_party = source.top_level_packages() - allowed - set(_standard_library())
        assert not third_party, f"{source.path}: {third_party}"


def _standard_library() -> frozenset[str]:
    import sys

    return sys.stdlib_module_names


def test_service_never_imports_an_engine_or_the_workers() -> None:
    for source in below("service/"):
        assert not source.top_level_packages() & ENGINE_PACKAGES, source.path


def test_trunkline_imports_neither_service_nor_what_a_server_needs() -> None:
    for source in below("trunkline/"):
        foreign = source.top_level_packages() - PRODUCER_PACKAGES - set(_standard_library())
        assert not foreign, f"{source.path}: {foreign}"


def test_the_environment_is_read_in_one_place_each() -> None:
    homes = {"service/settings.py", "trunkline/config.py"}
    for source in sources():
        if source.path in homes:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("environ", "getenv", "putenv"), f"{source.path}:{node.lineno}"


def test_sql_is_only_under_store() -> None:
    for source in sources():
        if source.path.startswith(SQL_HOMES):
            continue
        names = set(source.imports())
        assert "service.store.tables" not in names or source.path == "service/migrate.py", source.path
        docstrings = set(_docstrings(source.tree))
        for node in ast.walk(source.tree):
            where = f"{source.path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not (node.value.id in ("sa", "sqlalchemy") and node.attr in SQL_CALLS), where
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
                assert not SQL_TEXT.search(node.value), where
        assert not {f"sqlalchemy.{call}" for call in SQL_CALLS} & names, source.path


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                yield str(body[0].value.value)


def test_celery_has_one_home_in_service() -> None:
    for source in below("service/"):
        if source.path not in CELERY_HOMES:
            assert not source.top_level_packages() & {"celery", "kombu"}, source.path


@pytest.mark.parametrize("limit_lines", [400])
def test_files_are_short_and_say_first_what_they_are(limit_lines: int) -> None:
    for source in sources():
        is_generated = source.path.startswith("migrations/versions/")
        assert is_generated or source.text.count("\n") <= limit_lines, source.path
        assert not source.text.strip() or ast.get_docstring(source.tree), f"{source.path} has no docstring"


@pytest.mark.parametrize("limit_lines", [40])
def test_functions_are_short(limit_lines: int) -> None:
    too_long = [
        f"{source.path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for source in sources()
        if not source.path.startswith("migrations/versions/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > limit_lines
    ]
    assert too_long == []
