"""The process `servers`: the embedded servers whose URL is not set, and the migration, until it is told to stop."""

from __future__ import annotations

import logging
import signal
import time

from service.connections import find_connections
from service.embedded import EmbeddedServers
from service.errors import ServerFailed
from service.migrate import upgrade
from service.settings import Settings

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2


def run_servers(settings: Settings) -> None:
    """Returns after SIGTERM or SIGINT. Raises ServerFailed when a server dies by itself."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: asked.append(received))
    with EmbeddedServers(settings) as servers:
        upgrade(find_connections(settings).database_url)
        log.info("servers are ready: state=%s", settings.state_folder)
        while not asked:
            name = servers.dead()
            if name is not None:
                raise ServerFailed(f"{name} exited; its log is in {settings.state_folder / 'logs'}.")
            time.sleep(_POLL_SECONDS)
