"""How many requests a save and a start send to a bucket, as the ranks and the checkpoints there grow in number.

Ranks are simulated: each has an uploader of its own, with the files that it would have written, and an S3 server behind a
proxy that counts. `pytest -s` prints the counts.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from biphasic.checkpointing.fetch import find_resume_point
from biphasic.checkpointing.manifest import Manifest, list_checkpoints, newest_complete
from biphasic.checkpointing.rank_group import RankGroup
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.checkpointing.upload import CheckpointUpload, Uploader, write_missing_manifests
from biphasic.storage import file_hash, open_store
from conftest import Write
from helpers.buckets import bucket_for
from helpers.s3_proxy import Proxy
from helpers.s3_server import serve_s3
from helpers.tiny import config_of

SAVES, POLLS = 4, 3
SIZES = [8, 32, pytest.param(128, marks=pytest.mark.slow), pytest.param(512, marks=pytest.mark.slow)]


@pytest.fixture
def proxy(s3: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    port = urlsplit(os.environ["S3_ENDPOINT_URL"]).port
    assert port is not None
    counting = Proxy(port)
    monkeypatch.setenv("S3_ENDPOINT_URL", counting.address)
    yield counting
    counting.close()


def rank_manifest(folder: Path, batch: int, rank: int, ranks: int) -> Manifest:
    names = [f"ep0-ba{batch}/__{rank}_0.distcp", *([f"ep0-ba{batch}/.metadata"] if rank == 0 else [])]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{batch} {rank}")
    files = {name: ((folder / name).stat().st_size, file_hash(folder / name)) for name in names}
    run = {"name": "run", "attempt": "one", "tokens": batch, "writers": ranks, "kept": batch == 1}
    return Manifest(batch, f"ep0-ba{batch}", files, run)


class FirstRankAlone(Event):
    """Stands for the event that ends rank 0's waits: it asks `POLLS` times before the other ranks upload their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.polls, self.may_others_start, self.are_others_done = 0, Event(), Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.polls += 1
        if self.polls == POLLS:
            self.may_others_start.set()
            assert self.are_others_done.wait(500)
        return self.is_set()


def save(local: Path, place: str, batch: int, ranks: int) -> None:
    """All ranks upload their part. Rank 0 is the first, and waits for the others."""
    waits = FirstRankAlone()

    def start(rank: int) -> Uploader:
        uploader = Uploader(local / f"node{rank // 8}", place, 2, rank, range(rank // 8 * 8, rank // 8 * 8 + 8))
        if rank == 0 and ranks > 1:
            uploader._closing = waits
        uploader.add(rank_manifest(local / f"node{rank // 8}", batch, rank, ranks))
        return uploader

    def finish(uploader: Uploader) -> None:
        assert uploader.wait(500)
        uploader.close()

    first = start(0)
    if ranks > 1:
        assert waits.may_others_start.wait(500)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda rank: finish(start(rank)), range(1, ranks)))
        waits.are_others_done.set()
    finish(first)
    assert waits.polls == (POLLS if ranks > 1 else 0)


def since(proxy: Proxy, before: Counter[str]) -> Counter[str]:
    return proxy.requests - before


@pytest.mark.parametrize("ranks", SIZES)
def test_the_requests_of_a_save_grow_no_faster_than_the_ranks(
    s3: Path, proxy: Proxy, tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = f"s3://{bucket_for(s3, f'requests-{ranks}')}/run"
    for batch in range(1, SAVES):
        save(tmp_path, place, batch, ranks)
    before, start = proxy.requests.copy(), time.monotonic()
    save(tmp_path, place, SAVES, ranks)
    seconds, used = time.monotonic() - start, since(proxy, before)
    print(f"\nsave, {ranks} ranks: {dict(used)}, {seconds:.1f} s")
    # The newest two, and the one that is kept; nothing else is left.
    assert [found.batch for found in list_checkpoints(open_store(place)) if found.manifest] == [4, 3, 1]
    assert len(open_store(place).list()) == 3 * (ranks + 2)
    # A file and a manifest each (rank 0: two files), and the checkpoint's manifest.
    assert used["PUT"] == 2 * ranks + 2
    # The size of each file.
    assert used["HEAD"] == ranks + 1
    assert used["LIST"] <= 8
    # Manifests of the other ranks, and of the checkpoints; and one each time that rank 0 asked in vain.
    assert used["GET"] <= ranks - 1 + SAVES + POLLS
    # The files of the checkpoint that is deleted (its manifest twice), and the ranks' manifests.
    assert used["DELETE"] == (ranks + 3) + ranks
    # Several ranks delete from one folder at the same time, and none takes that for a fault.
    assert "can't be stored" not in caplog.text


@pytest.mark.parametrize("ranks", SIZES)
def test_the_requests_of_a_start_grow_no_faster_than_the_ranks(s3: Path, proxy: Proxy, tmp_path: Path, ranks: int) -> None:
    """The last attempt was killed before one rank had uploaded its part, or before rank 0 had written the manifest."""
    place = f"s3://{bucket_for(s3, f'start-{ranks}')}/run"
    local, destination = tmp_path / "local", open_store(place)

    def upload(batch: int, count: int) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda rank: CheckpointUpload(rank_manifest(local, batch, rank, ranks)).upload(
                rank, local, destination), range(count)))  # fmt: skip

    upload(1, ranks)
    before, start = proxy.requests.copy(), time.monotonic()
    write_missing_manifests(destination, destination.list())
    used = since(proxy, before)
    print(f"\nstart, completes a checkpoint of {ranks} ranks: {dict(used)}, {time.monotonic() - start:.1f} s")
    # Two listings, of up to three objects a rank, 1,000 a request.
    listings = 2 * (1 + 3 * ranks // 1000)
    assert used["GET"] <= ranks + 1 and used["LIST"] <= listings and used["DELETE"] == ranks and used["PUT"] == 1
    upload(2, ranks - 1)
    before, start = proxy.requests.copy(), time.monotonic()
    write_missing_manifests(destination, destination.list())
    newest = newest_complete(destination, tmp_path / "other machine")
    used = since(proxy, before)
    print(f"start, the newest of {ranks} ranks is incomplete: {dict(used)}, {time.monotonic() - start:.1f} s")
    assert newest is not None and newest.batch == 1
    # The files are downloaded, each with a HEAD for its size.
    assert used["GET"] + used["HEAD"] <= 2 * (ranks + 1) + 2 and used["LIST"] <= listings


def test_a_failed_request_while_waiting_uploads_nothing_again(
    s3: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, failures = CheckpointUpload.complete, [OSError("503 SlowDown"), OSError("503 SlowDown")]

    def fail_first(self: CheckpointUpload, destination: Any) -> bool:
        if failures:
            raise failures.pop()
        return complete(self, destination)

    monkeypatch.setattr(CheckpointUpload, "complete", fail_first)
    monkeypatch.setattr("biphasic.checkpointing.upload._FIRST_PAUSE", 0.1)
    place = f"s3://{bucket_for(s3, 'requests-again')}/run"
    before = proxy.requests.copy()
    save(tmp_path, place, 1, 1)
    # Two files, rank 0's manifest and the checkpoint's.
    assert not failures and since(proxy, before)["PUT"] == 4
    assert list_checkpoints(open_store(place))[0].manifest is not None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_start_finds_the_newest_of_10000_checkpoints(
    tmp_path: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch, s3: Path, sharded: bool
) -> None:
    """Two objects each, or three if they are sharded; a request lists 1,000."""
    root = tmp_path / "s3"
    run = root / "large" / "run"
    run.mkdir(parents=True)
    for batch in range(1, 10_001):
        path = f"ep0-ba{batch}" if sharded else f"ba{batch}-rank0.pt"
        names = [f"{path}/.metadata", f"{path}/__0_0.distcp"] if sharded else [path]
        if sharded:
            (run / path).mkdir()
        for name in names:
            (run / name).write_bytes(b"x")
        content = {"batch": batch, "path": path, "files": dict.fromkeys(names, (1, "")), "run": {"name": "run"}}
        (run / f"ba{batch}.json").write_text(json.dumps(content))
    newest = json.loads((run / "ba10000.json").read_text())
    newest["files"] = {name: (1, file_hash(run / name)) for name in newest["files"]}
    (run / "ba10000.json").write_text(json.dumps(newest))
    # A server of its own, that finds the files when it starts.
    server, port = serve_s3(root)
    proxy = Proxy(port)
    try:
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.address)
        config = config_of(write_yaml("run", checkpoint__folder="s3://large/run"))
        start = time.monotonic()
        found = find_resume_point(config.checkpoint_destination, config.local_checkpoints, ResumeGuard(config), RankGroup())
        seconds = time.monotonic() - start
        print(f"\nstart, 10,000 checkpoints (sharded: {sharded}): {dict(proxy.requests)}, {seconds:.1f} s")
        assert found is not None and found.batch == 10_000
        assert proxy.requests["LIST"] <= 21 + 10 * sharded
        assert sum(proxy.requests.values()) <= proxy.requests["LIST"] + 6
    finally:
        proxy.close()
        server.kill()
        server.wait()
