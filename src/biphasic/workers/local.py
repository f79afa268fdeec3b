"""Workers as processes of this machine, forked by multiprocessing's fork server, which has imported their modules."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from biphasic.errors import UserError
from biphasic.processes import available_cores, raise_file_limit, require_short_temporary_folder
from biphasic.workers.group import WorkerGroup

_CONTEXT = multiprocessing.get_context("forkserver")


class LocalWorkers(WorkerGroup):
    """Workers of this machine, each a pool of one process, so that one that dies breaks no other worker's pool.

    They end when the group is closed or this process dies. They ignore Ctrl-C, and their output is discarded. The fork
    server imports `modules`. A process has only one, which keeps the imports of the first group.
    """

    def __init__(self, environment: dict[str, str], modules: Sequence[str] = ()):
        require_short_temporary_folder()
        self.cpus, self._gpu_names = available_cores(), visible_gpus()
        self.gpus = len(self._gpu_names)
        # A CUDA context of the fork server would make CUDA unusable in its forks. With the first variable, PyTorch tells
        # whether there is a GPU without creating one. multiprocessing's resource tracker would warn of a killed driver's
        # semaphores after it has removed them.
        self._environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONWARNINGS": "ignore", **environment}
        self._modules = ["biphasic.workers.silence", *modules]
        self._pools: dict[int, ProcessPoolExecutor] = {}
        # This process alone holds the second end of the first pipe. Workers share the second pipe, without a lock that a
        # killed worker would keep: the kernel writes up to 4 KiB at once.
        self._lifeline, self._held = _CONTEXT.Pipe(duplex=False)
        self._reports, self._to_reports = _CONTEXT.Pipe(duplex=False)
        self._start_fork_server()

    def start(self, number: int, cpus: int, gpu_share: float, processes: int = 1) -> ProcessPoolExecutor:
        """Start a worker. Its number decides which GPU it is given."""
        self._start_fork_server()
        environment = {**os.environ, **self._environment}
        if gpu_share:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu_names[number % self.gpus]
        arguments: tuple[Any, ...] = (self._lifeline, self._to_reports, environment)
        self._pools[number] = ProcessPoolExecutor(processes, _CONTEXT, _prepare, arguments)
        return self._pools[number]

    def make_report(self) -> Callable[..., None]:
        return _send_report

    def take_reports(self) -> list[tuple[Any, ...]]:
        reports = []
        while self._reports.poll():
            reports.append(self._reports.recv())
        return reports

    def close(self) -> None:
        """Kill all workers, and wait until they have ended."""
        self._held.close()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        for connection in (self._lifeline, self._reports, self._to_reports):
            connection.close()

    def _start_fork_server(self) -> None:
        """Start the process from which workers are forked, unless it runs. This does not wait for its imports."""
        raise_file_limit()
        _CONTEXT.set_forkserver_preload(self._modules)
        previous = dict(os.environ)
        # Some libraries read their number of threads when they are imported.
        os.environ.update(self._environment)
        resource_tracker.ensure_running()
        # Ctrl-C in a terminal reaches all processes. The fork server and workers inherit this mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            for name in self._environment:
                del os.environ[name]
            os.environ.update(previous)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def parallel_map(processes: int, modules: Sequence[str]) -> Iterator[Any]:
    """Yield a `map` function that uses this many processes, or Python's own for one.

    Processes share one import of `modules`. Raises a UserError in the block if a process dies.
    """
    if processes <= 1:
        yield map
        return
    try:
        with closing(LocalWorkers({}, modules)) as workers:
            yield workers.start(0, 1, 0.0, processes).map
    except BrokenExecutor:
        raise UserError(f"a worker process died: is there memory for {processes}, one for each core?") from None


_to_reports: Connection
"""In a worker process, the pipe for reports."""


def _send_report(*values: Any) -> None:
    _to_reports.send(values)


def _prepare(lifeline: Connection, to_reports: Connection, environment: dict[str, str]) -> None:
    global _to_reports
    _to_reports = to_reports
    Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    with suppress(OSError):
        # If memory runs out, the kernel kills a worker, which is replaced, and not the process that started it.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Garbage collection would otherwise write to the memory that workers share, and so copy it.
    gc.freeze()


def _end_with(lifeline: Connection) -> None:
    """End this process when its driver closes the other end of the pipe or dies (see `die_with_parent`)."""
    lifeline.poll(None)
    os._exit(1)


_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""The device files of NVIDIA's and AMD's drivers, and of WSL's."""
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TORCH = """import torch
for number in range(torch.cuda.device_count()):
    print(number)"""


def count_gpus() -> int:
    """Return the number of this machine's GPUs without initializing CUDA.

    Asks PyTorch in another process if there is a driver but no nvidia-smi, as for AMD's GPUs and in some containers.
    """
    torch = [(sys.executable, "-c", _TORCH)] if any(map(os.path.exists, _DRIVERS)) else []
    # nvidia-smi would count the whole GPU that a MIG device is a part of.
    smi = [] if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "") else [_NVIDIA_SMI]
    for query in (*smi, *torch):
        with suppress(OSError, subprocess.SubprocessError):
            lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")
            # Of a GPU that shares the machine's memory, nvidia-smi prints [N/A]; without GPUs, a sentence.
            return len([line for line in lines if re.match(r"[\[\d]", line)])
    return 0


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them."""
    numbers = [str(number) for number in range(count_gpus())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not numbers:
        return numbers
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores what follows the first name that is not a device.
    end = next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]
