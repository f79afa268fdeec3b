"""Loader processes survive the signals that end a run from their start on, and end with the process that they load for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.tiny import ROOT

CODE = """
import os, time
from torch.utils.data import IterableDataset
from biphasic.data.loader_signals import Loader

class Waits(IterableDataset):
    def __iter__(self):
        print(os.getpid(), flush=True)
        while True:  # as in the barrier of Streaming's loaders
            time.sleep(0.01)

next(iter(Loader(Waits(), num_workers=1)))
"""

START = """
import os, signal, time
from biphasic.data.loader_signals import Loader, end_loaders, keep_loaders
from biphasic.processes import STOP_SIGNALS

taken = []
for number in STOP_SIGNALS:  # as `StopCoordinator` does
    signal.signal(number, lambda number, frame: taken.append(number))
rank = os.getpid()
sender = os.fork()
if not sender:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == rank:
        for number in STOP_SIGNALS:
            os.killpg(0, number)
        time.sleep(0.0005)
    os._exit(0)
for _ in range(50):
    keep_loaders()
    loader = Loader(range(4), num_workers=2)
    batches = iter(loader)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert len(list(batches)) == 4
    end_loaders()
os.kill(sender, signal.SIGKILL)
print(len(taken))
"""
STUCK = """
import multiprocessing, os, signal, time
from torch.utils.data import IterableDataset
from biphasic.data.loader_signals import Loader, end_loaders, keep_loaders

class Waits(IterableDataset):
    def __iter__(self):
        yield 1
        while True:  # for a loader that was killed
            time.sleep(0.01)

keep_loaders()
loader = Loader(Waits(), num_workers=4)
batches = iter(loader)
next(batches)
os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
try:
    [*batches]
except RuntimeError as error:
    # PyTorch raises it itself, or as the cause of "exited unexpectedly", if the signal comes while it waits for a batch.
    assert "killed by signal: Killed" in f"{error} {error.__cause__}", error
start = time.monotonic()
end_loaders()
batches._shutdown_workers()
print(time.monotonic() - start)
"""

KILLED = """
import time
from biphasic.data.loader_signals import Loader

def ask(event):
    while True:  # as a loader process does for each batch
        event.is_set()

context = Loader(range(1), num_workers=1).multiprocessing_context
for number in range(20):
    event = context.Event()
    loader = context.Process(target=ask, args=(event,))
    loader.start()
    time.sleep(0.01 + number / 1000)
    loader.kill()
    loader.join()
    event.set()
    print(event.is_set())
"""


def run_alone(code: str) -> str:
    """Run Python in a process group of its own, and return what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, start_new_session=True, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_signals_to_all_processes_while_loaders_start_end_none() -> None:
    assert int(run_alone(START)) > 50


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGCHLD, lambda *_: None)"], ids=["handler", "lost"])
def test_loaders_that_wait_for_a_killed_one_end_soon(handler: str) -> None:
    """The signal is said even if what PyTorch's handler of SIGCHLD raises is lost."""
    assert float(run_alone(STUCK.replace("next(batches)\n", f"next(batches)\n{handler}\n"))) < 5


def test_the_end_of_a_run_does_not_wait_for_a_killed_loader_s_lock() -> None:
    assert run_alone(KILLED) == "True\n" * 20


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
