"""Loader processes end with the process that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.tiny import ROOT

CODE = """
import os, time
from torch.utils.data import DataLoader, IterableDataset
from biphasic.data.loader_signals import handle_loader_signals

class Waits(IterableDataset):
    def __iter__(self):
        print(os.getpid(), flush=True)
        while True:  # as in the barrier of Streaming's loaders
            time.sleep(0.01)

next(iter(DataLoader(Waits(), num_workers=1, worker_init_fn=handle_loader_signals)))
"""


def test_a_loader_that_waits_for_others_ends_with_its_rank() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    rank = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, env=environment)
    assert rank.stdout is not None
    loader = Path("/proc") / rank.stdout.readline().strip()
    assert loader.exists()
    rank.send_signal(signal.SIGKILL)
    rank.wait(10)
    deadline = time.monotonic() + 10
    while loader.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not loader.exists()
