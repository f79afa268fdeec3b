"""Several jobs on one machine that start at the same time, read the same data and end at any time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Timer
from typing import Any

import pytest
from streaming import Stream, StreamingDataset
from streaming.base import dataset
from streaming.base.format import reader_from_json
from streaming.base.shared import SharedMemory, prefix

from biphasic.config.data import DataConfig
from biphasic.data import shared_memory
from biphasic.data.shards import open_stream
from biphasic.data.streaming import build_loader
from biphasic.errors import UserError
from helpers import warm
from helpers.tiny import LENGTH, write_rows

JOBS, ROUNDS = 3, 4


def data(**stream: Path) -> DataConfig:
    train = {key: str(path) for key, path in stream.items()}
    return DataConfig.model_validate({"sequence_length": LENGTH, "train": train, "num_workers": 0})


def test_jobs_that_start_at_the_same_time(tmp_path: Path) -> None:
    folders = [tmp_path / f"job{number}" for number in range(JOBS)]
    for folder in folders:
        write_rows(folder / "train", 300, seed=1)
        write_rows(folder / "validation", 60, seed=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(ROUNDS):
        jobs = [warm.start([str(folder)], 2, environment, module="helpers.open_data") for folder in folders]
        for job in jobs:
            run = job.wait()
            assert run.returncode == 0, run.stderr[-3000:]


def test_a_rank_waits_for_the_size_of_shared_memory(tmp_path: Path) -> None:
    write_rows(tmp_path, 200, seed=1)
    config = data(local=tmp_path)
    build_loader(config.reading, config.streams, 4, seed=3, train=True)
    # Not a name of Streaming's, which another job's start would remove as stale.
    file = Path(f"/dev/shm/biphasic-test-{os.getpid()}")
    file.touch()
    resize = Timer(0.3, os.truncate, (file, 8))
    resize.start()
    try:
        memory = SharedMemory(file.name, create=False, auto_cleanup=False)
        assert len(memory.buf) == 8
        memory.cleanup()
    finally:
        resize.join()
        file.unlink()


def test_jobs_can_unpack_the_same_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has written its file before the first one renames it."""
    write_rows(tmp_path, 100, seed=1)
    shard = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    both, rename = Barrier(2), os.rename

    def wait_and_rename(source: Any, target: Any) -> None:
        both.wait(10)
        rename(source, target)

    def unpack() -> None:
        stream = open_stream(data(local=tmp_path).streams["data.train"])
        stream.apply_default({"split": "", "validate_hash": None, "keep_zip": False})
        stream.prepare_shard(reader_from_json(str(tmp_path), "", shard))

    monkeypatch.setattr(os, "rename", wait_and_rename)
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(unpack) for _ in range(2)]:
            job.result()
    assert (tmp_path / shard["raw_data"]["basename"]).stat().st_size == shard["raw_data"]["bytes"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".mds", ".zstd"}


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has `cache` as a dataset's folder, as Streaming records it."""
    name = other_job_locals()
    content = prefix._pack_locals([str(tmp_path / "cache")], 0)
    lock_file = name.replace("_locals", "").replace("shm/", "shm/biphasic_")
    code = f"""
import fcntl, mmap
lock = open({lock_file!r}, "xb")
fcntl.flock(lock, fcntl.LOCK_SH)
with open({name!r}, "w+b", buffering=0) as file:
    file.write({content!r})
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
input()
"""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    job = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert job.stdout is not None and job.stdout.readline() == "mapped\n"
    yield job
    if job.poll() is None:
        job.communicate("\n")
    for path in (name, lock_file):
        Path(path).unlink(missing_ok=True)


def other_job_locals() -> str:
    return f"/dev/shm/{900000 + os.getpid() % 99999:06}_locals"


def test_the_cache_of_another_job_is_refused(
    tmp_path: Path, other_job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "remote", 100, seed=1)
    monkeypatch.setattr(shared_memory, "_CACHE_WAIT_SECONDS", 0.5)
    config = data(remote=tmp_path / "remote", local=tmp_path / "cache")
    with pytest.raises(UserError, match=f"{tmp_path}/cache is the cache of another job that is running on this machine"):
        build_loader(config.reading, config.streams, 8, seed=3, train=True)
    # A dataset without a remote place is only read.
    local = data(local=tmp_path / "cache")
    build_loader(local.reading, local.streams, 8, seed=3, train=True)
    other_job.communicate("\n")
    build_loader(config.reading, config.streams, 8, seed=3, train=True)


def test_the_cache_of_another_program_s_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell whether that job still runs, perhaps in another container."""
    write_rows(tmp_path / "remote", 100, seed=1)
    monkeypatch.setattr(shared_memory, "_CACHE_WAIT_SECONDS", 0.5)
    config = data(remote=tmp_path / "remote", local=tmp_path / "cache")
    file = Path(other_job_locals())
    file.write_bytes(prefix._pack_locals([str(tmp_path / "cache")], 0))
    try:
        with pytest.raises(UserError, match=rf"or remove {file} if that job has ended"):
            build_loader(config.reading, config.streams, 8, seed=3, train=True)
    finally:
        file.unlink()
    build_loader(config.reading, config.streams, 8, seed=3, train=True)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(dataset, "get_shm_prefix"), (StreamingDataset, "_get_work"), (Stream, "_decompress_shard_part")],
    ids=str,
)
def test_another_form_of_streaming_is_refused(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows", 20, seed=1)
    config = data(local=tmp_path / "rows")
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.raises(UserError, match=rf"mosaicml-streaming \S+: .*\.{name} has the parameters \(other\), but"):
        build_loader(config.reading, config.streams, 8, seed=3, train=True)
