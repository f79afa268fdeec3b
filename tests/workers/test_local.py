"""Workers of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from biphasic.errors import UserError
from biphasic.workers import local
from biphasic.workers.engine import WorkerLostError
from biphasic.workers.group import WorkerGroup
from biphasic.workers.local import LocalEngine
from biphasic.workers.resources import smallest_gpu_bytes, visible_gpus
from worker_objects import Total, check_engine, die_at_once, processes_with, result

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OF_WORKERS": "yes"}


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(ENVIRONMENT)
    yield engine
    engine.close()


def test_values_errors_reports_and_a_killed_worker() -> None:
    reports: list[tuple[int, int]] = []
    engine = LocalEngine(ENVIRONMENT, report=lambda *values: reports.append(values))
    try:
        check_engine(engine, reports)
    finally:
        engine.close()


def test_modules_are_imported_once_with_the_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_DRIVER", "too")
    engine = LocalEngine(ENVIRONMENT, ["no_such_module", "worker_objects"])
    try:
        about = result(engine, engine.start(Total, 0).call("about"))
    finally:
        engine.close()
    assert (about["at import"], about["imported"]) == ("yes", True)
    assert about["environment"]["OF_DRIVER"] == "too"
    assert about["group"] != os.getpgid(0), "Ctrl-C in a terminal reaches the process group"


def test_what_cannot_be_pickled(engine: LocalEngine) -> None:
    worker = engine.start(Total, 0)
    with pytest.raises(RuntimeError, match=r"^Unpicklable: twoarguments$"):
        result(engine, worker.call("fail", False))
    with pytest.raises(Exception, match="pickle"):
        result(engine, worker.call("function"))
    assert result(engine, worker.call("add", 1)) == 1


@pytest.mark.parametrize("keep_pipe", [False, True])
def test_an_exit_is_a_lost_worker(engine: LocalEngine, keep_pipe: bool) -> None:
    worker = engine.start(Total, 0)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"^exit status 3$"):
        result(engine, worker.call("exit", 3, keep_pipe))
    assert time.monotonic() - start < 4, "a process that the worker has forked was waited for"
    with pytest.raises(WorkerLostError, match=r"^signal 11, Segmentation fault$"):
        result(engine, engine.start(Total, 0).call("exit", -signal.SIGSEGV))


def test_out_of_memory(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kill for each one that the kernel has counted."""

    def ends(status: int) -> str:
        with pytest.raises(WorkerLostError) as error:
            result(engine, engine.start(Total, 0).call("exit", status))
        return error.value.end

    count = local._count_oom_kills()
    assert ends(-9) == "died"
    monkeypatch.setattr(local, "_count_oom_kills", lambda: count + 2)
    assert [ends(-9), ends(-9), ends(-9)] == ["ran out of memory", "ran out of memory", "died"]
    monkeypatch.setattr(local, "_count_oom_kills", lambda: count + 3)
    assert [ends(3), ends(-9)] == ["died", "died"], "another process was killed"


def test_workers_after_the_process_that_forks_them_died(engine: LocalEngine) -> None:
    worker = engine.start(Total, 0)
    result(engine, worker.started)
    assert engine._server is not None
    engine._server._process.kill()
    engine._server._process.wait()
    with pytest.raises(WorkerLostError, match=r"^the process that forks workers died$"):
        result(engine, worker.call("add", 1))
    assert result(engine, engine.start(Total, 0).call("add", 1)) == 1


DRIVER = """
import sys, time
from biphasic.workers.local import LocalEngine
from worker_objects import Total
engine = LocalEngine({}, sys.argv[1:])
workers = [engine.start(Total, 0) for _ in range(2)]
while not sys.argv[1:] and not all(engine.wait([worker.started], 0.1) for worker in workers): pass
calls = [worker.call("sleep", 60) for worker in workers]
print("started", flush=True)
time.sleep(60)
"""


def test_closing_where_init_reaps_orphans() -> None:
    """Workers die with the process that forks them, and then there may be nothing left to signal."""
    code = """
from biphasic.workers.local import LocalEngine
from worker_objects import Total, result
for _ in range(10):
    engine = LocalEngine({})
    workers = [engine.start(Total, 0) for _ in range(8)]
    for worker in workers:
        assert result(engine, worker.call("add", 1)) == 1
    engine.close()
"""
    command = [sys.executable, str(ROOT / ".ci" / "reaping_parent.py"), sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("slow_module", [False, True])
def test_a_killed_driver_leaves_no_process(tmp_path: Path, slow_module: bool) -> None:
    """Also not while modules are imported."""
    (tmp_path / "slow_module.py").write_text(f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(1)")
    marker = f"WORKER_TEST={tmp_path}"
    path = os.pathsep.join([*filter(None, sys.path), str(tmp_path)])
    environment = {**os.environ, "WORKER_TEST": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", DRIVER, *(["slow_module"] if slow_module else [])]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"started\n"
    while slow_module and not (tmp_path / "begun").exists():
        time.sleep(0.01)
    assert len(processes_with(marker)) == (2 if slow_module else 4)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + (10 if slow_module else 1)
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def test_closing_does_not_wait_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "very_slow_module.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    engine = LocalEngine({}, ["very_slow_module"])
    worker = engine.start(Total, 0)
    start = time.monotonic()
    assert engine.wait([worker.started], 0.1) == []
    engine.close()
    assert time.monotonic() - start < 10


def test_workers_are_spread_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: ["3", "GPU-a"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a")
    engine = LocalEngine({})
    try:
        assert engine.gpus == 2
        workers = [engine.start(Total, 0, gpu_share=0.5) for _ in range(3)]
        gpus = [result(engine, worker.started).gpus for worker in workers]
        assert gpus == [("3",), ("GPU-a",), ("3",)]
        seen = [result(engine, worker.call("about"))["environment"]["CUDA_VISIBLE_DEVICES"] for worker in workers]
        assert seen == ["3", "GPU-a", "3"]
        # A dead worker's share is given to the next one.
        for worker in (workers[1], workers[0]):
            with pytest.raises(WorkerLostError):
                result(engine, worker.call("exit", 1))
        assert result(engine, engine.start(Total, 0, gpu_share=0.5).started).gpus == ("GPU-a",)
        alone = engine.start(Total, 0)
        assert result(engine, alone.started).gpus == ()
        assert result(engine, alone.call("about"))["environment"]["CUDA_VISIBLE_DEVICES"] == "3,GPU-a"
    finally:
        engine.close()


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible_gpus(), smallest_gpu_bytes()) == ([], None)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    program.chmod(0o755)
    assert (visible_gpus(), smallest_gpu_bytes()) == (["0", "1"], 40 * 2**30)
    for value, names in (("1", ["1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("", []), ("0,-1,1", ["0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == names
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() == []


def test_a_group_replaces_dead_workers(engine: LocalEngine) -> None:
    workers: WorkerGroup[str] = WorkerGroup(engine, lambda: engine.start(Total, 0), 2, "cluster.at_once")

    def wait_for(count: int) -> list[Any]:
        ended: list[Any] = []
        deadline = time.monotonic() + 60
        while (len(ended) < count or len(workers.idle) < 2) and time.monotonic() < deadline:
            ended += workers.wait(0.5)
        return ended

    assert wait_for(0) == []
    one, two = workers.idle
    one.give("dies", "exit", 1)
    two.give("fails", "fail")
    assert sorted(workers.running) == ["dies", "fails"]
    assert {ended.job: type(ended.error) for ended in wait_for(2)} == {"dies": WorkerLostError, "fails": KeyError}
    workers.idle[0].give("adds", "add", 7)
    [ended] = wait_for(1)
    assert (ended.job, ended.value, ended.error, workers.running) == ("adds", 7, None, [])


def test_workers_that_die_while_they_start_end_the_group(engine: LocalEngine) -> None:
    workers: WorkerGroup[str] = WorkerGroup(engine, lambda: engine.start(die_at_once), 1, "cluster.at_once")
    message = r"^workers die while they start \(exit status 3\): is there memory for 1 of them \(cluster.at_once\)\?$"
    assert workers.wait(60) == workers.wait(60) == []
    with pytest.raises(UserError, match=message):
        workers.wait(60)
