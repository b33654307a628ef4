"""What the routes work with: one record per application, found through the request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.requests import Request

from service.api.hub import RelayHub
from service.api.slots import Slots
from service.api.waiting import JobWaiter
from service.broker import Publisher
from service.errors import BrokerUnreachable
from service.fleet import Models
from service.settings import Settings
from service.store.blobs import Blobs
from service.store.session import Database
from service.tokenizing import Tokenizing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that a route may touch."""

    settings: Settings
    models: Models
    database: Database
    publisher: Publisher
    blobs: Blobs
    tokenizing: Tokenizing
    waiter: JobWaiter
    relay: RelayHub
    # One uploaded file is validated at a time: it is Python at work, and every other request shares its core.
    judging: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    planning: Slots = field(default_factory=Slots)

    def hint(self, task_id: int) -> None:
        """Tell control that a task waits. A broker that is down is no error: the sweeper publishes it again."""
        try:
            self.publisher.control(task_id)
        except BrokerUnreachable as error:
            log.warning("task=%d not published, the sweeper will: %s", task_id, error)


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
