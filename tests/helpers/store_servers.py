"""Servers of other kinds of stores than `s3_server.py` runs: a second S3, Azure's blobs and Google's objects.

Each answers on this machine. What is missing skips the tests that need it, with the command that installs it.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from helpers.ports import answers, free_port
from helpers.premises_servers import PREMISES
from helpers.s3_server import s3_environment

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that Azurite documents; it has no other."""
_GOOGLE = """
# The emulator serves one connection at a time: an open one without a request would hold up all others.
import http.server
http.server.HTTPServer = http.server.ThreadingHTTPServer
from gcp_storage_emulator.__main__ import main
main()
"""
Environment = dict[str, str]


@contextmanager
def moto(folder: Path) -> Iterator[Environment]:
    """S3 as moto answers, in memory."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: make env")
    port = free_port()
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}/"):
        yield s3_environment(port)


@contextmanager
def azurite(folder: Path) -> Iterator[Environment]:
    """Azure's own emulator of blobs."""
    program = shutil.which("azurite-blob", path=f"{sys.prefix}/node_modules/.bin:{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("Azurite is not installed: make stores (needs Node.js)")
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    with _running([program, *options, "--skipApiVersionCheck", "--disableTelemetry"], f"http://127.0.0.1:{port}/"):
        yield {
            "AZURE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_ACCOUNT_ACCESS_KEY": AZURE_KEY,
            "AZURE_STORAGE_SERVICE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
        }


@contextmanager
def google(folder: Path) -> Iterator[Environment]:
    """An emulator of Google Cloud Storage; credentials are a service account's, whose tokens a server here gives."""
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        pytest.skip("gcp-storage-emulator is not installed: make env")
    port, tokens = free_port(), ThreadingHTTPServer(("127.0.0.1", 0), _Tokens)
    threading.Thread(target=tokens.serve_forever, daemon=True).start()
    credentials = folder / "service-account.json"
    credentials.write_text(json.dumps(_service_account(f"http://127.0.0.1:{tokens.server_address[1]}/token")))
    command = [sys.executable, "-c", _GOOGLE, "start", "--host", "127.0.0.1", "--port", str(port)]
    try:
        with _running([*command, "--in-memory"], f"http://127.0.0.1:{port}/"):
            yield {
                "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
                "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
                "GOOGLE_CLOUD_PROJECT": "biphasic",
            }
    finally:
        tokens.shutdown()
        tokens.server_close()


class _Tokens(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        content = json.dumps({"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _service_account(token_uri: str) -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        "type": "service_account",
        "project_id": "biphasic",
        "private_key_id": "test",
        "private_key": text.decode(),
        "client_email": "test@biphasic.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }


@contextmanager
def _running(command: list[str], address: str) -> Iterator[None]:
    """Run a server until the end of the block, which begins when it answers anything."""
    # Not a pipe: a server logs each request, and would stop once nobody has read 64 KiB of them.
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + 60
        try:
            while not answers(address):
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} does not answer: {log.read()}")
                time.sleep(0.05)
            yield
        finally:
            server.terminate()
            server.wait(10)


SERVERS = {"moto": moto, "azurite": azurite, "google": google, **PREMISES}
STORES = ["rclone", *SERVERS]
"""Kinds of buckets; `rclone`, the S3 server of `s3_server.py`, is always installed."""
