"""Shared memory that killed jobs leave behind, and that of running jobs, also in other containers."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from streaming.base.constant import LOCALS
from streaming.base.shared import SharedMemory, prefix

from biphasic.data.shared_memory import remove_stale_shared_memory
from conftest import Write
from helpers.tiny import launch, write_rows

JOB = """
import os, signal, sys
sys.path[:0] = [{tests!r}, {src!r}]
from helpers.outputs import open_dataset
dataset = open_dataset({folder!r})
pid = os.fork()  # a loader process, which outlives this one
if not pid:
    sys.stdin.close()
    signal.pause()
print(dataset._shm_prefix_int, pid, flush=True)
input()
"""
# What containers with a shared /dev/shm have: their own process numbers and /proc.
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Job:
    """A process that has a dataset open, and its loader process."""

    def __init__(self, folder: Path, container: list[str]):
        tests = Path(__file__).parents[1]
        code = JOB.format(tests=str(tests), src=str(tests.parent / "src"), folder=str(folder))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*container, sys.executable, "-c", code], start_new_session=True, **pipes)
        assert self.process.stdout is not None
        self.number, self.loader = map(int, self.process.stdout.readline().split())

    def names(self) -> set[str]:
        """The job's shared memory."""
        return {path.name for path in Path("/dev/shm").glob(f"{self.number:06}_*")}

    def lock_file(self) -> Path:
        return Path(f"/dev/shm/biphasic_{self.number:06}")

    def end(self) -> None:
        self.process.communicate("\n")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(container: list[str] | None = None) -> Job:
        folder = tmp_path / f"rows{len(jobs)}"
        write_rows(folder, 20, seed=1)
        jobs.append(Job(folder, container or []))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_memory_stays_until_the_last_process_ends(start: Callable[..., Job]) -> None:
    job = start()
    names = job.names()
    assert f"{job.number:06}_{LOCALS}" in names
    remove_stale_shared_memory()
    assert job.names() == names
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    # The loader process still holds the lock. Python's resource tracker has removed the job's memory, and not what is left.
    left = Path(f"/dev/shm/{job.number:06}_left")
    left.touch()
    remove_stale_shared_memory()
    assert left.exists()
    os.kill(job.loader, signal.SIGKILL)

    def is_removed() -> bool:
        remove_stale_shared_memory()
        return not left.exists()

    wait_until(is_removed)
    assert not job.names()


def test_jobs_in_containers_keep_their_memory(start: Callable[..., Job]) -> None:
    """A process doesn't see those of other containers, unless it runs outside of all."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this machine doesn't let its users make namespaces")
    jobs = [start(), start(CONTAINER)]
    names = [job.names() for job in jobs]
    assert all(names) and jobs[1].loader < 10, "it has process numbers of its own"
    neighbor = start(CONTAINER)  # which removes what it takes for stale
    remove_stale_shared_memory()
    assert [job.names() for job in jobs] == names
    assert len({neighbor.number, *(job.number for job in jobs)}) == 3


def test_a_job_that_ends_leaves_nothing(start: Callable[..., Job]) -> None:
    job = start()
    os.kill(job.loader, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{job.loader}/stat").read_text().split()[2] == "Z")
    job.end()
    assert job.process.returncode == 0
    assert not job.names() and not job.lock_file().exists()


def test_a_number_is_free_after_its_memory_was_removed(start: Callable[..., Job]) -> None:
    job = start()
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()

    def is_removed() -> bool:
        remove_stale_shared_memory()
        return not job.lock_file().exists()

    wait_until(is_removed)
    assert not job.names()
    # Another program uses the number meanwhile: its memory stays.
    other = SharedMemory(prefix._get_path(job.number, "of_another"), True, 8, auto_cleanup=False)
    assert start().number != job.number
    assert job.names() == {f"{job.number:06}_of_another"}
    other.cleanup()


def test_memory_without_a_lock_file_is_another_program_s() -> None:
    number = 990000 + os.getpid() % 9999
    other = SharedMemory(prefix._get_path(number, LOCALS), True, 8, auto_cleanup=False)
    remove_stale_shared_memory()
    assert Path(f"/dev/shm/{number}_{LOCALS}").exists()
    other.cleanup()


def test_a_run_whose_loaders_are_open_leaves_nothing(write_yaml: Write, tmp_path: Path) -> None:
    """Loader processes are forks, which hold their rank's locks: of the validation's as of the training's."""
    validation = {"local": str(tmp_path / "data" / "validation")}
    path = write_yaml(max_duration="4ba", schedule={}, objective__phases=[{"name": "clm"}], data__num_workers=2,
                      data__validation=validation, evaluation={"interval": "2ba", "batch_size": 2})  # fmt: skip
    code = f"""
from biphasic.data import shared_memory
take = shared_memory._take_free_number
def note(folders):
    number, reserved = take(folders)
    with open({str(tmp_path / "numbers")!r}, "a") as file:
        print(f"{{number:06}}", file=file)
    return number, reserved
shared_memory._take_free_number = note
"""
    run = launch(path, code=code)
    assert run.returncode == 0, run.stderr[-3000:]
    numbers = (tmp_path / "numbers").read_text().split()
    assert len(numbers) == 2
    assert [name for name in os.listdir("/dev/shm") if any(number in name for number in numbers)] == []


def test_too_little_shared_memory_is_named_before_the_kernel_ends_a_process(write_yaml: Write) -> None:
    code = """
import shutil, types
from biphasic.data import shared_memory
usage = lambda path: types.SimpleNamespace(free=500) if str(path) == "/dev/shm" else shutil.disk_usage(path)
shared_memory.shutil = types.SimpleNamespace(disk_usage=usage)
"""
    run = launch(write_yaml(), processes=2, code=code)
    assert run.returncode == 2
    need = r"/dev/shm: 500 B free, but the order of [\d,]+ rows and the loaders' batches need [\d.]+ KB: .*--shm-size"
    assert len(re.findall(need, run.stderr)) == 1, run.stderr
