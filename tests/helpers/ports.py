"""TCP ports for servers and process groups that tests start."""

import secrets
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen


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


def answers(address: str) -> bool:
    """Whether a server answers anything at the address."""
    try:
        urlopen(Request(address), timeout=5).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True
