"""One tree of errors. The docstring of a class is its message; ids and the setting to mend go into `detail`."""

from __future__ import annotations

import inspect


class TrunklineError(Exception):
    """Trunkline failed."""

    exit_status = 1

    def __init__(self, detail: str = "") -> None:
        self.detail = detail
        message = inspect.cleandoc(type(self).__doc__ or "")
        super().__init__(f"{message} {detail}".strip())


class SettingError(TrunklineError):
    """A setting is wrong."""

    exit_status = 2


class UsageError(TrunklineError):
    """That is no command."""

    exit_status = 2


class InputRefused(TrunklineError):
    """Cannot plan:"""

    exit_status = 2


class DatabaseUnreachable(TrunklineError):
    """The database does not answer; check DATABASE_URL."""


class BrokerUnreachable(TrunklineError):
    """The broker does not answer; check BROKER_URL."""


class PortTaken(TrunklineError):
    """A port is taken by another process."""


class ModelMissing(TrunklineError):
    """The model's files are not there; check MODELS."""


class ServerFailed(TrunklineError):
    """An embedded server did not start."""


class EngineFailed(TrunklineError):
    """The engine did not start, or died."""


class InstanceHeld(TrunklineError):
    """Another live worker holds this instance's queue."""


class FenceLost(TrunklineError):
    """The lease on this cohort or task was lost to a newer attempt; nothing was written."""


class StoreFailed(TrunklineError):
    """The file store refused a read or a write; check STORE_URL."""


class SchemaBehind(TrunklineError):
    """The database schema is not at this version's head; run `python -m service migrate`."""


class WebhookFailed(TrunklineError):
    """The webhook was not delivered."""


class NoSuchBatch(TrunklineError):
    """There is no batch of this id."""
