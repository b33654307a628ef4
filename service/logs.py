"""Logging of every process: one line per record on stderr. Prompts, outputs, headers and keys are never logged."""

from __future__ import annotations

import logging

from service.settings import Settings

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# They log every request or task at INFO, some with its arguments.
_QUIET = ("httpx", "httpcore", "alembic", "celery.app.trace", "celery.worker.strategy", "uvicorn.access", "kombu")


def set_up_logging(settings: Settings) -> None:
    """Once per process, before its work starts."""
    logging.basicConfig(level=settings.log_level, format=_FORMAT, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
