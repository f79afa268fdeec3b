"""Drivers that share an output."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from biphasic.storage import LocalStore, Store, store
from biphasic.sweep import claims
from biphasic.sweep.claims import Claims

TRIALS = {f"t{number}" for number in range(6)}


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return store(str(tmp_path))


def write_other(place: Store, trials: list[str], beat: int = 1, process: list[str] | None = None) -> None:
    about = {"driver": "0", "host": "far", "pid": 1, "process": process or ["other boot", "ns", "1", "2"],
             "beat": beat, "trials": trials, "new": []}  # fmt: skip
    place.write("claims/0.json", json.dumps(about).encode())


def test_what_another_runs_is_left(place: Store) -> None:
    with Claims(place) as first, Claims(place) as second:
        assert first.take(["a", "b"]) == {"a", "b"}
        assert second.take(["a", "b", "c"]) == {"c"}
        assert second.elsewhere == {"a", "b"}
        first.drop(["a"])
        assert first.take(["d"]) == {"d"}
        second.look()
        assert second.take(["a", "b"]) == {"a"}
        assert second.others == [f"process {os.getpid()} on {os.uname().nodename}"]
    assert place.list("claims") == {}


def test_the_alive_the_silent_and_the_dead(place: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "EXPIRES", 0.6)
    with Claims(place) as ours:
        for beat in range(4):
            # A sign of life is a change, whatever its clock says.
            write_other(place, ["a"], beat)
            ours.look()
            assert ours.take(["a"]) == set()
            time.sleep(0.3)
        time.sleep(0.4)
        ours.look()
        assert ours.take(["a"]) == {"a"}
        # One of this machine whose process is gone is dead at once.
        gone = subprocess.Popen(["true"])
        process = claims.process_of(gone.pid)
        write_other(place, ["b"], 9, process)
        ours.look()
        gone.wait()
        monkeypatch.setattr(claims, "EXPIRES", 60)
        ours.look()
        assert ours.take(["b"]) == {"b"}
        assert list(place.list("claims")) == [ours._file]


def test_signs_of_life(place: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.1)
    with Claims(place) as ours:
        ours.take(["a"])
        seen = set()
        for _ in range(20):
            seen.add(place.read(ours._file))
            time.sleep(0.05)
        assert len(seen) >= 5


def test_the_same_moment(tmp_path: Path) -> None:
    """Drivers in step, whose stores are slow where it hurts: no trial is ever two's, and all are somebody's."""
    for round in range(8):
        place = tmp_path / str(round)
        barrier = threading.Barrier(3)
        mine: dict[int, set[str]] = {}

        def drive(number: int, place: Path = place, barrier: Any = barrier, mine: Any = mine) -> None:
            with Claims(store(str(place))) as ours:
                barrier.wait()
                mine[number] = ours.take(TRIALS)
                barrier.wait()

        threads = [threading.Thread(target=drive, args=(number,)) for number in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        got = [trial for found in mine.values() for trial in found]
        assert len(got) == len(set(got)), mine
        assert set(got) == TRIALS, mine


def test_both_have_written_before_either_looks(place: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with Claims(place) as first, Claims(place) as second:
        first.driver, second.driver = "1", "2"
        real, barrier = Claims.look, threading.Barrier(2)

        def together(self: Claims) -> bool:
            if self not in waited:
                waited.append(self)
                barrier.wait()
            return real(self)

        waited: list[Claims] = []
        monkeypatch.setattr(Claims, "look", together)
        mine: dict[str, set[str]] = {}
        threads = [
            threading.Thread(target=lambda one=one: mine.__setitem__(one.driver, one.take(["a"])))
            for one in (first, second)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert mine == {"1": {"a"}, "2": set()}


def test_few_requests(tmp_path: Path) -> None:
    """A driver alone writes once and lists once for the trials that it begins together."""
    counts: dict[str, int] = {}

    class Counting(LocalStore):
        def list(self, below: str = "") -> Any:
            counts["list"] = counts.get("list", 0) + 1
            return super().list(below)

        def read(self, name: str) -> bytes:
            counts["read"] = counts.get("read", 0) + 1
            return super().read(name)

        def write(self, name: str, content: bytes) -> None:
            counts["write"] = counts.get("write", 0) + 1
            super().write(name, content)

    with Claims(Counting(str(tmp_path))) as ours:
        assert ours.take(TRIALS) == TRIALS
        assert counts == {"write": 1, "list": 1}


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file where a folder should be")
    with Claims(store(str(tmp_path))) as ours:
        with pytest.raises(OSError):
            ours.take(["a"])
        (tmp_path / "claims").unlink()
        assert ours.take(["a"]) == {"a"}


def test_a_file_that_is_no_claim(place: Store) -> None:
    place.write("claims/x.json", b"{half")
    place.write("claims/y.json", b"[]")
    with Claims(place) as ours:
        assert ours.take(["a"]) == {"a"}


def test_two_changes_at_the_same_time(place: Store, tmp_path: Path) -> None:
    """Clocks of disks tick every few milliseconds."""
    with Claims(place) as ours:
        write_other(place, ["a"])
        os.utime(tmp_path / "claims" / "0.json", ns=(1, 1))
        ours.look()
        write_other(place, ["b"])
        os.utime(tmp_path / "claims" / "0.json", ns=(1, 1))
        assert ours.take(["b"]) == set()
        assert ours.take(["a"]) == {"a"}
