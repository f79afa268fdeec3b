"""Who runs what, when several machines work on one sweep.

Each driver has one file beside the records, `claims/<driver>.json`, with the trials that it runs now. The file changes every
`BEAT` seconds. One that doesn't change for `EXPIRES` seconds, by the clock of whoever looks, is a dead driver's, and so is
that of a process of this machine that is no more; clocks of different machines are never compared.

A driver first writes that it wants a trial, and looks at the others' files after that. Of two that want the same one, at
least the later one to write sees it, and leaves it; when both see it, the one whose name comes first keeps it once the
other has let it go. So two that are alive never run a trial at the same time. Should it happen after all (a driver that
could not be heard for a minute), its record is the same twice.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection
from datetime import UTC, datetime
from threading import Event, Lock, Thread
from typing import Any

from biphasic.checkpointing.claim import BEAT, EXPIRES, is_dead_here, process_of
from biphasic.storage import Store, as_bytes, short

CLAIMS = "claims"
_WAITS = (0.1, 0.2, 0.4, 0.8)
"""Seconds between looks at a trial that another driver wants at the same moment."""
_log = logging.getLogger(__name__)


class _Other:
    """Another driver, as its file was last seen."""

    def __init__(self, version: str, about: dict[str, Any]):
        self.version, self.about = version, about
        self.changed = time.monotonic()


class Claims:
    """This driver's claims, and those of others.

    `elsewhere` is what others who are alive run, as of the last `look`; `others` says who they are.
    """

    def __init__(self, place: Store):
        self._place = place
        self.driver = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._file = f"{CLAIMS}/{self.driver}.json"
        self._mine: set[str] = set()
        self._beat = 0
        self._seen: dict[str, _Other] = {}
        self._known: dict[str, _Other] = {}
        self._lock = Lock()
        self._closing = Event()
        self._thread: Thread | None = None

    def __enter__(self) -> Claims:
        self._thread = Thread(target=self._live, name="claims", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._place.remove([self._file])
        except OSError as error:
            _log.warning("%s/%s: can't be removed (%s)", self._place.root, self._file, short(error))

    @property
    def elsewhere(self) -> set[str]:
        """Trials that other drivers run who are alive."""
        return {trial for other in self._known.values() for trial in other.about["trials"]}

    @property
    def others(self) -> list[str]:
        """Other drivers that are alive, for a person."""
        return [f"process {other.about['pid']} on {other.about['host']}" for other in self._known.values()]

    def take(self, wanted: Collection[str]) -> set[str]:
        """Claim these trials; returns those that are this driver's now.

        Raises:
            OSError: the place can't be written or read; nothing of it is claimed.
        """
        asked = set(wanted) - self.elsewhere
        if not asked:
            return set()
        try:
            self._change(add=asked)
            self.look()
            for wait in _WAITS:
                if not self._keep(asked):
                    break
                # Its driver sees ours too, and leaves it if it hasn't begun.
                time.sleep(wait)
                self.look()
            if lost := asked & self.elsewhere:
                self._change(drop=lost)
        except OSError:
            self._mine -= asked
            raise
        return asked - lost

    def drop(self, trials: Collection[str]) -> None:
        """They have a record, or were given up. The file says so with its next change."""
        with self._lock:
            self._mine -= set(trials)

    def look(self) -> bool:
        """Read what others say; returns whether anything has changed since.

        Raises:
            OSError: the place can't be read.
        """
        before = {name: other.about for name, other in self._known.items()}
        seen: dict[str, _Other] = {}
        for name, stored in self._place.list(CLAIMS).items():
            other = self._seen.get(name)
            # A time may be the same after two changes in a row; an ETag isn't.
            same = other is not None and other.version == stored.version and not stored.version.startswith("mtime:")
            if name == self._file:
                continue
            about = other.about if other is not None and same else self._read(name)
            if about is None:
                continue
            seen[name] = other if other is not None and other.about == about else _Other(stored.version, about)
        self._seen = seen
        dead = [name for name, other in seen.items() if _is_dead(other)]
        self._known = {name: other for name, other in seen.items() if name not in dead}
        self._place.remove(dead)
        return before != {name: other.about for name, other in self._known.items()}

    def _keep(self, asked: set[str]) -> set[str]:
        """Those that another one wants too and that are to be this driver's, whose name comes first, if it leaves them."""
        return {
            trial
            for other in self._known.values()
            for trial in asked & set(other.about["trials"])
            if self.driver < other.about["driver"] and trial in other.about["new"]
        }

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self._place.read(name))
            return {"new": [], **found} if {"driver", "pid", "host", "process", "trials"} <= found.keys() else None
        except (FileNotFoundError, ValueError, AttributeError):
            return None

    def _change(self, add: set[str] | None = None, drop: set[str] | None = None) -> None:
        with self._lock:
            self._mine = self._mine | (add or set()) if drop is None else self._mine - drop
            self._write(add or set())

    def _write(self, new: set[str]) -> None:
        self._beat += 1
        pid = os.getpid()
        about = {"driver": self.driver, "host": socket.gethostname(), "pid": pid, "process": process_of(pid),
                 "beat": self._beat, "trials": sorted(self._mine), "new": sorted(new)}  # fmt: skip
        self._place.write(self._file, as_bytes(about))

    def _live(self) -> None:
        while not self._closing.wait(BEAT):
            try:
                with self._lock:
                    self._write(set())
            except Exception as error:
                _log.debug("no sign of life in %s: %s", self._place.root, short(error))


def _is_dead(other: _Other) -> bool:
    return is_dead_here(other.about["process"]) or time.monotonic() - other.changed >= EXPIRES
