"""The README and docs/ against the code: commands, options, make targets, settings, routes, fields, links, examples."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.routing import APIRoute

from service.api.app import PARTS
from service.fleet import Instance, Model, load_instances, load_models
from trunkline.cli.app import STATUS_HELP, build_app

ROOT = Path(__file__).parents[1]
DOCS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
)
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCS}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def shell_lines() -> Iterator[tuple[str, str]]:
    """(file, command) for every command in a shell block or in backticks."""
    for name, text in TEXT.items():
        for block in blocks(text, "sh"):
            yield from ((name, line) for line in block.replace("\\\n", " ").splitlines() if line.strip())
        yield from ((name, found) for found in re.findall(r"`((?:trunkline|make|pip) [^`]+)`", text))


def commands_of(program: str) -> list[tuple[str, list[str]]]:
    found = []
    for name, line in shell_lines():
        words = shlex.split(line, comments=True)
        if words and words[0] == program:
            pipeline = [word for word in words if word not in ("<", ">")]
            found.append((name, pipeline[1:]))
    return found


@pytest.mark.parametrize(("name", "words"), commands_of("trunkline"), ids=str)
def test_every_command_and_option_exists(name: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(build_app())
    while hasattr(command, "commands"):
        assert words, f"{name}: a command is missing"
        assert words[0] in command.commands, f"{name}: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    assert used <= known, name


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, words in commands_of("make"):
        assert words[0] in targets, name


def test_every_extra_exists() -> None:
    for name, line in shell_lines():
        for extras in re.findall(r"pip install '(?:\.|trunkline)\[([a-z,]+)\]'", line):
            assert set(extras.split(",")) <= set(EXTRAS), name


@pytest.mark.parametrize("name", TEXT)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT[name]):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_the_places_named_in_the_readme_are_there() -> None:
    places = re.findall(r"^\| [^|]+ \| (.+) \|$", TEXT["README.md"].partition("## Where things live")[2], re.M)
    named = [place for row in places for place in re.findall(r"`([a-z/A-Z.]+)`", row) if place[0] != "/"]
    assert len(named) > 8
    for place in named:
        assert (ROOT / place).exists(), place


@pytest.mark.parametrize("name", TEXT)
def test_python_blocks_compile(name: str) -> None:
    for number, block in enumerate(blocks(TEXT[name], "python")):
        compile(block, f"{name} block {number}", "exec")


def test_the_toml_of_the_readme_is_what_the_server_reads(tmp_path: Path) -> None:
    models_toml, instances_toml = blocks(TEXT["README.md"], "toml")
    (tmp_path / "models.toml").write_text(models_toml)
    (tmp_path / "instances.toml").write_text(instances_toml)
    folder = tmp_path / tomllib.loads(models_toml)["models"]["llama-8b"]["tokenizer"]
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    served = load_models(tmp_path / "models.toml")
    instances = load_instances(tmp_path / "instances.toml")
    assert {item.model for item in instances.values()} == set(served.by_name)
    assert [item.devices for item in instances.values()] == [(0,), (1,)]


def test_the_settings_are_those_that_are_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "service", "settings"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert TEXT["docs/settings.md"].endswith(printed), "replace the table with what `python -m service settings` prints"


@pytest.mark.parametrize(("heading", "kind"), [("## `MODELS`", Model), ("## `INSTANCES`", Instance)])
def test_every_field_of_both_files_is_documented(heading: str, kind: type[Model] | type[Instance]) -> None:
    section = TEXT["docs/models.md"].partition(heading)[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([a-z_]+)` \|", section, re.M)
    assert set(documented) == {spec.name for spec in dataclasses.fields(kind)} - {"name"}


def test_the_routes_are_those_of_the_api() -> None:
    documented = set(re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`]*)`", TEXT["docs/api.md"].partition("**Endpoints")[0]))
    served = {
        (method, re.sub(r"{[\w:]+}", "{id}", route.path))
        for part in PARTS
        for route in part.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert documented == {(method, path) for method, path in served if method != "HEAD"}


def test_the_exit_statuses_are_those_of_the_help() -> None:
    said = " ".join(TEXT["docs/api.md"].split())
    statuses = STATUS_HELP.partition(": ")[2]
    assert statuses in said
