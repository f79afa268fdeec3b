"""A chat's incoming webhook for tests: an HTTP server that keeps what is posted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

VARIABLE = "CANARY_WEBHOOK"
SECRET = "canary-token-of-the-webhook"


class ChatServer(ThreadingHTTPServer):
    """The server; `messages` are the posted ones. It answers with `status`, after `seconds`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[dict[str, Any]] = []
        self.status, self.seconds, self.requests = 200, 0.0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/{SECRET}"

    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        server.requests += 1
        content = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(server.seconds)
        assert self.path == f"/services/{SECRET}" and self.headers["Content-Type"] == "application/json"
        if server.status == 200:
            server.messages.append(json.loads(content))
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
