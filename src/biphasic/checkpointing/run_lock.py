"""Lock a run's folder so that only one process trains the run, and record each attempt."""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

from biphasic.errors import UserError, first_line
from biphasic.storage import Store, json_bytes, open_store, user_errors

LOCK_FILE = "lock.json"
ATTEMPTS, CLAIMS = "attempts", "claims"
HEARTBEAT_SECONDS, LEASE_SECONDS = 15.0, 60.0
"""Seconds between two heartbeats, and seconds without a heartbeat after which a lock expires."""
_OWNER = ("attempt", "host", "pid", "process", "since")
KILLED = "ended without a message (killed, or its machine was lost)"
_log = logging.getLogger(__name__)


class RunLock:
    """A lock on the folder that a run saves to.

    The lock is a small file with a heartbeat. It expires after `LEASE_SECONDS` without a heartbeat, or as soon as its
    process, if it ran on this machine, no longer exists. Clocks of different machines are never compared. Each attempt has a
    file in `attempts/` with its start, its progress and the reason why it ended.

    Before writing the lock, each start writes its own claim in `claims/` and lists all claims. Of two simultaneous
    starts, at least the one that writes its claim last sees the other's. The one with the later name withdraws its
    claim and waits; the other one waits for that. So only one of them writes the lock, on any store whose listings show
    each finished write. Conditional writes would need an SDK for each kind of store, and some S3 servers ignore them.

    Messages name the YAML key of the destination (`key`), and the one to change to run beside the holder (`alternative`).

    Attributes:
        lost: None, or a message that names who took the lock after this process could not write its heartbeat.
        killed: record of the attempt whose expired lock this process took; None if there was none.
    """

    def __init__(self, destination: str, key: str = "checkpoint.folder", alternative: str = "run_name"):
        self._destination = destination
        self._name, self._alternative = f"{key} {destination}", alternative
        self.lost: str | None = None
        self.killed: dict[str, Any] | None = None
        self._record: dict[str, Any] | None = None
        self._closing = Event()
        self._thread = Thread(target=self._send_heartbeats, name="run-lock", daemon=True)

    def acquire(self, ranks: int) -> str:
        """Acquire the lock; return the attempt's name. Raises a UserError if the lock is held or can't be written."""
        with user_errors(f"{self._name}: can't be read and written"):
            folder = open_store(self._destination)
            name = _next_name(max(folder.list(ATTEMPTS), default=""))
            record = {"attempt": name, "host": socket.gethostname(), "pid": os.getpid(), "process": process_id(os.getpid()),
                      "since": _now(), "ranks": ranks, "beat": 0, "batch": 0, "tokens": 0, "from": None}  # fmt: skip
            try:
                self._take_lock(folder, record)
            finally:
                folder.remove([_claim(name)])
            _write_attempt(folder, record)
        self._record = record
        self._thread.start()
        return name

    def explain_killed(self, cause: str) -> None:
        """Add to the killed attempt's record how its ranks ended."""
        if self.killed is not None:
            killed = self.killed | {"reason": f"{self.killed['reason']}: {cause}"}
            with suppress(OSError):
                _write_attempt(open_store(self._destination), killed)

    def record_start(self, batch: int, tokens: int) -> None:
        """Record the checkpoint that the attempt resumes from."""
        if self._record is not None:
            self._record["from"] = {"batch": batch, "tokens": tokens}
            self.record_progress(batch, tokens)
            with suppress(OSError):
                _write_attempt(open_store(self._destination), self._record)

    def record_progress(self, batch: int, tokens: int) -> None:
        """Record the attempt's progress, which the next heartbeat writes."""
        if self._record is not None:
            self._record.update(batch=batch, tokens=tokens)

    def record_reason(self, reason: str) -> None:
        """Record why the attempt ends, before it closes: it may be killed before it releases the lock."""
        with suppress(OSError, UserError):
            if self._record is not None:
                _write_attempt(open_store(self._destination), {**self._record, "until": _now(), "reason": reason})

    def release(self, reason: str) -> None:
        """Release the lock and record why the attempt ended."""
        self._closing.set()
        if self._record is None:
            return
        self._thread.join()
        try:
            folder = open_store(self._destination)
            _write_attempt(folder, {**self._record, "until": _now(), "reason": reason})
            current = _read_lock(folder)
            # Another start may have taken the lock since the last heartbeat.
            if current is not None and current["attempt"] == self._record["attempt"]:
                folder.remove([LOCK_FILE])
        except (OSError, UserError) as error:
            _log.warning("%s: the end of this attempt can't be written there (%s)", self._name, first_line(error))
        self._record = None

    def _send_heartbeats(self) -> None:
        assert self._record is not None
        while not self._closing.wait(HEARTBEAT_SECONDS):
            try:
                folder = open_store(self._destination)
                current = _read_lock(folder)
                if current is not None and current["attempt"] != self._record["attempt"]:
                    message = self._held_message(current)
                    self.lost = f"{message}. This run's heartbeat was late, so its lock expired and it stops"
                    return
                self._record["beat"] += 1
                folder.write(LOCK_FILE, json_bytes(self._record))
            except Exception as error:
                _log.debug("no heartbeat in %s: %s", self._destination, first_line(error))

    def _take_lock(self, folder: Store, record: dict[str, Any]) -> None:
        """Write the lock once no other start claims it. First record how the attempt of an expired lock ended."""
        claim = _claim(record["attempt"])
        while True:
            previous = self._expired_lock(folder)
            folder.write(claim, json_bytes(record))
            names = [name for name in folder.list(CLAIMS) if name != claim]  # earliest first
            # One that is missing was withdrawn since it was listed.
            others = [found for name in names if (found := _read_record(folder, name, set(_OWNER))) is not None]
            if others and others[0]["attempt"] < record["attempt"]:
                folder.remove([claim])
                self._wait_for_claim(folder, others[0])
                continue
            for other in others:
                self._wait_for_claim(folder, other)
            current = _read_lock(folder)
            if current is not None and current != previous:
                raise UserError(self._held_message(current))
            if previous is not None:
                # This process may be killed as soon as it has the lock, and the next one knows only this process's attempt.
                recorded = _read_record(folder, f"{ATTEMPTS}/{previous['attempt']}.json", {"attempt"}) or {}
                about = {"until": None, "reason": recorded.get("reason", KILLED)}
                self.killed = _newest(recorded, previous) | about
                _write_attempt(folder, self.killed)
            folder.write(LOCK_FILE, json_bytes(record))
            return

    def _expired_lock(self, folder: Store) -> dict[str, Any] | None:
        """Return the lock in the folder once it has expired; None if there is none, or its owner has released it."""
        previous = _read_lock(folder)
        alive = False if previous is None else is_alive_here(previous["process"])
        if previous is None or alive is False:
            return previous
        if alive:
            raise UserError(self._held_message(previous))
        waiting = f"waiting {LEASE_SECONDS:.0f} s for a heartbeat"
        print(f"{self._destination} is locked by {_owner(previous)}; {waiting}", flush=True)
        for _ in _polls():
            current = _read_lock(folder)
            if current is None:
                return None
            if (current["attempt"], current["beat"]) != (previous["attempt"], previous["beat"]):
                raise UserError(self._held_message(current))
        return previous

    def _wait_for_claim(self, folder: Store, claim: dict[str, Any]) -> None:
        """Wait until another start's claim is gone, or remove it if its process has ended."""
        print(f"{self._destination}: another start ({_owner(claim)}) is claiming the lock; waiting for it", flush=True)
        for _ in _polls():
            if is_alive_here(claim["process"]) is False:
                break
            is_gone, lock = folder.stat(_claim(claim["attempt"])) is None, _read_lock(folder)
            if lock is not None and lock["attempt"] == claim["attempt"]:
                raise UserError(self._held_message(lock))
            if is_gone:
                return
        folder.remove([_claim(claim["attempt"])])

    def _held_message(self, lock: dict[str, Any]) -> str:
        message = f"{self._name} is locked by a running process: {_owner(lock)}"
        return f"{message}. Stop it, or choose another {self._alternative}"


def read_attempts(folder: Store) -> list[dict[str, Any]]:
    """Return the records of all attempts, oldest first. Raises an OSError if the folder can't be read.

    Keys: `attempt`, `host`, `pid`, `since`, `ranks`, `from`, `batch`, `tokens`; when it has ended also `until` and `reason`.
    """
    names = [name for name in folder.list(ATTEMPTS) if name.endswith(".json")]
    records = [record for name in names if (record := _read_record(folder, name, {"attempt"})) is not None]
    lock = _read_lock(folder) or {"attempt": None}
    return [_newest(record, lock) if record["attempt"] == lock["attempt"] else record for record in records]


def _newest(record: dict[str, Any], lock: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of an attempt: its first heartbeat may come after its record has the start's checkpoint."""
    return record | lock if lock.get("from") else lock | record


def _next_name(newest: str) -> str:
    """Return a name for an attempt that sorts after the newest one's file, also if this machine's clock is behind it."""
    # Microseconds, because a short run ends and starts again within a second.
    start = datetime.now(UTC).replace(tzinfo=None)
    with suppress(ValueError):  # another program's file
        before = datetime.strptime(Path(newest).name[:22], "%Y%m%dT%H%M%S.%f")
        start = max(start, before + timedelta(microseconds=1))
    return f"{start:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_attempt(folder: Store, record: dict[str, Any]) -> None:
    folder.write(f"{ATTEMPTS}/{record['attempt']}.json", json_bytes(record))


def _read_lock(folder: Store) -> dict[str, Any] | None:
    return _read_record(folder, LOCK_FILE, {*_OWNER, "beat"})


def _read_record(folder: Store, name: str, keys: set[str]) -> dict[str, Any] | None:
    """Return a lock, a claim or the record of an attempt; None if there is no such file."""
    for pause in (0.2, 1.0, 0.0):  # `rclone serve s3` sends a part of a file that is being replaced
        try:
            content = folder.read(name)
        except FileNotFoundError:
            return None
        with suppress(ValueError):
            record = json.loads(content)
            if isinstance(record, dict) and record.keys() >= keys:
                return record
        time.sleep(pause)
    kind = "lock" if name == LOCK_FILE else "record"
    raise UserError(f"{folder.root}/{name}: is not a run's {kind}; remove it if no run writes there")


def _claim(attempt: str) -> str:
    return f"{CLAIMS}/{attempt}.json"


def _polls() -> Iterator[None]:
    """Yield about once a second, until `LEASE_SECONDS` have passed."""
    end = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, LEASE_SECONDS / 10))
        yield


def _owner(lock: dict[str, Any]) -> str:
    return f"process {lock['pid']} on {lock['host']}, since {lock['since']}"


def process_id(pid: int) -> list[str]:
    """Return an id that is unique across machines: boot id, PID namespace, PID and start time of the process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The command name, in parentheses, may contain spaces. After it come the state and, 19 fields later, the start time.
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended, and its parent has not read its status")
    return [boot, os.readlink("/proc/self/ns/pid"), str(pid), fields[18]]


def is_alive_here(process: list[str]) -> bool | None:
    """Return whether a process of this machine still exists; None if this is unknown, as for those of other machines."""
    if process[:2] != process_id(os.getpid())[:2]:
        return None
    pid = int(process[2])
    try:
        with suppress(FileNotFoundError, PermissionError):  # /proc may hide other users' processes (`hidepid`)
            return process_id(pid) == process
        with suppress(PermissionError):
            os.kill(pid, 0)
        return None
    except OSError:
        return False
