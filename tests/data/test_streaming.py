"""Rows from shards: each once, none damaged, and within the cache."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streaming.base.storage.download import DOWNLOADER_MAPPINGS, GCSDownloader
from streaming.base.world import World

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.data import shards
from biphasic.data.mds_reader import ShardError
from biphasic.errors import UserError
from biphasic.storage import open_store
from conftest import MakeBucket, Write
from helpers.buckets import bucket_for, client, flip_a_bit, smallest_limit, upload, upload_to
from helpers.numbered_rows import data, numbers, open_rows, write_numbered
from helpers.tiny import ROOT, config_of, launch, losses, release_streaming, train


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits five seconds for each loader process whose iterator a garbage collection finds."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


class Watch:
    """The most that a folder held while this was open."""

    def __init__(self, folder: Path):
        self.folder, self.peak, self._done = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, folder_bytes(self.folder))
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_small_cache_delivers_every_row_of_an_epoch_once(s3: Path, tmp_path: Path, workers: int) -> None:
    rows, cache = 1600, tmp_path / "cache"
    bucket = bucket_for(s3, f"small-cache-{workers}")
    made = write_numbered(tmp_path / "made", rows, in_shard=40)
    remote = upload(made, bucket, "out/train")
    unpacked = sum(shard["raw_data"]["bytes"] for shard in json.loads((made / "index.json").read_text())["shards"])
    config = data(remote, local=str(cache), predownload=8, num_workers=workers, shuffle_block_size=32)
    limit = smallest_limit(config)
    config = config.model_copy(update={"cache_limit": limit})
    assert limit < unpacked / 2
    batches = open_rows(config)
    largest = max(shard.get_max_size() for shard in batches.dataset.shards)
    with Watch(cache) as watch:
        epochs = [numbers(batches) for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    assert epochs[0] != epochs[1]
    # Streaming counts a download when it is done: what several threads fetch at the same time comes on top.
    assert watch.peak <= limit + 3 * max(workers, 1) * largest
    assert folder_bytes(cache) <= limit + 3 * max(workers, 1) * largest < unpacked


@pytest.mark.parametrize("store", ["rclone", "google"], indirect=True)
def test_loader_processes_have_connections_of_their_own(
    store: MakeBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has downloaded the index before it forks them: with its connection they would read each other's answers."""
    made = write_numbered(tmp_path / "made", 800)
    remote = upload_to(made, f"{store('forked')}/out/train")
    monkeypatch.setattr(shards, "_DOWNLOAD_ATTEMPTS", 1)
    keys: dict[str, Any] = {"num_workers": 4, "predownload": 40}
    assert sorted(numbers(open_rows(data(remote, local=str(tmp_path / "cache"), **keys)))) == list(range(800))


def test_a_download_from_google_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's library leaves a part of the file, which Streaming would take for all of it."""
    calls = list[str]()

    def download(self: Any, remote: str, local: str, timeout: float) -> None:
        calls.append(local)
        Path(local).write_bytes(b"whole" if len(calls) == 2 else b"par")
        if len(calls) == 1:
            raise OSError("503")

    monkeypatch.setattr(GCSDownloader, "_download_file_impl", download)
    downloader, file = DOWNLOADER_MAPPINGS["gs"](), tmp_path / "shard"
    with pytest.raises(OSError, match="503"):
        downloader.download("gs://bucket/shard", str(file))
    assert not list(tmp_path.iterdir())
    downloader.download("gs://bucket/shard", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["shard"] and file.read_bytes() == b"whole"


def test_a_limit_below_the_shards_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two canonical nodes, each with 32 + 3 rows in a block, over shards of 20 rows: 2 x (2 + 1) shards and the index."""
    made = write_numbered(tmp_path / "made", 1200)
    config = data(str(made), local=str(tmp_path / "cache"), predownload=2, shuffle_block_size=32)
    index = json.loads((made / "index.json").read_text())["shards"]
    largest = max(shard["raw_data"]["bytes"] + shard["zip_data"]["bytes"] for shard in index)
    size = (made / "index.json").stat().st_size
    # One process reads 8 + 2 + 1 rows at a time, half of them from each canonical node.
    assert smallest_limit(config) == size + 6 * largest
    # More processes and rows ahead: more shards, until each row has its own, or all shards are in use.
    # 109 rows: 2 x (86.5 / 20 rounded up, and 1).
    assert smallest_limit(config.model_copy(update={"predownload": 100})) == size + 12 * largest
    assert smallest_limit(config.model_copy(update={"predownload": 100, "num_workers": 50})) == size + 60 * largest
    assert smallest_limit(config, train=False) == size + 4 * largest  # not shuffled
    # Each of three nodes reads rows of both canonical nodes, one of two those of its own; 32 + 16.5 and 32 + 11 rows deep.
    for nodes, count in ((3, 8), (2, 4)):
        monkeypatch.setattr(World, "detect", classmethod(lambda _, nodes=nodes: World(nodes, 1, 1, 0)))
        assert smallest_limit(config) == size + count * largest, nodes


def test_a_temporary_folder_in_which_loader_processes_would_hang_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"/tmp/{'long' * 20}"
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: f"{folder}/pymp-0")
    made = write_numbered(tmp_path / "made", 20)
    with pytest.raises(UserError, match=r"^TMPDIR: /tmp/(long){20} has a path of 85 bytes, .* at most 75, as TMPDIR=/tmp$"):
        open_rows(data(made, num_workers=1))


def test_loader_processes_are_forks(tmp_path: Path) -> None:
    """Python 3.14 would start others, which know nothing of this process: the flag of their signals, for example."""
    made = write_numbered(tmp_path / "made", 20)
    assert open_rows(data(made, num_workers=1), batch=2).multiprocessing_context.get_start_method() == "fork"


def test_the_limit_never_deletes_a_local_dataset(tmp_path: Path) -> None:
    """The limit of a remote training split must not delete a local validation split."""
    made = write_numbered(tmp_path / "made", 100)
    config = data(made).model_copy(update={"cache_limit": 1000})
    assert sorted(numbers(open_rows(config, train=False))) == list(range(100))
    assert len(list(made.glob("*.zstd"))) == 5


@pytest.mark.parametrize(
    ("workers", "compression"),
    [(0, None), (2, "zstd"), *(pytest.param(*slow, marks=pytest.mark.slow) for slow in ((0, "zstd"), (2, None)))],
)
def test_a_damaged_shard_in_a_bucket_stops_the_loader(
    s3: Path, tmp_path: Path, workers: int, compression: str | None
) -> None:
    bucket = bucket_for(s3, f"damaged-{workers}-{compression}")
    remote = upload(write_numbered(tmp_path / "made", 200, compression=compression), bucket, "out/train")
    file = "shard.00007.mds" + (".zstd" if compression else "")
    flip_a_bit(bucket, f"out/train/{file}")
    config = data(remote, local=str(tmp_path / "cache"), num_workers=workers, predownload=4)
    # The second time from the cache of the first; loader processes that are killed keep Streaming waiting for a minute.
    for _ in range(1 if workers else 2):
        read: list[int] = []
        batches = open_rows(config, 4)
        with pytest.raises(ShardError) as caught:
            read.extend(number for batch in batches for number in numbers([batch]))
        assert len(str(caught.value).splitlines()) == 1
        assert str(caught.value).startswith(f"shard {remote}/{file}: is damaged: its xxh64 is not the one in")
        assert not set(read) & set(range(140, 160))
        assert read
        del batches, caught  # its traceback holds the loader
        gc.collect()
        assert not (tmp_path / "cache" / "shard.00007.mds").exists()


def test_a_damaged_local_shard_stops_the_loader_and_is_kept(tmp_path: Path) -> None:
    made = write_numbered(tmp_path / "made", 200)
    path = made / "shard.00007.mds.zstd"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardError, match=r"shard .*made/shard\.00007\.mds\.zstd: is damaged"):
        numbers(open_rows(data(made)))
    assert path.read_bytes() == content


CHANGES: dict[str, tuple[Callable[[bytearray], bytes], str]] = {
    "a bit": (
        lambda content: content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
        "the xxh64 of FILE is not the one",
    ),
    "shorter": (lambda content: content[:900], "FILE has 900 bytes instead of the 1,"),
    "longer": (lambda content: content + bytes(9), "FILE has 1,"),
    "empty": (lambda content: b"", "FILE has 0 bytes instead of the 1,"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["unpacked", "stored", "cache"])
def test_a_shard_that_was_changed_on_this_machine_is_not_read(s3: Path, tmp_path: Path, change: str, place: str) -> None:
    """Also if it was read by an earlier start; what can be made again is made again by the next."""
    made = write_numbered(tmp_path / "made", 200, compression=None if place == "stored" else "zstd")
    config = data(made)
    if place == "cache":
        remote = upload(made, bucket_for(s3, f"changed-{change.replace(' ', '-')}"), "out/train")
        made = tmp_path / "cache"
        config = data(remote, local=str(made))
    assert sorted(numbers(open_rows(config))) == list(range(200))
    release_streaming()
    file = made / "shard.00007.mds"
    content = bytearray(file.read_bytes())
    changed, problem = CHANGES[change]
    file.write_bytes(changed(content))
    read: list[int] = []
    with pytest.raises(ShardError) as caught:
        read.extend(number for batch in open_rows(config) for number in numbers([batch]))
    stored = f"{config.streams['data.train'].remote or made}/shard.00007.mds" + ".zstd" * (place != "stored")
    problem = problem.replace("FILE", str(file))
    assert str(caught.value).startswith(f"shard {stored}: is damaged: {problem}")
    assert f" in {made}/index.json; none of its rows were used; " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not set(read) & set(range(140, 160))
    del caught
    release_streaming()
    if place == "stored":
        assert file.read_bytes() == changed(content)
    else:  # another thread may have unpacked it again already
        assert not file.exists() or file.read_bytes() == content
        assert sorted(numbers(open_rows(config))) == list(range(200))
        assert file.read_bytes() == content


def test_a_shard_is_compared_once_by_all_processes_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, hashed = write_numbered(tmp_path / "made", 200), tmp_path / "hashed"
    digest = hashlib.file_digest

    def note(file: Any, name: Any) -> Any:
        with hashed.open("a") as notes:
            notes.write("one\n")
        time.sleep(0.1)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", note)
    assert sorted(numbers(open_rows(data(made, num_workers=4)))) == list(range(200))
    assert hashed.read_text().split() == ["one"] * 10


def test_a_shard_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    made = write_numbered(tmp_path / "made", 200)
    batches = iter(open_rows(data(made), train=False))
    next(batches)
    (made / "shard.00000.mds").write_bytes(b"")
    with pytest.raises(ShardError, match=r"^shard .*made/shard\.00000\.mds: was changed while it was read \(.+\)$"):
        numbers(batches)


def test_a_missing_shard_is_named(s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_for(s3, "gone")
    remote = upload(write_numbered(tmp_path / "made", 200), bucket, "out/train")
    client().delete_object(Bucket=bucket, Key="out/train/shard.00003.mds.zstd")
    monkeypatch.setattr(shards, "_DOWNLOAD_ATTEMPTS", 1)
    config = data(remote, local=str(tmp_path / "cache"))
    with pytest.raises(ShardError, match=rf"shard {remote}/shard\.00003\.mds\.zstd: can't be read into .*cache") as error:
        numbers(open_rows(config))
    assert len(str(error.value).splitlines()) == 1


def test_a_damaged_shard_stops_a_run_of_two_ranks_in_one_line(s3: Path, tmp_path: Path, write_yaml: Write) -> None:
    bucket = bucket_for(s3, "damaged-run")
    path = write_yaml(data__num_workers=1)
    remote = upload(tmp_path / "data" / "train", bucket, "out/train")
    last = sorted((s3 / bucket / "out" / "train").glob("shard.*"))[-1].name
    flip_a_bit(bucket, f"out/train/{last}")
    overrides = {
        "data.train.remote": remote,
        "data.train.local": tmp_path / "cache",
        "max_duration": "1ep",
        "schedule.decay": "0ba",
        "objective.phases": "[{name: clm}]",
        "checkpoint.interval": "100ba",
    }
    run = launch(path, *(f"{key}={value}" for key, value in overrides.items()), processes=2)
    assert run.returncode == 2
    assert (run.stderr + run.stdout).count(f"shard {remote}/{last}: is damaged") == 1
    assert "Traceback" not in run.stderr


def test_a_run_whose_unpacked_shard_was_changed_ends_with_status_2(tmp_path: Path, write_yaml: Write) -> None:
    path = write_yaml(data__num_workers=2, max_duration="4ba", objective__phases=[{"name": "clm"}], schedule={})
    assert launch(path).returncode == 0
    for file in (tmp_path / "data" / "train").glob("*.mds"):
        file.write_bytes(file.read_bytes()[:-1])
    run = launch(path, "run_name=again")
    assert run.returncode == 2
    assert (run.stderr + run.stdout).count("bytes instead of the") >= 1
    assert "Traceback" not in run.stderr, run.stderr
    # The other loader process may have unpacked a shard again, and read it.
    trained = losses(tmp_path / "runs" / "again")
    assert trained == losses(tmp_path / "runs" / "run")[: len(trained)] and len(trained) < 4


def test_the_cache_of_another_dataset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the same name, or an earlier conversion in the same place."""
    one, other = (write_numbered(tmp_path / version / "text", rows) for version, rows in (("v1", 60), ("v2", 61)))
    monkeypatch.setattr(shards, "_DOWNLOAD_ATTEMPTS", 1)
    keys: dict[str, Any] = {"local": str(tmp_path / "cache")}
    for _ in range(2):
        assert sorted(numbers(open_rows(data(str(one), **keys), train=False))) == list(range(60))
        release_streaming()
    with pytest.raises(UserError, match=rf"^{tmp_path}/cache: holds the shards of another dataset than {other}: remove it"):
        open_rows(data(str(other), **keys))
    shutil.rmtree(one)
    with pytest.raises(UserError, match=f"^dataset {one}: can't be opened"):
        open_rows(data(str(one), **keys))
    assert not [path.name for path in (tmp_path / "cache").glob("index.json.*")]


def test_an_unfinished_conversion_is_named(s3: Path, tmp_path: Path) -> None:
    bucket = bucket_for(s3, "unfinished")
    made = write_numbered(tmp_path / "made" / "train", 60)
    (made / "index.json").unlink()
    (tmp_path / "made" / "conversion.started").write_text("")
    remote = upload(tmp_path / "made", bucket, "out")
    message = "its conversion is not finished; run `biphasic verify` on it to see which work units are missing"
    with pytest.raises(UserError, match=f"^{tmp_path / 'made'}: {message}"):
        open_rows(data(made))
    with pytest.raises(UserError, match=f"^{remote}: {message}"):
        open_rows(data(f"{remote}/train", local=str(tmp_path / "cache")))
    for place in (str(tmp_path / "made"), remote):
        open_store(place).remove(["conversion.started"])
    with pytest.raises(UserError, match=f"^no dataset in {made}"):
        open_rows(data(made))
    with pytest.raises(UserError, match=f"^no dataset in {remote}/train"):
        open_rows(data(f"{remote}/train", local=str(tmp_path / "cache")))


def test_a_run_through_a_small_cache_equals_one_from_a_folder(store: MakeBucket, tmp_path: Path, write_yaml: Write) -> None:
    """It trains on the same rows, in the same order, saves to the bucket, and resumes from there on an empty machine."""
    bucket = store("tiny-run")
    expected = losses(train(config_of(write_yaml("local", checkpoint__interval="100ba"))))
    original = tmp_path / "original"
    shutil.copytree(tmp_path / "data" / "train", original, ignore=shutil.ignore_patterns("*.mds"))
    remote = upload_to(original, f"{bucket}/out/train")
    cache = tmp_path / "cache"
    data_config = data(remote, local=str(cache), predownload=2)
    limit = smallest_limit(data_config)
    shutil.rmtree(cache)
    path = write_yaml(
        "remote",
        data__train={"local": str(cache), "remote": remote},
        data__predownload=2,
        data__cache_limit=f"{limit}b",
        checkpoint__interval="4ba",
        checkpoint__folder=f"{bucket}/run",
    )
    folder = train(config_of(path))
    assert losses(folder) == expected
    assert len(expected) == 12
    saved = [checkpoint.batch for checkpoint in list_checkpoints(open_store(f"{bucket}/run")) if checkpoint.manifest]
    assert saved == [12, 8, 6, 4]
    newest = list_checkpoints(open_store(f"{bucket}/run"))[0].manifest
    assert newest is not None
    open_store(f"{bucket}/run").remove([newest.name, *newest.files])
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(cache)
    assert losses(train(config_of(path))) == expected
    batches = [json.loads(line)["batch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert batches.count(8) == 1 and batches.count(9) > 1
    assert 0 < folder_bytes(cache) <= limit


READ_ONLY = """
import sys
from biphasic.config.load import load
from biphasic.config.conversion_checks import check_rows
from biphasic.preflight import disk_needs
from helpers.tiny import losses, train
for file in sys.argv[1:]:
    config = load(file)
    print(*check_rows(config).problems, *check_rows(config).warnings, sep="\\n")
    print("disk", [str(folder) for folder, _ in disk_needs(config)])
    print("losses", losses(train(config)))
"""


def test_a_dataset_that_can_only_be_read_is_unpacked_in_the_cache(
    tmp_path: Path, write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by its splits, and by its folder with a limit. Root may write any folder, so its process gives this up."""
    expected = losses(train(config_of(write_yaml("writable"))))
    shared = tmp_path / "shared" / "data"
    shutil.copytree(tmp_path / "data", shared, ignore=shutil.ignore_patterns("*.mds"))
    whole = {"data__folder": str(shared), "data__train": None, "data__validation": None, "data__cache_limit": "100mb"}
    paths = [
        write_yaml("by_split", data__train={"local": str(shared / "train")}),
        write_yaml("by_folder", **whole, data__cache=str(tmp_path / "limited")),
    ]
    monkeypatch.chdir(tmp_path)
    for folder in (shared, *shared.iterdir()):
        folder.chmod(0o555)
    capability = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests"}
    run = subprocess.run(
        [*capability, sys.executable, "-c", READ_ONLY, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    for folder in (shared, *shared.iterdir()):
        folder.chmod(0o755)
    assert run.returncode == 0, run.stderr[-3000:]
    for cache in (f"data/cache/data.train{shared}/train", f"{tmp_path}/limited/data.train{shared}/train"):
        line = f"data.train: {shared}/train can't be written, so its shards are unpacked in {cache}"
        assert run.stdout.count(line) == 2  # in the plan, and in the run
        assert f"disk ['{cache}'" in run.stdout
        assert list(Path(cache).rglob("*.mds"))
    assert run.stdout.count(f"losses {expected}") == 2
    assert not list(shared.rglob("*.mds"))
