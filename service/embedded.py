"""Postgres and Valkey from wheels for a machine with no services: loopback only, one pair per state folder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from service.children import Account, spawn, stop
from service.connections import Embedded, embedded_path, load_embedded, new_secret, save_embedded
from service.errors import DatabaseUnreachable, ServerFailed, SettingError
from service.locks import take_lock
from service.ports import free_port, wait_port_free
from service.postgres import (
    SERVER_ENVIRONMENT,
    initialise,
    is_initialised,
    postgres_argv,
    prepare_folder,
    server_account,
    stop_predecessor,
    usable_install,
)
from service.settings import Settings
from service.store.admin import ensure_database
from service.store.session import Database
from service.wheels import valkey_binary

log = logging.getLogger(__name__)

_START_SECONDS = 60.0  # crash recovery of a large database may take a while
_POLL_SECONDS = 0.05
_POSTGRES_STARTS = 3  # backends of a killed predecessor may hold its shared memory for a moment
_STOP_SECONDS = 20.0


class EmbeddedServers:
    """Both servers under one lock of the state folder. `start` from a thread that outlives them (the main thread).

    A server whose URL is set (DATABASE_URL, BROKER_URL) is not started.
    """

    def __init__(self, settings: Settings, *, durable: bool = True) -> None:
        self._settings = settings
        self._durable = durable
        self._lock: int | None = None
        self._postgres: subprocess.Popen[bytes] | None = None
        self._valkey: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Embedded:
        """Both servers answer when this returns. Raises ServerFailed, SettingError."""
        make_state_folder(self._settings.state_folder)
        self._lock = take_lock(self._settings.state_folder / "servers.lock", "the servers")
        try:
            account = server_account() if self._settings.database_url is None else None
            if self._settings.database_url is None:
                stop_predecessor(self._settings.state_folder)
            embedded = self._draw()
            if self._settings.broker_url is None:
                self._start_valkey(embedded)
            if self._settings.database_url is None:
                self._start_postgres(embedded, account)
            self._await_valkey(embedded)
        except BaseException:
            self.stop()
            raise
        return embedded

    def stop(self) -> None:
        """Postgres closes its connections and checkpoints; Valkey forgets. Idempotent."""
        if self._postgres is not None:
            stop(self._postgres, first=signal.SIGINT, grace_seconds=_STOP_SECONDS)
            self._postgres = None
        if self._valkey is not None:
            stop(self._valkey, first=signal.SIGTERM, grace_seconds=5.0)
            self._valkey = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def dead(self) -> str | None:
        """The name of a server that exited by itself, if any."""
        for name, child in (("Postgres", self._postgres), ("Valkey", self._valkey)):
            if child is not None and child.poll() is not None:
                return name
        return None

    def pids(self) -> list[int]:
        return [child.pid for child in (self._postgres, self._valkey) if child is not None]

    def _draw(self) -> Embedded:
        """Ports and passwords of this state folder. A port that somebody else took meanwhile is drawn anew."""
        old = load_embedded(self._settings)
        if old is None and is_initialised(self._settings.state_folder):
            raise ServerFailed(
                f"{embedded_path(self._settings)} is gone, and with it the password of the database beside it: "
                "restore it, or move the folder 'postgres' away."
            )
        embedded = Embedded(
            postgres_port=_port(old.postgres_port if old else None),
            postgres_password=old.postgres_password if old else new_secret(),
            valkey_port=_port(old.valkey_port if old else None),
            valkey_password=old.valkey_password if old else new_secret(),
            secret_key=old.secret_key if old else new_secret(),
        )
        if embedded != old:
            save_embedded(self._settings, embedded)
        return embedded

    def _start_valkey(self, embedded: Embedded) -> None:
        folder = self._settings.state_folder / "valkey"
        folder.mkdir(mode=0o700, exist_ok=True)
        config = folder / "valkey.conf"
        _write_private(config, _valkey_config(embedded, folder))
        # On stdin: the password is in no argument list, and a path with [ or * would be taken for a pattern.
        with log_path(self._settings, "valkey").open("ab") as output, config.open("rb") as stdin:
            argv = [str(valkey_binary()), "-"]
            self._valkey = spawn(argv, environment=SERVER_ENVIRONMENT, output=output, stdin=stdin, folder=folder)

    def _await_valkey(self, embedded: Embedded) -> None:
        if self._valkey is None:
            return
        client = redis.Redis(
            host="127.0.0.1", port=embedded.valkey_port, password=embedded.valkey_password, socket_timeout=5
        )
        deadline = time.monotonic() + _START_SECONDS
        while self._valkey.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
            except redis.RedisError:
                time.sleep(_POLL_SECONDS)
            else:
                client.close()
                return
        raise ServerFailed(f"Valkey; its log is {log_path(self._settings, 'valkey')}.")

    def _start_postgres(self, embedded: Embedded, account: Account | None) -> None:
        folder = self._settings.state_folder
        data = prepare_folder(folder, account)
        install = usable_install(folder, account)
        if not is_initialised(folder):
            initialise(install, data, embedded.postgres_password, account, durable=self._durable)
        argv = postgres_argv(install, data, embedded.postgres_port, durable=self._durable)
        path = log_path(self._settings, "postgres")
        for _ in range(_POSTGRES_STARTS):
            with path.open("ab") as output:
                self._postgres = spawn(
                    argv,
                    environment=SERVER_ENVIRONMENT,
                    output=output,
                    death_signal=signal.SIGINT,  # a fast, clean shutdown
                    account=account,
                    folder=data,
                )
            if self._await_postgres(embedded):
                return
            time.sleep(1.0)
        raise ServerFailed(f"Postgres; its log is {path}.")

    def _await_postgres(self, embedded: Embedded) -> bool:
        """True once it answers, False when it exited."""
        assert self._postgres is not None
        database = Database(embedded.database_url.removesuffix("/trunkline") + "/postgres", pool_size=1)
        deadline = time.monotonic() + _START_SECONDS
        try:
            while self._postgres.poll() is None:
                try:
                    database.check()
                except DatabaseUnreachable as error:
                    if time.monotonic() > deadline:
                        raise ServerFailed(f"Postgres {error.detail}") from error
                    time.sleep(_POLL_SECONDS)
                else:
                    ensure_database(database, "trunkline")
                    return True
            return False
        finally:
            database.close()


def make_state_folder(folder: Path) -> None:
    """Private to its owner; as root others may pass through it, because Postgres runs as another user.

    What holds prompts and answers is private in either case.
    """
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, exist_ok=True)
        for name in ("logs", "files", "models", "demo", "run"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SettingError(f"TRUNKLINE_STATE: {folder} cannot be used ({error.strerror}).") from error


def log_path(settings: Settings, name: str) -> Path:
    return settings.state_folder / "logs" / f"{name}.log"


def _port(kept: int | None) -> int:
    if kept is not None and wait_port_free(kept, seconds=5.0):
        return kept
    return free_port()


def _valkey_config(embedded: Embedded, folder: Path) -> str:
    """Memory only: Postgres is the truth, and a broker that forgets loses no job."""
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    lines = (
        "bind 127.0.0.1",
        f"port {embedded.valkey_port}",
        f'requirepass "{embedded.valkey_password}"',
        'save ""',
        "appendonly no",
        f'dir "{quoted}"',
        "maxmemory-policy noeviction",
        "loglevel notice",
    )
    return "\n".join(lines) + "\n"


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
