"""Who leads among the dispatchers, and how the leader hears of work."""

from __future__ import annotations

from service.store.session import Database

LEADER_LOCK = 0x7472756E6B  # "trunk"


class Leader:
    """Holds the advisory lock of the leading dispatcher, and hears NOTIFY, on one connection of its own."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect_raw("leader")
        self._connection.execute("listen dispatch")

    def leads(self) -> bool:
        """True once this process holds the lock (asking again is free: the lock is the session's)."""
        row = self._connection.execute("select pg_try_advisory_lock(%s)", [LEADER_LOCK]).fetchone()
        return bool(row and row[0])

    def wait(self, seconds: float) -> None:
        """Until somebody says there is work, or `seconds` passed."""
        for _ in self._connection.notifies(timeout=seconds, stop_after=1):
            return

    def close(self) -> None:
        self._connection.close()
