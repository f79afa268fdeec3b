"""The processes of `make bench-gpu-run` end with it, however it ends: they would keep the GPUs."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAUNCHER = """
import signal, subprocess, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank saves first
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(rank.pid, flush=True)
time.sleep(300)
"""
DRIVER = f"""
import sys

sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_run

gpu_run.command = lambda *_: [sys.executable, "-c", {LAUNCHER!r}]
kill_at = int(sys.argv[1]) if len(sys.argv) > 1 else None
gpu_run.losses = lambda _: dict.fromkeys(range(int((gpu_run.WORK / "batches").exists())))
print(gpu_run.train("run", 1, [], kill_at) < 60)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, None])
def test_its_processes_end_with_it(end: signal.Signals | None, tmp_path: Path) -> None:
    """None: it kills them itself after a batch, and goes on."""
    command = [sys.executable, "-c", DRIVER, *(["1"] if end is None else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as benchmark:
        assert benchmark.stdout is not None
        rank = psutil.Process(int(benchmark.stdout.readline()))
        launcher = rank.parent()
        assert launcher is not None
        processes = [rank, launcher]
        try:
            if end is None:
                (tmp_path / "runs" / "gpu_run").mkdir(parents=True)
                (tmp_path / "runs" / "gpu_run" / "batches").touch()
                assert benchmark.stdout.readline() == "True\n"
            else:
                time.sleep(0.3)
                benchmark.send_signal(end)
            _, alive = psutil.wait_procs(processes, timeout=20)
            assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        finally:
            benchmark.kill()
            for process in processes:
                if process.is_running():
                    process.kill()
