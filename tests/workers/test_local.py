"""Workers of this machine."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from biphasic import processes
from biphasic.errors import UserError
from biphasic.workers import local
from biphasic.workers.local import LocalWorkers, parallel_map, visible_gpus
from helpers.worker_objects import Total, check_group, die_at_once, processes_with, result, run_all

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}


@pytest.fixture
def group() -> Iterator[LocalWorkers]:
    """One worker."""
    with closing(LocalWorkers({"OF_WORKERS": "yes"})) as workers:
        workers.open(1, "cluster.at_once", Total, 0)
        yield workers


def test_values_errors_reports_and_a_killed_worker(tmp_path: Path) -> None:
    with closing(LocalWorkers({"OF_WORKERS": "yes"})) as group:
        check_group(group, tmp_path)


def test_modules_are_imported_once_with_the_workers_environment() -> None:
    """In a process of its own, because a program has one fork server."""
    code = """
import os
from contextlib import closing
from biphasic.workers.local import LocalWorkers
from helpers.worker_objects import Total, result
os.environ["OF_DRIVER"] = "old"
with closing(LocalWorkers({"OF_WORKERS": "yes"}, ["no_such_module", "helpers.worker_objects"])) as group:
    assert "OF_WORKERS" not in os.environ
    os.environ["OF_DRIVER"] = "new"
    group.open(1, "", Total, 0)
    about = result(group, "about")
assert about["at import"] == {"process": about["parent"], "OF_WORKERS": "yes"}
assert (about["environment"]["OF_DRIVER"], about["environment"]["OF_WORKERS"]) == ("new", "yes")
"""
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("length", [75, 76])
def test_a_temporary_folder_with_a_long_path_is_refused(tmp_path: Path, length: int) -> None:
    """In processes of their own, which have made no other folder before."""
    code = "from biphasic.workers.local import LocalWorkers\nLocalWorkers({}).close()"
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder = folder / ("x" * (length - len(str(folder)) - 1))
    folder.mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    shutil.rmtree(folder.parent)
    if length == 75:
        assert (run.returncode, run.stderr) == (0, "")
    else:
        assert run.stderr.splitlines()[-1].startswith(f"biphasic.errors.UserError: TMPDIR: {folder} has a path of 76 bytes")


def test_what_cannot_be_pickled(group: LocalWorkers) -> None:
    with pytest.raises(RuntimeError, match=r"^Unpicklable: twoarguments$"):
        result(group, "fail", False)
    with pytest.raises(Exception, match=r"pickle|local object"):
        result(group, "function")
    assert result(group, "add", 1) == 1, "neither ended the worker"


@pytest.mark.parametrize("keep_pipe", [False, True])
def test_an_exit_is_a_lost_worker(group: LocalWorkers, keep_pipe: bool) -> None:
    result(group, "add", 1)
    start = time.monotonic()
    [ended] = run_all(group, ("exit", 3, keep_pipe))
    assert ended.lost
    assert time.monotonic() - start < 4, "a process that the worker has forked was waited for"
    [ended] = run_all(group, ("exit", -signal.SIGSEGV))
    assert ended.lost


def test_an_idle_worker_that_dies_is_replaced(group: LocalWorkers) -> None:
    os.kill(result(group, "about")["process"], signal.SIGKILL)
    time.sleep(0.5)
    assert run_all(group, ("add", 1))[0].lost
    assert result(group, "add", 1) == 1


def test_workers_ignore_ctrl_c(group: LocalWorkers) -> None:
    about = result(group, "about")
    for process in (about["process"], about["parent"]):
        os.kill(process, signal.SIGINT)
    assert result(group, "about")["process"] == about["process"]


def test_workers_after_the_fork_server_died(group: LocalWorkers) -> None:
    psutil.Process(result(group, "about")["parent"]).kill()
    assert run_all(group, ("sleep", 5))[0].lost
    assert result(group, "add", 1) == 1


def test_workers_that_die_while_they_start_end_the_group(group: LocalWorkers) -> None:
    group.open(1, "cluster.at_once", die_at_once)
    assert group.wait(60) == group.wait(60) == []
    message = r"^workers die while they start \(.*\): is there memory for 1 of them \(cluster.at_once\)\?$"
    with pytest.raises(UserError, match=message):
        group.wait(60)
    group.open(1, "cluster.at_once", Total, -1)
    with pytest.raises(ValueError, match="a negative start: -1"):
        group.wait(60)


def test_closing_where_init_reaps_orphans() -> None:
    code = """
from contextlib import closing
from biphasic.workers.local import LocalWorkers
from helpers.worker_objects import Total, run_all
for _ in range(5):
    with closing(LocalWorkers({}, ["worker_objects"])) as group:
        group.open(8, "", Total, 0)
        run_all(group, *[("add", 1)] * 20)
        group.idle[0].give(0, "sleep", 60)
"""
    command = [sys.executable, str(ROOT / ".ci" / "reaping_parent.py"), sys.executable, "-c", code]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


DRIVER = """
import sys, time
from contextlib import closing
from biphasic.workers.local import LocalWorkers
from helpers.worker_objects import Total
with closing(LocalWorkers({}, sys.argv[1:])) as group:
    group.open(2, "", Total, 0)
    if sys.argv[1:]:
        print("started", flush=True)
    while len(group.idle) < 2:
        group.wait(0.1)
    for slot in group.idle:
        slot.give(0, "sleep", 60)
    print("started", flush=True)
    group.wait(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("slow_module", [False, True])
def test_a_killed_driver_leaves_no_process(tmp_path: Path, slow_module: bool, number: signal.Signals) -> None:
    """Also not while modules are imported. Ctrl-C reaches all processes, and only the driver prints something."""
    (tmp_path / "slow_module.py").write_text(f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(2)")
    marker = f"WORKER_TEST={tmp_path}"
    path = os.pathsep.join([*filter(None, sys.path), str(tmp_path)])
    environment = {**os.environ, "WORKER_TEST": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", DRIVER, *(["slow_module"] if slow_module else [])]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert driver.stdout is not None and driver.stdout.readline() == "started\n"
    while slow_module and not (tmp_path / "begun").exists():
        time.sleep(0.01)
    # The driver, the fork server, multiprocessing's resource tracker, and two workers.
    assert len(processes_with(marker)) == (3 if slow_module else 5)
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)
    else:
        driver.send_signal(number)
    driver.wait(30)
    deadline = time.monotonic() + (10 if slow_module else 1)
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []
    assert driver.stderr is not None
    printed = driver.stderr.read()
    assert printed.count("Traceback") == 1 if number == signal.SIGINT else printed == ""


def test_more_workers_than_file_descriptors() -> None:
    code = """
import resource
from contextlib import closing
from biphasic.workers.local import LocalWorkers
from helpers.worker_objects import Total, run_all
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with closing(LocalWorkers({}, ["worker_objects"])) as group:
    group.open(20, "", Total, 0)
    while len(group.idle) < 20:
        assert group.wait(1) == []
"""
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_workers_are_spread_over_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: ["3", "GPU-a"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a")

    def seen(group: LocalWorkers) -> list[str]:
        while len(group.idle) < 3:
            assert group.wait(1) == []
        ended: dict[int, str] = {}
        for number, slot in enumerate(group.slots):
            slot.give(number, "about")
        while len(ended) < 3:
            ended |= {one.job: one.value["environment"]["CUDA_VISIBLE_DEVICES"] for one in group.wait(1)}
        return [ended[number] for number in range(3)]

    with closing(LocalWorkers({})) as group:
        assert group.gpus == 2
        group.open(3, "", Total, 0, gpu_share=0.5)
        assert seen(group) == ["3", "GPU-a", "3"]
        # A worker that replaces another one has its GPU.
        group.slots[1].give(0, "exit", 1)
        while not (ended := group.wait(1)):
            pass
        assert ended[0].lost and seen(group) == ["3", "GPU-a", "3"]
    with closing(LocalWorkers({})) as group:
        group.open(3, "", Total, 0)
        assert seen(group) == ["3,GPU-a"] * 3


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "_DRIVERS", ())
    assert visible_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    assert visible_gpus() == ["0", "1"]
    for value, names in (("1", ["1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("", []), ("0,-1,1", ["0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == names
    program.write_text("#!/bin/sh\necho '[N/A]'\necho 40960\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert visible_gpus() == []
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == []


def test_gpus_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD, or in a container: PyTorch counts them, if there is a driver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "_DRIVERS", (str(tmp_path / "driver"),))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $2 in *device_count*) echo 65536; echo 65520;; esac\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert visible_gpus() == []
    (tmp_path / "driver").touch()
    assert visible_gpus() == ["0", "1"]
    # Also for MIG devices: nvidia-smi would count whole GPUs.
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\n")
    program.chmod(0o755)
    assert visible_gpus() == ["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert visible_gpus() == ["MIG-a", "MIG-b"]


def test_the_query_of_pytorch_runs() -> None:
    run = subprocess.run([sys.executable, "-c", local._TORCH], capture_output=True, text=True, check=True)
    assert all(line.isdecimal() for line in run.stdout.splitlines())


def test_cores_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quota, which the process's affinity doesn't show."""
    monkeypatch.setattr("joblib.externals.loky.backend.context._cpu_count_cgroup", lambda count: 1)
    assert processes.available_cores() == 1


def test_a_process_of_a_map_that_dies_is_named() -> None:
    with pytest.raises(UserError, match=r"^a worker process died: is there memory for 2"), parallel_map(2, []) as run:
        list(run(os._exit, [1, 1]))
