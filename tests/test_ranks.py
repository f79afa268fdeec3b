"""A fault of any rank as a person sees it: the exit status, the output, and the record of the attempt."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.run_lock import KILLED, read_attempts
from biphasic.ranks import print_once, run_rank
from biphasic.storage import open_store
from conftest import Write
from helpers import warm
from helpers.tiny import ROOT, composer_command, launch

ENDED = "ended in the middle of a step without a message: it was killed or aborted"
CASES: dict[str, tuple[int, int, list[str], str | None]] = {
    "one": (3, 2, ["the shard is damaged\nput it right\n"], "rank 1: the shard is damaged"),
    "bug": (2, 1, ["OSError: not open\n"], "rank 1: OSError: not open (no key)"),
    "all": (2, 2, ["the loss is not a finite number\n"], "the loss is not a finite number"),
    "away": (2, 1, ["the bucket can't be reached\n"], "rank 1: the bucket can't be reached"),
    "two": (3, 2, ["the disk of rank 1 is full\n", "the disk of rank 2 is full\n"], None),
    "killed": (2, 1, [ENDED], ENDED),
    "stuck": (3, 1, [f"rank 2: {ENDED}"], f"rank 2: {ENDED}"),
    "early": (2, 2, ["the file is not the same on this node\n"], ""),
}
"""Ranks, exit status, what is shown, and why the job ended (None: one of several reasons)."""
# Recording the reason takes longer than the launcher waits with its SIGTERM.
ABORT = """
import os
import time
from biphasic.checkpointing.run_lock import RunLock
from biphasic.checkpointing.stopping import StopCoordinator

agree, release = StopCoordinator.batch_end, RunLock.release

def release_slowly(self, reason):
    time.sleep(1)
    release(self, reason)

RunLock.release = release_slowly

def batch_end(self, state, logger):
    if state.timestamp.batch == 5 and os.environ["RANK"] == "RANK TO ABORT":
        # Checkpoints are written in the background.
        while not os.path.exists("CHECKPOINTS/ba4.json"):
            time.sleep(0.01)
        os.abort()
    agree(self, state, logger)

StopCoordinator.batch_end = batch_end
"""
SHORT_GRACE = "from biphasic import ranks; ranks._GRACE_SECONDS = 0.5"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}


def assert_fault_is_shown_once(case: str, status: int, output: str, reason_file: Path) -> None:
    _, expected_status, messages, expected_reason = CASES[case]
    assert status == expected_status, output
    for message in messages:
        assert output.count(message) == 1, output
    assert output.count("Traceback") == (case == "bug"), output
    reason = reason_file.read_text() if reason_file.exists() else ""
    if expected_reason is not None:
        assert reason.endswith(expected_reason) if expected_reason else not reason


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("killed", "stuck")])
def test_a_fault_is_shown_once(case: str, tmp_path: Path) -> None:
    run = warm.run([case, str(tmp_path / "reason")], CASES[case][0], ENVIRONMENT, module="helpers.failing_ranks")
    assert_fault_is_shown_once(case, run.returncode, run.stdout + run.stderr, tmp_path / "reason")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in ("killed", "stuck") else pytest.mark.slow) for case in CASES]
)
def test_composer_s_launcher_shows_a_fault_once(case: str, tmp_path: Path) -> None:
    command: list[Any] = [ROOT / "tests" / "helpers" / "failing_ranks.py", case, tmp_path / "reason"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(composer_command(*command, processes=CASES[case][0]), env=ENVIRONMENT, **pipes)
    assert_fault_is_shown_once(case, run.returncode, run.stdout, tmp_path / "reason")
    # The launcher prints the output of each rank but the first that ends with a status other than 0.
    assert ("Begin global rank 2" in run.stdout) == (case in ("two", "stuck")), run.stdout


def test_a_shard_that_only_rank_1_reads(write_yaml: Write) -> None:
    """In training, where rank 0 waits in the step for rank 1's gradients."""
    path = write_yaml(max_duration="1ep", schedule__decay="0ba", objective__phases=[{"name": "clm"}])
    folder = path.parent / "data" / "train"
    shard = json.loads((folder / "index.json").read_text())["shards"][-1]["zip_data"]["basename"]
    (folder / shard).write_bytes(bytes(100))
    run = launch(path, processes=2, code=SHORT_GRACE)
    output = run.stdout + run.stderr
    assert run.returncode == 2, output
    fault = f"shard {folder}/{shard}: is damaged: its xxh64 is not the one in {folder}/index.json"
    assert output.count(fault) == 1 and "Traceback" not in output, output
    [attempt] = read_attempts(open_store(str(path.parent / "runs" / "run" / "checkpoints")))
    assert attempt["reason"].startswith(f"rank 1: {fault}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_aborted_rank_is_recorded(rank: int, write_yaml: Write) -> None:
    """As NCCL's watchdog aborts a rank. If it is rank 0, which writes the record, the next start completes it."""
    path = write_yaml()
    folder = path.parent / "runs" / "run"
    code = ABORT.replace("RANK TO ABORT", str(rank)).replace("CHECKPOINTS", str(folder / "checkpoints"))
    run = launch(path, processes=2, code=code)
    assert run.returncode != 0
    assert launch(path, processes=2).returncode == 0
    first, second = read_attempts(open_store(str(folder / "checkpoints")))
    [stacks] = (folder / "crashes").iterdir()
    beginning = KILLED if rank == 0 else f"another rank, or its machine, {ENDED}"
    assert first["reason"] in (
        f"{beginning}: rank {rank}: Aborted ({stacks})",
        f"rank 1: {ENDED}: rank 1: Aborted ({stacks})",
    )
    assert second["reason"] == "finished" and second["from"]["batch"] == 4
    assert "in batch_end" in stacks.read_text()


def test_a_mistake_that_all_ranks_see_is_shown_once(write_yaml: Write) -> None:
    run = launch(write_yaml(), "optimizer.rl=1", processes=2)
    output = run.stdout + run.stderr
    assert run.returncode == 2, output
    assert output.count("optimizer.rl: unknown key") == 1 and "Traceback" not in output, output


def test_every_job_sets_the_timeout() -> None:
    """Composer's own, 300 s, ends a run whose data stalls on one rank."""
    calls = [
        call for file in (ROOT / "src").rglob("*.py") for call in re.findall(r"initialize_dist\((.*)\)", file.read_text())
    ]
    assert len(calls) >= 5
    assert set(calls) == {"rank_device(), COLLECTIVE_SECONDS", "rank_device(), timeout=86_400.0"}


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, ROOT / "tests" / "helpers" / "failing_ranks.py", "one", "/dev/null"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == f"rank 0: MASTER_PORT {port} is in use by another program: start again\n"


def test_ranks_may_open_more_files_than_the_usual_limit() -> None:
    """Each rank has connections to every other one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        soft, hard = [], before[1]
        assert run_rank(lambda: soft.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) or 0) == 0
        assert soft == [min(hard, 65_536)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("rank", "printed"), [(None, "a line\n"), ("0", "a line\n"), ("1", ""), ("10", "")])
def test_a_line_is_printed_on_the_first_rank(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    print_once("a line")
    assert capsys.readouterr().out == printed
