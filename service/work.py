"""What a piece of control work is done with, and how it is told to stop half-way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import sqlalchemy as sa

from service.courier import Courier
from service.errors import TrunklineError
from service.fleet import Models
from service.settings import Settings
from service.store import control
from service.store.blobs import Blobs
from service.store.control import ControlTask
from service.store.session import Database
from service.tokenizing import Tokenizing


class Interrupted(TrunklineError):
    """The control worker is stopping; the task is given back and goes on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Shared by the threads of a control worker."""

    settings: Settings
    database: Database
    blobs: Blobs
    models: Models
    tokenizing: Tokenizing
    courier: Courier = field(default_factory=Courier)
    stopping: threading.Event = field(default_factory=threading.Event)

    def pause(self) -> None:
        """Call between chunks. Raises Interrupted when the worker is told to stop."""
        if self.stopping.is_set():
            raise Interrupted

    def hold(self, conn: sa.Connection, task: ControlTask) -> None:
        """The fence of a transaction: FenceLost unless this attempt still holds the task; renews its lease."""
        control.renew_task(conn, task, self.settings.task_lease_seconds)
