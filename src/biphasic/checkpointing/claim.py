"""One writer for a run's folder, and what is remembered of each attempt to train it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from biphasic.config.errors import UserError
from biphasic.storage import Store, as_bytes, short, store

CLAIM = "claim.json"
ATTEMPTS = "attempts"
BEAT, EXPIRES = 15.0, 60.0
"""Seconds between two signs of life, and without one until a claim is nobody's."""
SILENT = "ended without a word (killed, or its machine was lost)"
_SETTLE = 0.5
_log = logging.getLogger(__name__)


class Claim:
    """This process's hold on the folder that a run saves to.

    The claim is a small file that changes every `BEAT` seconds. A claim that doesn't change for `EXPIRES` seconds is a
    dead run's, and so is that of a process of this machine that is no more; clocks of different machines are never
    compared. Each attempt also leaves a file in `attempts/`, from its start to the reason of its end.

    `lost` is None, or says who has taken the folder over while this process could not be heard.
    """

    def __init__(self, place: str):
        self._place = place
        self.lost: str | None = None
        self._mine: dict[str, Any] | None = None
        self._closing = Event()
        self._thread: Thread | None = None

    def take(self, ranks: int) -> str:
        """Claim the folder; returns the attempt's name.

        Raises:
            UserError: another run holds it, or it can't be written to.
        """
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        about = {"attempt": name, "host": socket.gethostname(), "pid": os.getpid(), "process": process_of(os.getpid()),
                 "since": _now(), "ranks": ranks, "beat": 0, "batch": 0, "tokens": 0, "from": None}  # fmt: skip
        try:
            place = store(self._place)
            if (before := _read(place)) is not None:
                self._wait_until_dead(place, before)
            place.write(CLAIM, as_bytes(about))
            time.sleep(_SETTLE if before is not None else 0)
            if (found := _read(place)) is not None and found["attempt"] != name:
                raise UserError(_held(self._place, found))
            if before is not None:
                _remember(place, {**before, "until": None, "reason": SILENT})
            _remember(place, about)
        except OSError as error:
            raise UserError(f"checkpoint.folder {self._place}: can't be read and written ({short(error)})") from error
        self._mine = about
        self._thread = Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()
        return name

    def starts_from(self, batch: int, tokens: int) -> None:
        """Remember the checkpoint that the attempt goes on from."""
        if self._mine is not None:
            self._mine["from"] = {"batch": batch, "tokens": tokens}
            self.reached(batch, tokens)
            with suppress(OSError):
                _remember(store(self._place), self._mine)

    def reached(self, batch: int, tokens: int) -> None:
        """Remember how far the attempt is; the next sign of life says it."""
        if self._mine is not None:
            self._mine.update(batch=batch, tokens=tokens)

    def release(self, reason: str) -> None:
        """End the attempt, with the reason, and let the folder go."""
        self._closing.set()
        if self._mine is None or self._thread is None:
            return
        self._thread.join()
        try:
            place = store(self._place)
            _remember(place, {**self._mine, "until": _now(), "reason": reason})
            if self.lost is None:
                place.remove([CLAIM])
        except OSError as error:
            _log.warning(
                "checkpoint.folder %s: the end of this attempt can't be written there (%s)", self._place, short(error)
            )
        self._mine = None

    def _beat(self) -> None:
        assert self._mine is not None
        while not self._closing.wait(BEAT):
            try:
                place = store(self._place)
                found = _read(place)
                if found is not None and found["attempt"] != self._mine["attempt"]:
                    self.lost = f"{_held(self._place, found)}; this run could not be heard for a while, and stops"
                    return
                self._mine["beat"] += 1
                place.write(CLAIM, as_bytes(self._mine))
            except Exception as error:
                _log.debug("no sign of life in %s: %s", self._place, short(error))

    def _wait_until_dead(self, place: Store, before: dict[str, Any]) -> None:
        if is_dead_here(before["process"]):
            return
        print(f"{self._place} is claimed by {_who(before)}; waiting {EXPIRES:.0f} s for a sign of life", flush=True)
        end = time.monotonic() + EXPIRES
        while time.monotonic() < end:
            time.sleep(min(1.0, EXPIRES / 10))
            now = _read(place)
            if now is None:
                return
            if (now["attempt"], now["beat"]) != (before["attempt"], before["beat"]):
                raise UserError(_held(self._place, now))


def attempts_in(place: Store) -> list[dict[str, Any]]:
    """What is remembered of each attempt, the first one first: attempt, host, pid, since, ranks, from, batch, tokens, and at
    its end until and reason. The one that holds the folder has none of the last two.

    Raises:
        OSError: the place can't be read.
    """
    found = [json.loads(place.read(name)) for name in place.list(ATTEMPTS) if name.endswith(".json")]
    held = _read(place)
    return [{**one, **held} if held is not None and held["attempt"] == one["attempt"] else one for one in found]


def _remember(place: Store, about: dict[str, Any]) -> None:
    place.write(f"{ATTEMPTS}/{about['attempt']}.json", as_bytes(about))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(place: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read(CLAIM))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    needed = ("attempt", "host", "pid", "process", "since", "beat")
    if not isinstance(found, dict) or any(name not in found for name in needed):
        raise UserError(f"{place.root}/{CLAIM}: is no claim of a run; remove it when no run writes there")
    return found


def _who(claim: dict[str, Any]) -> str:
    return f"process {claim['pid']} on {claim['host']}, since {claim['since']}"


def _held(place: str, claim: dict[str, Any]) -> str:
    said = f"checkpoint.folder {place} belongs to another run that is alive: {_who(claim)}"
    return f"{said}. Stop that one, or choose another run_name"


def process_of(pid: int) -> list[str]:
    """What tells a process from all others: the machine's boot, the namespace of its number, the number, its start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The command's name, in brackets, may hold spaces; the 20th field after it is the start time.
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return [boot, os.readlink("/proc/self/ns/pid"), str(pid), start]


def is_dead_here(process: list[str]) -> bool:
    """Whether it was a process of this machine that is no more; False for those of others."""
    if process[:2] != process_of(os.getpid())[:2]:
        return False
    try:
        return process_of(int(process[2])) != process
    except OSError:
        return True
