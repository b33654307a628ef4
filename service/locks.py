"""One holder at a time for a folder's work: a lock that the kernel drops when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from service.errors import SettingError

_WAIT_SECONDS = 3.0  # a killed holder takes a moment to be cleaned up
_POLL_SECONDS = 0.1


def take_lock(path: Path, what: str) -> int:
    """A descriptor that holds the lock until it is closed. Raises SettingError naming the holder's pid."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                holder = os.read(lock, 20).decode(errors="replace").strip()
                os.close(lock)
                raise SettingError(
                    f"TRUNKLINE_STATE: process {holder} already runs {what} in {path.parent}; "
                    "stop it, or choose another folder."
                ) from error
            time.sleep(_POLL_SECONDS)
        else:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            return lock
