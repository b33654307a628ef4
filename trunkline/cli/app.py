"""The Typer app: which commands there are, and how an error becomes one sentence and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from trunkline.cli import actions, batches, jobs, report
from trunkline.cli.extensions import ExtensibleGroup, load_extensions, missing_part

STATUS_HELP = (
    "Exit status: 0 done, 1 failed, 2 wrong usage or settings, 3 the batch or job ended but not every request "
    "succeeded, 4 timed out, 130 interrupted."
)
_FAILED = 1
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_INTERRUPTED = 130


def main() -> None:
    """The entry point of the script `trunkline`."""
    arguments = sys.argv[1:]
    if sys.stdout is None:  # it was closed before we began
        typer.echo("trunkline: the output could not be written: standard output is closed.", err=True)
        sys.exit(_FAILED)
    try:
        try:
            build_app(arguments)(args=arguments, prog_name="trunkline")
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        hint = missing_part(error)
        if hint is None:
            raise
        typer.echo(f"trunkline: {hint}", err=True)
        sys.exit(_FAILED)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or hasattr(error, "exit_status"):
            raise
        _leave_unwritten(error)
    except Exception as error:
        # Errors that carry an exit status are meant for the user; any other one is a bug and keeps its traceback.
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        typer.echo(f"trunkline: {' '.join(str(error).split())}", err=True)
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _leave_unwritten(error: OSError) -> NoReturn:
    """Nothing more can be said on standard output, whose buffer Python would try to write once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"trunkline: the output could not be written: {error.strerror}.", err=True)
    sys.exit(_FAILED)


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
    report.register(app)
    actions.register(app)
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
