"""A fault of any rank, as a person sees it: composer's launcher and its exit status, on the terminal, in the record."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from biphasic.checkpointing.claim import attempts_in
from biphasic.storage import store
from conftest import Write
from tiny import ROOT, composer_command

LOST = "another rank ended in the middle of a step without a message: it was killed or its machine was lost"
CASES: dict[str, tuple[int, int, list[str], str | None]] = {
    "one": (3, 2, ["the shard is damaged\nput it right\n"], "rank 1: the shard is damaged"),
    "bug": (2, 1, ["ZeroDivisionError: division by zero\n"], "rank 1: ZeroDivisionError: division by zero"),
    "all": (2, 2, ["the loss is not a finite number\n"], "the loss is not a finite number"),
    "two": (3, 2, ["the disk of rank 1 is full\n", "the disk of rank 2 is full\n"], None),
    "killed": (2, 1, [LOST], LOST),
    "early": (2, 2, ["the file is not the same on this node\n"], ""),
}
"""Ranks, exit status, what is shown, and why the job ended (None: one of several reasons)."""


def launch(*arguments: str | Path, ranks: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    command = composer_command(*arguments, processes=ranks)
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_shown_once(case: str, tmp_path: Path) -> None:
    ranks, status, messages, expected = CASES[case]
    run = launch(ROOT / "tests" / "failing_ranks.py", case, tmp_path / "reason", ranks=ranks)
    assert run.returncode == status, run.stdout
    for message in messages:
        assert run.stdout.count(message) == 1, run.stdout
    assert run.stdout.count("Traceback") == (case == "bug"), run.stdout
    # The launcher prints the output of each rank but the first that ends with a status other than 0.
    assert ("Begin global rank 2" in run.stdout) == (case == "two"), run.stdout
    reason = (tmp_path / "reason").read_text() if (tmp_path / "reason").exists() else ""
    assert expected is None or (reason.endswith(expected) if expected else not reason)


def test_a_shard_that_only_rank_1_reads(write_yaml: Write) -> None:
    """In training, where rank 0 waits in the step for rank 1's gradients."""
    path = write_yaml(max_duration="1ep", schedule__decay="0ba", objective__phases=[{"name": "clm"}])
    folder = path.parent / "data" / "train"
    shard = json.loads((folder / "index.json").read_text())["shards"][-1]["zip_data"]["basename"]
    (folder / shard).write_bytes(bytes(100))
    run = launch(ROOT / "src" / "main.py", path, ranks=2)
    assert run.returncode == 2, run.stdout
    fault = f"shard {folder}/{shard}: is damaged: its xxh64 is not the one in {folder}/index.json"
    assert run.stdout.count(fault) == 1 and "Traceback" not in run.stdout, run.stdout
    [attempt] = attempts_in(store(str(path.parent / "runs" / "run" / "checkpoints")))
    assert attempt["reason"].startswith(f"rank 1: {fault}")


def test_a_mistake_that_all_ranks_see(write_yaml: Write) -> None:
    run = launch(ROOT / "src" / "main.py", write_yaml(), "optimizer.rl=1", ranks=2)
    assert run.returncode == 2, run.stdout
    assert run.stdout.count("optimizer.rl: unknown key") == 1, run.stdout
    assert "Begin global rank" not in run.stdout and "Traceback" not in run.stdout, run.stdout


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, ROOT / "tests" / "failing_ranks.py", "one", "/dev/null"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == f"rank 0: MASTER_PORT {port} is in use by another program: start again\n"
