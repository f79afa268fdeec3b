"""A run that is killed goes on, whatever it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from biphasic.checkpointing.manifest import newest
from biphasic.data.shared_memory import free_stale_shared_memory
from biphasic.storage import store
from conftest import Write
from tiny import ROOT, config_of, losses, train, weights


def test_killed_and_started_again_is_the_same_run(write_yaml: Write) -> None:
    expected = train(config_of(write_yaml("whole", max_duration="40ba", data__num_workers=1)))
    path = write_yaml("killed", max_duration="40ba", data__num_workers=1)
    folder = expected.parent / "killed"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "src" / "main.py"), str(path)]
    run = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "ba5.json").exists():
        assert run.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    done = newest(store(str(folder / "checkpoints")), folder / "checkpoints")
    assert done is not None
    assert 5 <= done.batch < 40
    # As if it had died while writing the next one.
    (folder / "checkpoints" / "ba39-rank0.pt").write_bytes((folder / "checkpoints" / done.path).read_bytes()[:1000])
    train(config_of(path))
    assert losses(folder) == losses(expected)
    theirs = weights(expected, 40)
    assert all((weight == theirs[name]).all() for name, weight in weights(folder, 40).items())


def test_only_memory_that_nobody_holds_is_freed(tmp_path: Path) -> None:
    memory, processes = tmp_path / "shm", tmp_path / "proc"
    (processes / "12").mkdir(parents=True)
    memory.mkdir()
    for name in ("000000_locals", "000000_barrier", "000001_locals", "sem.other", "torch_123_4"):
        (memory / name).touch()
    (processes / "12" / "maps").write_text(
        f"7f00-7f10 rw-s 00000000 00:1b 9  {memory}/000000_locals\n7f10-7f20 r-xp 0 0 0\n"
    )
    assert free_stale_shared_memory(memory, processes) == ["000001_locals"]
    assert sorted(path.name for path in memory.iterdir()) == [
        "000000_barrier",
        "000000_locals",
        "sem.other",
        "torch_123_4",
    ]
