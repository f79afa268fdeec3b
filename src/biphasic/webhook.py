"""Post a run's events to a chat's incoming webhook, such as Slack's or Mattermost's."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from queue import SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

_TIMEOUT_SECONDS, _CLOSE_SECONDS = 5.0, 5.0
_QUIET_SECONDS = 600.0
"""Seconds after a message about a batch in which the next ones of its kind are only counted: a diverging run has a spike in
many consecutive batches."""
_OF_BATCHES = ("spike", "skipped")
_log = logging.getLogger(__name__)


class Webhook:
    """Posts events as JSON, from a thread: `text`, `run`, `event`, `batch`, `message`, `host`.

    Events: `spike`, `skipped` (a batch), `resumed`, `preempted`, `finished`, `failed`. Nothing is raised; the first
    message that can't be delivered is a warning.

    `variable` is the name of the environment variable with the URL, which is a secret: no message contains it. None: nothing
    is sent.
    """

    def __init__(self, variable: str | None, run: str):
        self._url = "" if variable is None else os.environ.get(variable, "")
        self._run, self._host = run, socket.gethostname()
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._has_failed = False
        self._sent_at: dict[str, float] = {}
        self._held: dict[str, int] = dict.fromkeys(_OF_BATCHES, 0)
        if variable is not None and not self._url.startswith(("https://", "http://")):
            state = "isn't a URL with http:// or https://" if self._url else "isn't set"
            _log.warning("webhook: the environment variable %s %s: no message is sent", variable, state)
            self._url = ""

    def send(self, event: str, message: str, batch: int | None = None) -> None:
        """Queue a message about an event, and return at once."""
        if not self._url:
            return
        if event in self._held:
            now = time.monotonic()
            if now - self._sent_at.get(event, -_QUIET_SECONDS) < _QUIET_SECONDS:
                self._held[event] += 1
                return
            self._sent_at[event], held = now, self._held[event]
            self._held[event] = 0
            message += f" ({held:,} more since the last message)" if held else ""
        at = "" if batch is None else f" at batch {batch:,}"
        text = f"{self._run}: {event}{at} on {self._host}: {message}"
        if self._thread is None:
            self._thread = Thread(target=self._post_all, name="webhook", daemon=True)
            self._thread.start()
        fields = {"run": self._run, "event": event, "batch": batch, "message": message, "host": self._host}
        self._queue.put({"text": text, **fields})

    def close(self) -> None:
        """Wait up to five seconds until the queued messages are delivered. Nothing can be sent afterwards."""
        self._url = ""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _post_all(self) -> None:
        url = self._url
        while (content := self._queue.get()) is not None:
            try:
                headers = {"Content-Type": "application/json"}
                with urlopen(Request(url, json.dumps(content).encode(), headers), timeout=_TIMEOUT_SECONDS):
                    pass
            except Exception as error:
                if not self._has_failed:
                    # Not the error's message, which may contain the URL.
                    cause = getattr(error, "reason", error)
                    reason = getattr(cause, "strerror", None) or type(cause).__name__
                    reason = f"status {error.code}" if isinstance(error, HTTPError) else reason
                    _log.warning("webhook: %r can't be delivered (%s)", content["event"], reason)
                self._has_failed = True
