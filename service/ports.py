"""Loopback TCP ports: drawing a free one, and seeing whether one is free."""

from __future__ import annotations

import socket
import time


def free_port(host: str = "127.0.0.1") -> int:
    """A port that the operating system says is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind it now (connections of a former server that linger do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def wait_port_free(port: int, *, seconds: float, host: str = "127.0.0.1") -> bool:
    """Give a dying predecessor a moment to let go of the port."""
    deadline = time.monotonic() + seconds
    while not is_port_free(port, host):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
