"""The Typer app: which commands there are, and how an error becomes one sentence and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from trunkline.cli import batches, jobs
from trunkline.cli.extensions import ExtensibleGroup, load_extensions, missing_part

STATUS_HELP = (
    "Exit status: 0 done, 1 failed, 2 wrong usage or settings, 3 the batch or job ended but not every request "
    "succeeded, 4 timed out, 130 interrupted."
)
_FAILED = 1
_INTERRUPTED = 130


def main() -> None:
    """The entry point of the script `trunkline`."""
    arguments = sys.argv[1:]
    try:
        build_app(arguments)(args=arguments, prog_name="trunkline")
    except ModuleNotFoundError as error:
        hint = missing_part(error)
        if hint is None:
            raise
        typer.echo(f"trunkline: {hint}", err=True)
        sys.exit(_FAILED)
    except Exception as error:
        # Errors that carry an exit status are meant for the user; any other one is a bug and keeps its traceback.
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        typer.echo(f"trunkline: {' '.join(str(error).split())}", err=True)
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The app with the commands that `arguments` may need: extensions are not imported for the producer's own."""
    app = typer.Typer(
        name="trunkline",
        cls=ExtensibleGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog=STATUS_HELP,
        help="Batch inference on engines that you host yourself.",
    )
    app.callback()(_options)
    batches.register(app)
    jobs.register(app)
    own = {_name(command) for command in app.registered_commands} | {"job"}
    if not (arguments and arguments[0] in own):
        load_extensions(app)
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("trunkline"))
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """What comes before a command."""


def _name(command: typer.models.CommandInfo) -> str:
    assert command.name is not None
    return command.name
