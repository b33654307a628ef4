"""Commands of other packages: entry points of the group `trunkline.commands`, each a function register(app)."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "trunkline.commands"
_OURS = frozenset({"trunkline", "service", "workers", "migrations"})


class ExtensibleGroup(TyperGroup):
    """Says, for a command that is not there, how to install the part that may hold it."""

    missing: tuple[str, ...] = ()  # one sentence for each extension that could not be loaded

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.missing and args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"There is no command {args[0]!r} here. {self.missing[0]}")
        return super().resolve_command(ctx, args)


def load_extensions(app: typer.Typer) -> None:
    """Register every extension whose packages are installed; the group says what the others lacked."""
    missing = []
    for entry in entry_points(group=GROUP):
        try:
            register = entry.load()
            register(app)
        except ModuleNotFoundError as error:
            hint = missing_part(error)
            if hint is None:
                raise
            missing.append(hint)
    app.info.cls = type("Group", (ExtensibleGroup,), {"missing": tuple(missing)})


def missing_part(error: ModuleNotFoundError) -> str | None:
    """How to install the optional part that `error` is about; None where the missing module is our own."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OURS:
        return None  # a broken installation, not an absent option
    return f"The server's commands are not installed ({name} is missing): pip install 'trunkline[server,embedded]'"
