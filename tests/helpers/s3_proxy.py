"""A bad network and a busy store: a proxy that answers some requests to an S3 server with faults."""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"""
KINDS = ("500", "503", "reset", "truncated", "stall")


class Proxy:
    """Forwards to `port` and gives faults at `rate`, drawn in the order of requests; `away` refuses all of them.

    `given` counts the faults by kind. At most `stalls` requests wait for `stall_seconds` before they are answered.

    Every answer comes after `latency` seconds, and all connections together have `bandwidth` bytes a second, if it isn't
    zero. `requests` counts the requests by kind: GET, HEAD, PUT, POST, DELETE, and LIST.
    """

    def __init__(self, port: int, rate: float = 0.0, seed: int = 5, stall_seconds: float = 0.0, stalls: int = 0):
        self.port, self.rate, self.stall_seconds, self.stalls = port, rate, stall_seconds, stalls
        self.away = False
        self.latency, self.bandwidth = 0.0, 0.0
        self.requests: Counter[str] = Counter()
        self._free_at = 0.0
        self.given: dict[str, int] = dict.fromkeys((*KINDS, "away", "none"), 0)
        self._draw, self._lock = random.Random(seed), threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fault(self) -> str:
        with self._lock:
            kind = "none"
            if self.away:
                kind = "away"
            elif self._draw.random() < self.rate:
                kind = self._draw.choice(KINDS)
                if kind == "stall" and self.given["stall"] >= self.stalls:
                    kind = "503"
            self.given[kind] += 1
            return kind

    def count(self, command: str, path: str) -> None:
        is_list = "list-type" in parse_qs(urlsplit(path).query, keep_blank_values=True)
        with self._lock:
            self.requests["LIST" if is_list else command] += 1

    def transfer(self, size: int) -> None:
        """Wait until that many bytes have passed, after those of the other connections."""
        if not self.bandwidth:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bandwidth
            free_at = self._free_at
        time.sleep(max(free_at - time.monotonic(), 0.0))

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    # An answer goes out whole and at once: its second packet would wait 40 ms for the reader's word on the first.
    wbufsize, disable_nagle_algorithm = -1, True

    def _forward(self) -> None:
        self.proxy.count(self.command, self.path)
        fault = self.proxy.fault()
        if fault == "reset":
            self._reset()
            return
        body = self._body()
        self.proxy.transfer(len(body))
        time.sleep(self.proxy.latency)
        if fault in ("500", "503", "away"):
            self._answer(500 if fault == "500" else 503, {"Content-Type": "application/xml"}, SLOW_DOWN)
            return
        if fault == "stall":
            time.sleep(self.proxy.stall_seconds)
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=120)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        upstream.request(self.command, self.path, body=body, headers=headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        self.proxy.transfer(len(content))
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in
                ("transfer-encoding", "connection", "content-length")}  # fmt: skip
        if self.command == "HEAD":
            self._answer(answer.status, {**kept, "Content-Length": answer.headers.get("Content-Length", "0")}, b"")
        elif fault == "truncated" and content:
            self._answer(answer.status, kept, content, cut=len(content) // 2)
        elif fault == "truncated":
            # Nothing to cut in the answer: the request did its work, and its answer is lost.
            self._reset()
        else:
            self._answer(answer.status, kept, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.flush()  # the 100 that `parse_request` has written, for which a client waits a second
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if cut is None else content[:cut])
        if cut is not None:
            self.close_connection = True

    def _reset(self) -> None:
        # A close with unread data and no lingering is a reset to the other side.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            super().handle()

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass
