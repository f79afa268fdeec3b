"""A real S3 server for tests."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEY, SECRET = "biphasic:tester", "sec/ret+1="
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    # rclone gives a part of a file the checksum of the whole, which pyarrow then finds wrong.
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}
"""Environment variables of the server's clients, besides its address."""


def s3_environment(port: int) -> dict[str, str]:
    """The environment that leads to another server of S3 on this machine; a request is sent once."""
    return {
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


def serve_s3(root: Path, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start a server and wait until it answers; returns it and its port, a free one if none is given."""
    rclone = Path(sys.executable).parent / "rclone"
    keys = ["--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
    command = [rclone, "serve", "s3", root, "--addr", f"127.0.0.1:{port}", *keys]
    with tempfile.NamedTemporaryFile("w") as output:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output, text=True)
        deadline = time.monotonic() + 60
        # A port that was looked for beforehand could be another process's by now.
        while not (address := re.search(r"http://127\.0\.0\.1:(\d+)/", text := Path(output.name).read_text())):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise RuntimeError(f"rclone serve s3 does not answer: {text}")
            time.sleep(0.02)
    return server, int(address[1])
