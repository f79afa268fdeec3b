"""One writer for a folder, and what is remembered of attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from biphasic.checkpointing import claim as module
from biphasic.checkpointing.claim import CLAIM, SILENT, Claim, attempts_in
from biphasic.config.errors import UserError
from biphasic.storage import store


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(module, "EXPIRES", 0.6)


def of_elsewhere(folder: Path, **changes: object) -> None:
    """A claim that another machine left."""
    about = {
        "attempt": "20260101T000000-aaaaaa", "host": "node7", "pid": 4, "process": ["other boot", "pid:[1]", "4", "9"],
        "since": "2026-01-01T00:00:00+00:00", "ranks": 8, "beat": 3, "batch": 70, "tokens": 7000, "from": None,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / CLAIM).write_text(json.dumps({**about, **changes}))


def test_from_start_to_end(tmp_path: Path) -> None:
    mine = Claim(str(tmp_path))
    name = mine.take(2)
    mine.starts_from(10, 1000)
    mine.reached(12, 1200)
    time.sleep(0.2)
    [one] = attempts_in(store(str(tmp_path)))
    assert (one["attempt"], one["pid"], one["ranks"], one["batch"], one["tokens"]) == (name, os.getpid(), 2, 12, 1200)
    assert one["from"] == {"batch": 10, "tokens": 1000} and "reason" not in one
    mine.release("finished")
    [one] = attempts_in(store(str(tmp_path)))
    assert one["reason"] == "finished" and one["until"] is not None
    assert not (tmp_path / CLAIM).exists()


def test_a_live_one_is_refused_and_named(tmp_path: Path) -> None:
    first = Claim(str(tmp_path))
    first.take(1)
    with pytest.raises(UserError, match=rf"alive: process {os.getpid()} on .+, since 20") as raised:
        Claim(str(tmp_path)).take(1)
    assert "Stop that one, or choose another run_name" in str(raised.value)
    first.release("finished")
    again = Claim(str(tmp_path))
    again.take(1)
    again.release("finished")


def test_a_silent_one_of_another_machine_expires(tmp_path: Path) -> None:
    of_elsewhere(tmp_path / "run")
    mine = Claim(str(tmp_path / "run"))
    start = time.monotonic()
    name = mine.take(1)
    assert time.monotonic() - start >= 0.6
    mine.release("finished")
    dead, ours = attempts_in(store(str(tmp_path / "run")))
    assert dead["host"] == "node7" and dead["batch"] == 70 and dead["reason"] == SILENT
    assert ours["attempt"] == name


def test_a_dead_process_of_this_machine_is_seen_at_once(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "src")!r})
from biphasic.checkpointing.claim import Claim
Claim({str(tmp_path)!r}).take(1)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / CLAIM).exists()
    mine = Claim(str(tmp_path))
    start = time.monotonic()
    mine.take(1)
    assert time.monotonic() - start < 0.6 + 0.5
    assert mine.lost is None
    mine.release("finished")


def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    process = [*module.process_of(os.getpid())[:3], "1"]
    assert module.is_dead_here(process)
    assert not module.is_dead_here(module.process_of(os.getpid()))
    assert not module.is_dead_here(["another boot", *process[1:]])


def test_who_was_taken_for_dead_stops(tmp_path: Path) -> None:
    mine = Claim(str(tmp_path))
    mine.take(1)
    of_elsewhere(tmp_path)
    deadline = time.monotonic() + 5
    while mine.lost is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert mine.lost is not None and "process 4 on node7" in mine.lost
    mine.release("lost")
    # The other one's claim stays.
    assert json.loads((tmp_path / CLAIM).read_text())["host"] == "node7"


def test_a_file_that_is_no_claim(tmp_path: Path) -> None:
    (tmp_path / CLAIM).write_text("[]")
    with pytest.raises(UserError, match=r"claim.json: is no claim of a run; remove it"):
        Claim(str(tmp_path)).take(1)
