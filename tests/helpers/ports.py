"""TCP ports for servers and process groups that tests start."""

from __future__ import annotations

import secrets
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, below those that the kernel gives to connections.

    A port of the kernel's choice could go to a connection of another job before this one listens on it.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
