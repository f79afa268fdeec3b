"""A conversion's output: what lies there, who writes it, and whether it is whole."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from biphasic.config.errors import UserError
from biphasic.data.sources import SourceFile
from biphasic.data.work import FREE, LIMITS, Record, Task, Work
from biphasic.storage import LocalStore, Store, as_bytes, is_remote, join, short, store

RECORD = "conversion.json"
"""What a conversion says about itself; written last, so that its presence means that the output is whole."""
STARTED = "conversion.started"
"""Lies in an output from a conversion's start to its end: what lies beside it is a part of a conversion."""
LOG = "conversion.log"
_READERS = 32
_LOG_SECONDS = 30


@dataclass
class Claim:
    """An output that this process writes. `records` are those that lay there, by task."""

    output: str
    store: Store
    records: dict[str, Record]
    log: Log


def read_record(output: str) -> dict[str, Any] | None:
    """The record of the finished conversion at `output`; None when nothing is there, or only an unfinished one.

    Raises:
        UserError: `output` holds something else, or a conversion that lost files, or can't be read.
    """
    place = store(output)
    files = _listed(place)
    if RECORD in files:
        record = _json(place, RECORD)
        for split, part in record["splits"].items():
            for shard in part["shards"]:
                name, size = f"{split}/{shard['file']}", shard["bytes"]
                if name not in files or files[name] != size:
                    what = "is missing" if name not in files else f"has {files[name]} bytes instead of {size}"
                    raise UserError(f"{output} is damaged: {name} {what}; remove the folder and convert again")
        return record
    others = [name for name in files if name != LOG]
    if others and STARTED not in files:
        raise UserError(
            f"output {output} already holds files that are no conversion (e.g. {others[0]}): choose another, or "
            "remove them"
        )
    return None


def unfinished(output: str) -> list[str] | None:
    """What the missing tasks of an unfinished conversion read, in order; None when it is no unfinished conversion.

    Raises:
        UserError: it can't be read.
    """
    place = store(output)
    files = _listed(place)
    if STARTED not in files:
        return None
    tasks = _json(place, STARTED)["tasks"]
    return [what for name, what in tasks.items() if f"tasks/{name}.json" not in files]


def require_same(done: dict[str, Any], work: Work, files: list[SourceFile]) -> None:
    """Compare a finished conversion with the one that is asked for.

    Raises:
        UserError: naming what differs.
    """
    different = _different(done["config"], work, FREE)
    if done["tokenizer"]["sha256"] != work.tokenizer.sha256:
        different.append("tokenizer")
    now = {file.path: (file.bytes, file.version) for file in files}
    then = {file["path"]: (file["bytes"], file["version"]) for file in done["source"]["files"]}
    if now != then and not different:
        changed = sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))
        different.append(f"the files of the source: {changed[0]}" + (" and others" if len(changed) > 1 else ""))
    if different:
        message = f"output {work.config.output} holds a conversion with other settings ({', '.join(different)})"
        raise UserError(f"{message}: choose another output, or remove it")


@contextmanager
def claim(work: Work, tasks: list[Task], commit: str | None) -> Iterator[Claim]:
    """Take an output to write to; on this machine, until the process ends, for this process alone.

    `commit` is the hub dataset's, if it is one. In a bucket two conversions with the same settings do the same work
    twice, and write the same bytes.

    Raises:
        UserError: another conversion is writing there, or an unfinished one with other settings lies there.
        OSError: it can't be written to.
    """
    output = work.config.output
    place = store(output)
    lock = None if is_remote(output) else _lock(output)
    try:
        if isinstance(place, LocalStore):
            place.clear_unfinished()
        if STARTED in _listed(place):
            before = _json(place, STARTED)
            different = _different(before["config"], work, (*FREE, *LIMITS))
            different += ["tokenizer"] if before["tokenizer"] != work.tokenizer.sha256 else []
            if different:
                what = f"holds an unfinished conversion with other settings ({', '.join(different)})"
                raise UserError(f"output {output} {what}: choose another output, or remove it")
            if before["commit"] != commit:
                what = (
                    f"holds an unfinished conversion of the hub dataset's commit {before['commit']}; now it is {commit}"
                )
                raise UserError(f"output {output} {what}: set source.revision: {before['commit']} to finish it")
        started = {
            "config": work.config.model_dump(mode="json"),
            "tokenizer": work.tokenizer.sha256,
            "commit": commit,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": f"process {os.getpid()} on {socket.gethostname()}",
            "tasks": {task.name: task.what() for task in tasks},
        }
        place.write(STARTED, as_bytes(started))
        log = Log(place)
        try:
            yield Claim(output, place, _records(place), log)
        finally:
            # A bucket that is gone is told by what it stopped, not by the log.
            with suppress(OSError):
                log.flush()
            if isinstance(place, LocalStore):
                # Of workers that died.
                place.clear_unfinished()
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def told(output: str) -> Iterator[None]:
    """Errors of the output as a UserError that names it."""
    try:
        yield
    except OSError as error:
        advice = "what is finished is kept; mend that, and run the same command again"
        raise UserError(f"output {output}: can't be written ({short(error)}); {advice}") from error


def _different(before: dict[str, Any], work: Work, free: tuple[str, ...]) -> list[str]:
    now = work.config.model_dump(mode="json")
    return [key for key in now if key not in free and before.get(key) != now[key]]


def _lock(output: str) -> int:
    """Goes with the process, however it ends, so what a killed conversion left is told from a live one."""
    Path(output).mkdir(parents=True, exist_ok=True)
    lock = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"output {output}: another conversion is writing it at this moment") from None
    return lock


def _records(place: Store) -> dict[str, Record]:
    names = list(place.list("tasks"))
    with ThreadPoolExecutor(_READERS) as pool:
        contents = list(pool.map(place.read, names))
    return {Path(name).stem: json.loads(content) for name, content in zip(names, contents, strict=True)}


class Log:
    """A line for each event, with its time, in the output's `conversion.log`.

    Objects of a bucket can't be added to: there the whole is written anew, every half minute at most.
    """

    def __init__(self, place: Store):
        self._store = place
        self._file = Path(place.root) / LOG if isinstance(place, LocalStore) else None
        old = place.read(LOG) if self._file is None and place.stat(LOG) is not None else b""
        self._content, self._written = old, time.monotonic()

    def add(self, line: str) -> None:
        """Note a line."""
        text = f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n"
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
            return
        self._content += text.encode()
        if time.monotonic() - self._written > _LOG_SECONDS:
            with suppress(OSError):
                self.flush()

    def flush(self) -> None:
        """Write what has not been written yet."""
        if self._file is None:
            self._store.write(LOG, self._content)
            self._written = time.monotonic()


def _listed(place: Store) -> dict[str, int]:
    try:
        return {name: file.bytes for name, file in place.list().items()}
    except OSError as error:
        raise UserError(f"output {place.root}: can't be read ({short(error)})") from None


def _json(place: Store, name: str) -> dict[str, Any]:
    try:
        return json.loads(place.read(name))
    except (OSError, ValueError) as error:
        raise UserError(f"{join(place.root, name)}: can't be read ({short(error)})") from None
