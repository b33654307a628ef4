"""Long polls: coroutines that wait until a single job has its result, woken by NOTIFY, with a poll as the base."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from service.store import singles
from service.store.listen import listening, notify, payloads
from service.store.session import Database

log = logging.getLogger(__name__)

_CHANNEL = "job"
_POLL_SECONDS = 1.0  # NOTIFY may be lost (a reconnect, 200 ids in one); nobody waits longer than this for that


class JobWaiter:
    """One thread per process hears NOTIFY, and asks the table once a second about all that is waited for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._events: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-waiter", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Call on the event loop on which `wait` will be awaited."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self.release()
        await asyncio.to_thread(self._end)

    def release(self) -> None:
        """Wake everybody, from now on at once: the process is about to end."""
        self._stopping.set()
        self._wake(self._waited())

    @contextmanager
    def watching(self, public_id: str) -> Iterator[asyncio.Event]:
        """An event that is set once the job has ended. Look at the job inside: an end after that look is not missed."""
        event = asyncio.Event()
        with self._lock:
            self._events[public_id].add(event)
        try:
            if self._stopping.is_set():
                event.set()
            yield event
        finally:
            with self._lock:
                self._events[public_id].discard(event)
                if not self._events[public_id]:
                    del self._events[public_id]

    @property
    def callers(self) -> int:
        """How many of this process wait."""
        with self._lock:
            return sum(map(len, self._events.values()))

    def is_watched(self, public_id: str) -> bool:
        """Whether anybody of this process waits for that job."""
        with self._lock:
            return public_id in self._events

    def _end(self) -> None:
        try:
            with self._database.transaction() as conn:
                notify(conn, _CHANNEL)  # so that the thread looks up now
        except SQLAlchemyError as error:
            log.info("waiting for jobs: no goodbye from the database (%s)", type(error).__name__)
        self._thread.join()

    def _waited(self) -> list[str]:
        with self._lock:
            return list(self._events)

    def _wake(self, public_ids: list[str]) -> None:
        with self._lock:
            for public_id in public_ids:
                for event in self._events.get(public_id, ()):
                    event.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with listening(self._database, _CHANNEL) as conn:
                    self._hear(conn)
            except (psycopg.Error, SQLAlchemyError) as error:
                if not self._stopping.wait(_POLL_SECONDS):
                    log.warning("waiting for jobs: the database does not answer (%s)", type(error).__name__)

    def _hear(self, conn: psycopg.Connection) -> None:
        polled_at = float("-inf")
        while not self._stopping.is_set():
            if time.monotonic() - polled_at >= _POLL_SECONDS:
                self._poll()
                polled_at = time.monotonic()
            heard = payloads(conn, _POLL_SECONDS)
            self._wake_soon([public_id for payload in heard for public_id in payload.split(",")])

    def _poll(self) -> None:
        waited = self._waited()
        if waited:
            with self._database.transaction() as conn:
                self._wake_soon(singles.ended_among(conn, waited))

    def _wake_soon(self, public_ids: list[str]) -> None:
        if public_ids and self._loop is not None and not self._stopping.is_set():
            self._loop.call_soon_threadsafe(self._wake, public_ids)
