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

_TIMEOUT_SECONDS = 5.0
"""Seconds to wait for the server, and at the end of the run for the last messages."""
_QUIET_SECONDS = {"spike": 600.0, "skipped": 600.0}
"""Seconds after a message in which the next ones about the same event are left out: a diverging run has many spikes."""
_log = logging.getLogger(__name__)


class Webhook:
    """Posts events as JSON, from a thread: `text`, `run`, `event`, `batch`, `message`, `host`.

    `variable` is the name of the environment variable with the URL, which is a secret: no message contains it. None: nothing
    is sent. Nothing is raised; the first message that can't be delivered is a warning.
    """

    def __init__(self, variable: str | None, run: str):
        self._url = "" if variable is None else os.environ.get(variable, "")
        self._run, self._host = run, socket.gethostname()
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._has_failed = False
        self._sent_at: dict[str, float] = {}
        if variable is not None and not self._url.startswith(("https://", "http://")):
            _log.warning("webhook: the environment variable %s isn't set to a URL: no message is sent", variable)
            self._url = ""

    def send(self, event: str, message: str, batch: int | None = None) -> None:
        """Queue a message about an event, and return at once."""
        now = time.monotonic()
        if not self._url or now - self._sent_at.get(event, float("-inf")) < _QUIET_SECONDS.get(event, 0.0):
            return
        self._sent_at[event] = now
        at = "" if batch is None else f" at batch {batch:,}"
        text = f"{self._run}: {event}{at} on {self._host}: {message}"
        if self._thread is None:
            self._thread = Thread(target=self._post_all, name="webhook", daemon=True)
            self._thread.start()
        content = {"text": text, "run": self._run, "event": event, "batch": batch}
        self._queue.put({**content, "message": message, "host": self._host})

    def close(self) -> None:
        """Wait up to five seconds until the queued messages are delivered. Nothing can be sent afterwards."""
        self._url = ""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_TIMEOUT_SECONDS)

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
                    reason = type(getattr(error, "reason", error)).__name__
                    reason = f"status {error.code}" if isinstance(error, HTTPError) else reason
                    _log.warning("webhook: %r can't be delivered (%s)", content["event"], reason)
                self._has_failed = True
