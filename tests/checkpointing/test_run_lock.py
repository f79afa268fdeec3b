"""The lock on a run's folder, and the records of attempts."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing import run_lock as module
from biphasic.checkpointing.run_lock import KILLED, LOCK_FILE, RunLock, read_attempts
from biphasic.errors import UserError
from biphasic.storage import LocalStore, open_store


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.6)


def write_lock_of_other_machine(folder: Path, **changes: object) -> None:
    """A lock that another machine left."""
    about = {
        "attempt": "20260101T000000-aaaaaa", "host": "node7", "pid": 4, "process": ["other boot", "pid:[1]", "4", "9"],
        "since": "2026-01-01T00:00:00+00:00", "ranks": 8, "beat": 3, "batch": 70, "tokens": 7000, "from": None,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps({**about, **changes}))


def test_an_attempt_is_recorded_from_start_to_end(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path))
    name = lock.acquire(2)
    lock.record_start(10, 1000)
    lock.record_progress(12, 1200)
    time.sleep(0.2)
    [attempt] = read_attempts(open_store(str(tmp_path)))
    assert (attempt["attempt"], attempt["pid"], attempt["ranks"], attempt["batch"], attempt["tokens"]) == (
        name,
        os.getpid(),
        2,
        12,
        1200,
    )
    assert attempt["from"] == {"batch": 10, "tokens": 1000} and "reason" not in attempt
    lock.release("finished")
    [attempt] = read_attempts(open_store(str(tmp_path)))
    assert attempt["reason"] == "finished" and attempt["until"] is not None
    assert not (tmp_path / LOCK_FILE).exists()


def test_an_attempt_that_ends_before_its_first_heartbeat_keeps_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 60.0)
    monkeypatch.setattr(module, "is_alive_here", lambda process: False)
    RunLock(str(tmp_path)).acquire(1)  # killed before it found a checkpoint
    lock = RunLock(str(tmp_path))
    lock.acquire(2)
    lock.record_start(10, 1000)
    started = {"from": {"batch": 10, "tokens": 1000}, "batch": 10, "tokens": 1000}
    attempts = read_attempts(open_store(str(tmp_path)))
    assert attempts[0]["from"] is None and started.items() <= attempts[1].items() and "reason" not in attempts[1]
    RunLock(str(tmp_path)).acquire(2)
    attempts = read_attempts(open_store(str(tmp_path)))
    assert [attempt.get("reason") for attempt in attempts] == [KILLED, KILLED, None]
    assert started.items() <= attempts[1].items()


def test_a_lock_that_another_start_has_taken_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 60.0)  # none since
    lock = RunLock(str(tmp_path))
    lock.acquire(1)
    write_lock_of_other_machine(tmp_path)
    lock.release("finished")
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "node7"


def test_a_held_lock_is_refused_and_its_owner_named(tmp_path: Path) -> None:
    first = RunLock(str(tmp_path))
    first.acquire(1)
    with pytest.raises(UserError, match=rf"is locked by a running process: process {os.getpid()} on .+, since 20") as raised:
        RunLock(str(tmp_path)).acquire(1)
    assert "Stop it, or choose another run_name" in str(raised.value)
    first.release("finished")
    again = RunLock(str(tmp_path))
    again.acquire(1)
    again.release("finished")


def test_attempts_of_one_second_are_read_in_their_order(tmp_path: Path) -> None:
    names = []
    for _ in range(8):
        lock = RunLock(str(tmp_path))
        names.append(lock.acquire(1))
        lock.release("finished")
    assert [attempt["attempt"] for attempt in read_attempts(open_store(str(tmp_path)))] == names


def test_attempts_are_read_in_their_order_when_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for hour in (12, 11, 11, 13, 9):

        class Clock(datetime):
            @classmethod
            def now(cls, zone: Any = None) -> datetime:
                return datetime(2026, 11, 28, hour, tzinfo=zone)  # noqa: B023 - used before the next hour

        monkeypatch.setattr(module, "datetime", Clock)
        lock = RunLock(str(tmp_path))
        names.append(lock.acquire(1))
        lock.release("finished")
    attempts = read_attempts(open_store(str(tmp_path)))
    assert [attempt["attempt"] for attempt in attempts] == names
    assert [attempt["since"][11:13] for attempt in attempts] == ["12", "11", "11", "13", "09"]


def test_a_reason_stays_though_the_attempt_was_killed_before_it_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunLock(str(tmp_path))
    lock.acquire(1)
    lock.record_reason("the disk is full")
    lock._closing.set()
    monkeypatch.setattr(module, "is_alive_here", lambda process: False)
    again = RunLock(str(tmp_path))
    again.acquire(1)
    again.release("finished")
    reasons = [attempt["reason"] for attempt in read_attempts(open_store(str(tmp_path)))]
    assert reasons == ["the disk is full", "finished"]


def test_a_start_that_is_killed_as_it_takes_the_lock_hides_no_killed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start after it knows only its own attempt, by the lock."""
    write_lock_of_other_machine(tmp_path)
    write = LocalStore.write

    def write_lock_and_die(self: LocalStore, name: str, content: bytes) -> None:
        write(self, name, content)
        if name == LOCK_FILE:
            raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "write", write_lock_and_die)
    with pytest.raises(KeyboardInterrupt):
        RunLock(str(tmp_path)).acquire(1)
    monkeypatch.setattr(LocalStore, "write", write)
    monkeypatch.setattr(module, "is_alive_here", lambda process: False)
    last = RunLock(str(tmp_path))
    last.acquire(1)
    last.release("finished")
    reasons = [attempt["reason"] for attempt in read_attempts(open_store(str(tmp_path)))]
    assert reasons == [KILLED, KILLED, "finished"]


def test_a_lock_without_heartbeat_expires(tmp_path: Path) -> None:
    write_lock_of_other_machine(tmp_path / "run")
    lock = RunLock(str(tmp_path / "run"))
    start = time.monotonic()
    name = lock.acquire(1)
    assert time.monotonic() - start >= 0.6
    lock.release("finished")
    killed, current = read_attempts(open_store(str(tmp_path / "run")))
    assert killed["host"] == "node7" and killed["batch"] == 70 and killed["reason"] == KILLED
    assert current["attempt"] == name


def test_a_dead_process_of_this_machine_loses_its_lock_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 60)
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "src")!r})
from biphasic.checkpointing.run_lock import RunLock
RunLock({str(tmp_path)!r}).acquire(1)
os._exit(9)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    # Its parent has not read its status yet: the process still has an entry in /proc.
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert (tmp_path / LOCK_FILE).exists()
    lock = RunLock(str(tmp_path))
    start = time.monotonic()
    lock.acquire(1)
    assert time.monotonic() - start < 30
    assert lock.lost is None
    lock.release("finished")


def test_a_reused_process_id_is_another_process(tmp_path: Path) -> None:
    process = [*module.process_id(os.getpid())[:3], "1"]
    assert module.is_alive_here(process) is False
    assert module.is_alive_here(module.process_id(os.getpid())) is True
    assert module.is_alive_here(["another boot", *process[1:]]) is None


@pytest.mark.parametrize("hidden", [FileNotFoundError, PermissionError])
def test_another_user_s_process_may_be_hidden(monkeypatch: pytest.MonkeyPatch, hidden: type[OSError]) -> None:
    """With /proc mounted with `hidepid`. Its lock expires as another machine's does."""
    own, sent = module.process_id(os.getpid()), list[int]()

    def read(pid: int) -> list[str]:
        if pid != os.getpid():
            raise hidden(f"/proc/{pid}/stat")
        return own

    def kill(pid: int, number: int) -> None:
        sent.append(number)
        raise PermissionError if pid == 1 else ProcessLookupError

    monkeypatch.setattr(module, "process_id", read)
    monkeypatch.setattr(os, "kill", kill)
    assert module.is_alive_here([*own[:2], "1", "9"]) is None
    assert module.is_alive_here([*own[:2], "2", "9"]) is False
    assert sent == [0, 0]


def test_a_run_whose_lock_was_taken_stops(tmp_path: Path) -> None:
    lock = RunLock(str(tmp_path))
    lock.acquire(1)
    write_lock_of_other_machine(tmp_path)
    deadline = time.monotonic() + 5
    while lock.lost is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lock.lost is not None and "process 4 on node7" in lock.lost
    lock.release("lost")
    # The other run's lock stays.
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "node7"


def test_a_file_that_is_not_a_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("[]")
    with pytest.raises(UserError, match=r"lock.json: is not a run's lock; remove it"):
        RunLock(str(tmp_path)).acquire(1)
