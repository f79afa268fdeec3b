"""Starts of one run at the same moment: one gets the lock, and the others name it."""

import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing import run_lock as module
from biphasic.checkpointing.run_lock import LOCK_FILE, RunLock
from biphasic.storage import open_store
from conftest import Write
from helpers.buckets import bucket_for
from helpers.tiny import config_of, start, wait_for_batch


class Interleaving:
    """Lets threads make their store calls in a random order that a seed determines, one call at a time."""

    def __init__(self, seed: int, threads: int):
        self._draw, self._running = random.Random(seed), threads
        self._waiting: list[int] = []
        self._turn: int | None = None
        self._changed = threading.Condition()

    def next_turn(self) -> None:
        """Wait for this thread's next turn."""
        own = threading.get_ident()
        with self._changed:
            self._waiting.append(own)
            self._give_turn()
            assert self._changed.wait_for(lambda: self._turn == own, 20)
            self._turn = None

    def end(self) -> None:
        """Leave the other threads to themselves."""
        with self._changed:
            self._running -= 1
            self._give_turn()

    def _give_turn(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            self._waiting.sort()
            self._turn = self._waiting.pop(self._draw.randrange(len(self._waiting)))
            self._changed.notify_all()


class SteppingStore:
    """A store of which each call waits for its turn."""

    def __init__(self, store: Any, order: Interleaving):
        self._store, self._order = store, order

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any) -> Any:
            self._order.next_turn()
            return attribute(*arguments)

        return call


@pytest.mark.parametrize("left_lock", ["no lock", "lock of a dead process"])
@pytest.mark.parametrize("starts", [2, 3])
def test_in_any_order_of_calls_one_start_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int, left_lock: str
) -> None:
    monkeypatch.setattr(module, "_write_attempt", lambda *_: None)
    orders: list[Interleaving] = []
    monkeypatch.setattr(module, "open_store", lambda path: SteppingStore(open_store(path), orders[-1]))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    for seed in range(60):
        folder = tmp_path / str(seed)
        if left_lock != "no lock":
            write_dead_lock(folder)
        orders.append(Interleaving(seed, starts))
        outcomes = start_together(folder, starts, orders[-1].end)
        held = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert len(held) == 1, (seed, outcomes)
        others = [str(outcome) for outcome in outcomes if not isinstance(outcome, str)]
        assert all("is locked by a running process" in other for other in others), (seed, outcomes)
        assert held[0] in (folder / LOCK_FILE).read_text() and not (folder / "claims").exists(), seed


def write_dead_lock(folder: Path) -> None:
    """A lock of a process of this machine that no longer exists."""
    process = [*module.process_id(os.getpid())[:3], "1"]
    lock = {
        "attempt": "20260101T000000.000000-aaaaaa",
        "host": "here",
        "pid": 4,
        "process": process,
        "since": "",
        "beat": 3,
    }
    open_store(str(folder)).write(LOCK_FILE, module.json_bytes(lock))


def start_together(folder: Path, starts: int, end: Callable[[], None]) -> list[Any]:
    """Acquire a lock in each of several threads; returns for each thread the attempt's name, or the error."""
    outcomes: list[Any] = [None] * starts
    barrier = threading.Barrier(starts)

    def acquire(number: int) -> None:
        lock = RunLock(str(folder))
        barrier.wait(20)
        try:
            outcomes[number] = lock.acquire(1)
            lock._closing.set()  # no heartbeats
        except BaseException as error:
            outcomes[number] = error
        finally:
            end()

    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(starts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_a_claim_of_a_lost_machine_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.6)
    claim = {"attempt": "20260101T000000.000000-aaaaaa", "host": "node7", "pid": 4, "since": "2026",
             "process": ["other boot", "pid:[1]", "4", "9"]}  # fmt: skip
    store = open_store(str(tmp_path))
    store.write("claims/20260101T000000.000000-aaaaaa.json", module.json_bytes(claim))
    lock = RunLock(str(tmp_path))
    lock.acquire(1)
    assert store.list("claims") == {}
    lock.release("finished")


def test_of_two_runs_started_at_once_one_trains_and_the_other_names_it(
    s3: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an empty bucket, whose server ignores the condition of a conditional write."""
    # rclone answers "500 Internal Error" to a request for a folder whose last file another request removes at that moment.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
    place = f"s3://{bucket_for(s3, 'two-starts')}/run"
    path = write_yaml("twice", max_duration="100000ba", checkpoint__folder=place, checkpoint__interval="100000ba")
    jobs = [start(path) for _ in range(2)]
    end = time.monotonic() + 120
    while all(job.poll() is None for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)
    refused, trains = sorted(jobs, key=lambda job: job.poll() is None)
    run = refused.wait(0)
    try:
        assert run.returncode == 2, (run.stdout[-2000:], run.stderr[-2000:])
        assert re.search(rf"is locked by a running process: process {trains.ranks[0]} on .+, since 20", run.stderr)
        wait_for_batch(Path(config_of(path).output) / "twice", 3, trains)
    finally:
        trains.kill()
