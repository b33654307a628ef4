"""Logging of every process: one line per record on stderr. Prompts, outputs, headers and keys are never logged."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from service.settings import Settings

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# They log every request or task at INFO, some with its arguments.
_QUIET = ("httpx", "httpcore", "alembic", "celery.app.trace", "celery.worker.strategy", "uvicorn.access", "kombu")


class _Formatter(logging.Formatter):
    """An exception is shown by its class and its frames, its causes too; never by its message, which may quote a prompt
    or an answer."""

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        said, error = [], ei[1]
        while error is not None:
            said += ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
            said.append(f"{type(error).__name__}\n")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "".join(said).rstrip()


def set_up_logging(settings: Settings) -> None:
    """Once per process, before its work starts."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(_FORMAT))
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
