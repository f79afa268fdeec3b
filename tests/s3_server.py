"""A real S3 server for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

KEY, SECRET = "biphasic-test-key", "biphasic-test-secret"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def serve_s3(root: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server, and wait until it answers."""
    rclone = Path(sys.executable).parent / "rclone"
    keys = ["--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
    server = subprocess.Popen(
        [rclone, "serve", "s3", root, "--addr", f"127.0.0.1:{port}", *keys],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, server)
    except BaseException:
        server.kill()
        raise
    return server


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"rclone ended with status {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("rclone serve s3 does not answer")
