"""What goes wrong on the way ends as one clear line, and once it is mended the bytes are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from biphasic.config.conversion import ConvertConfig
from biphasic.config.errors import UserError
from biphasic.config.load import dump
from biphasic.data.convert import convert
from biphasic.data.verify import verify
from biphasic.data.worker import convert_task
from outputs import same_bytes, segments_in
from s3_server import free_port, serve_s3
from texts import sentences, write_parquet
from tiny import ROOT

Make = Callable[..., ConvertConfig]
MIB = 1 << 20
ALONE = {"workers": 1}
KEYS: dict[str, Any] = {"task_bytes": MIB, "shard_bytes": 1 << 16, "cluster": ALONE, "validation_fraction": 0.05}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Six files, a task each."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        write_parquet(folder / f"{number}.parquet", sentences(4500, seed=number))
    return folder


def undisturbed(text: Path, config_for: Make, tmp_path: Path, **keys: Any) -> Path:
    convert(config_for(text, output=str(tmp_path / "undisturbed"), **{**KEYS, "cluster": ALONE, **keys}))
    return tmp_path / "undisturbed"


def damage(file: Path) -> bytes:
    """Overwrite some bytes in the middle; returns what it was."""
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(500) + content[middle + 500 :])
    return content


def restore(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def test_a_damaged_file_stops_nothing_but_itself(text: Path, config_for: Make, tmp_path: Path) -> None:
    whole = damage(text / "2.parquet")
    config = config_for(text, **KEYS)
    with pytest.raises(UserError) as told:
        convert(config)
    first, second = str(told.value).splitlines()
    assert first.startswith(f"source {text}/2.parquet: is damaged after row ")
    assert first.endswith("; mend it and run the same command again, or set on_bad_file: skip")
    assert second == f"{tmp_path}/out: 5 of 6 tasks are finished and kept; no dataset is published yet"
    with pytest.raises(UserError, match=r"1 tasks are missing \(.*2\.parquet\)"):
        verify(str(tmp_path / "out"))
    restore(text / "2.parquet", whole)
    convert(config)
    assert same_bytes(tmp_path / "out", undisturbed(text, config_for, tmp_path))


def test_a_damaged_file_that_is_skipped(
    text: Path, config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(text / "2.parquet")
    (text / "4.parquet").write_bytes(b"")
    record = convert(config_for(text, on_bad_file="skip", **KEYS))
    empty, damaged = record["source"]["left_out"]
    assert empty == f"source {text}/4.parquet: is empty (0 bytes)"
    assert damaged.startswith(f"source {text}/2.parquet: is damaged after row ")
    # What lies before the damage is taken.
    rows = int(damaged.split("after row ")[1].split()[0])
    assert record["documents"]["read"] == 4 * 4500 + rows
    assert rows > 1000
    said = capsys.readouterr().out
    assert f"skipped: {damaged}" in said
    assert verify(str(tmp_path / "out"), progress=False).faults == []
    # Stopping instead is another wish: what was skipped is not good enough then.
    with pytest.raises(UserError, match=r"4\.parquet: is empty \(0 bytes\); mend it"):
        convert(config_for(text, output=str(tmp_path / "other"), **KEYS))


def odd_text(folder: Path) -> Path:
    folder.mkdir()
    binary = [b"a good text", None, b"", b"bad \xff bytes", b"x" * 50_000_000, b"another good text"]
    column = pa.array(binary, pa.large_binary()).cast(pa.large_string(), safe=False)
    pq.write_table(pa.table({"id": [f"d{at}" for at in range(6)], "text": column}), folder / "odd.parquet")
    return folder


def test_odd_documents_are_skipped_and_counted(
    config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = odd_text(tmp_path / "odd")
    record = convert(config_for(folder, cluster=ALONE))
    assert record["documents"]["skipped"] == {"not UTF-8": 1, "too long": 1, "without text": 2}
    assert record["splits"]["train"]["documents"] == 2
    said = capsys.readouterr().out.splitlines()
    where = f"skipped: {folder}/odd.parquet, row"
    assert [line for line in said if line.startswith("skipped")] == [
        f"{where} 2: has no text",
        f"{where} 3: has no text",
        f"{where} 4: its text is not UTF-8",
        f"{where} 5: its text has 50,000,000 characters, and max_text_characters is 16,777,216",
    ]


def test_odd_documents_that_stop_it(config_for: Make, tmp_path: Path) -> None:
    folder = odd_text(tmp_path / "odd")
    with pytest.raises(UserError, match=r"odd\.parquet, row 2: has no text; mend it, or set on_bad_document: skip"):
        convert(config_for(folder, cluster=ALONE, on_bad_document="stop"))
    # Allowed afterwards: the same output goes on.
    convert(config_for(folder, cluster=ALONE))


def test_a_text_of_50_mb(config_for: Make, tmp_path: Path) -> None:
    """Real words; it is tokenized in parts, and none of it is lost."""
    words = (" ".join(record["text"] for record in sentences(4000)) * 120)[:50_000_000]
    assert len(words) == 50_000_000
    file = tmp_path / "book.txt"
    file.write_text(words)
    config = config_for(file, cluster=ALONE, max_text_characters=60_000_000, add_eos=False, sequence_length=2048)
    record = convert(config)
    assert record["splits"]["train"]["documents"] == 1
    from biphasic.data.tokenizer import load_tokenizer

    decode = load_tokenizer(config.tokenizer).tokenizer.decode
    text = "".join(decode(segment.tolist()) for segment in segments_in(tmp_path / "out" / "train"))
    assert text == words.rstrip("\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(text: Path, config_for: Make, tmp_path: Path, small_disk: Path) -> None:
    config = config_for(text, **{**KEYS, "output": str(small_disk / "out")})
    with pytest.raises(UserError) as told:
        convert(config)
    first, second = str(told.value).splitlines()
    assert first == (
        f"output {small_disk}/out: can't be written (No space left on device); what is finished is kept; mend that, "
        "and run the same command again"
    )
    assert " of 6 tasks are finished and kept" in second
    assert not second.startswith(f"{small_disk}/out: 0 ")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    convert(config)
    assert same_bytes(small_disk / "out", undisturbed(text, config_for, tmp_path))


class Server:
    """An S3 server that can go away."""

    def __init__(self, root: Path):
        self.root, self.port = root, free_port()
        self.start()

    def start(self) -> None:
        self.process = serve_s3(self.root, self.port)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    found = Server(tmp_path / "root")
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.chdir(tmp_path)
    yield found
    found.stop()


def after(count: int, act: Callable[[], None]) -> Callable[..., Any]:
    """`convert_task` that acts before the task with this number."""
    seen: list[str] = []

    def convert_one(work: Any, task: Any, limit: Any, report: Any) -> Any:
        seen.append(task.name)
        if len(seen) == count + 1:
            act()
        return convert_task(work, task, limit, report)

    return convert_one


def test_a_bucket_that_goes_away_while_it_is_written(
    text: Path, config_for: Make, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(text, **{**KEYS, "output": "s3://bucket/out"})
    monkeypatch.setattr("biphasic.data.pool.convert_task", after(3, server.stop))
    with pytest.raises(UserError) as told:
        convert(config)
    first, second = str(told.value).splitlines()
    assert first.startswith("output s3://bucket/out: can't be written (")
    assert first.endswith("what is finished is kept; mend that, and run the same command again")
    assert second == "s3://bucket/out: 3 of 6 tasks are finished and kept; no dataset is published yet"
    monkeypatch.undo()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    server.start()
    convert(config)
    assert verify("s3://bucket/out", progress=False).faults == []
    assert same_bytes(server.root / "bucket" / "out", undisturbed(text, config_for, tmp_path))


def test_a_bucket_that_goes_away_while_it_is_read(
    text: Path, config_for: Make, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for file in sorted(text.iterdir()):
        client.upload_file(str(file), "bucket", f"text/{file.name}")
    config = config_for("s3://bucket/text", **KEYS)
    monkeypatch.setattr("biphasic.data.pool.convert_task", after(2, server.stop))
    with pytest.raises(UserError) as told:
        convert(config)
    first, second = str(told.value).splitlines()
    assert first.startswith("source s3://bucket/text/2.parquet: can't be reached any more (")
    assert first.endswith("what is finished is kept; run the same command again when it can be reached")
    assert second == f"{tmp_path}/out: 2 of 6 tasks are finished and kept; no dataset is published yet"
    monkeypatch.undo()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    server.start()
    record = convert(config)
    assert verify(str(tmp_path / "out"), progress=False).faults == []
    assert record["splits"]["train"]["documents"] == convert_local(text, config_for, tmp_path)


def convert_local(text: Path, config_for: Make, tmp_path: Path) -> int:
    return convert(config_for(text, **{**KEYS, "output": str(tmp_path / "local")}))["splits"]["train"]["documents"]


def run(path: Path, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "data_prep" / "convert.py", path], text=True, cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Ray's workers that are at a task."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
        return [one for one in below if any("ray::_convert" in part for part in one.cmdline())]
    except psutil.Error:
        return []


@pytest.mark.parametrize("seed", [0])
def test_twenty_kills_at_random_moments(text: Path, config_for: Make, tmp_path: Path, seed: int) -> None:
    """SIGKILL to workers, and now and then to the command itself with all that belongs to it."""
    keys = {**KEYS, "cluster": {"workers": 2, "retries": 30}}
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(text, **keys)))
    generator = np.random.default_rng(seed)
    process = run(path, tmp_path)
    killed = commands = 0
    deadline = time.monotonic() + 400
    try:
        while killed < 20 and time.monotonic() < deadline:
            time.sleep(float(generator.uniform(0, 1.5)))
            if process.poll() is not None:
                said = process.stdout.read() if process.stdout else ""
                # It ended before it was killed often enough: once more, on the same output.
                assert process.returncode == 0, said
                subprocess.run(["rm", "-r", tmp_path / "out"], check=True)
                process = run(path, tmp_path)
                continue
            busy = workers_of(process)
            if not busy:
                continue
            if generator.random() < 0.15:
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for one in family:
                    if one.is_running():
                        one.kill()
                process.wait()
                assert (
                    not list((tmp_path / "out").rglob("index.json")) or (tmp_path / "out" / "conversion.json").exists()
                )
                process = run(path, tmp_path)
                commands += 1
            else:
                os.kill(busy[int(generator.integers(len(busy)))].pid, signal.SIGKILL)
            killed += 1
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    finally:
        process.kill()
    assert killed == 20
    assert commands >= 1
    assert same_bytes(tmp_path / "out", undisturbed(text, config_for, tmp_path))
    assert verify(str(tmp_path / "out"), progress=False).faults == []


def test_a_worker_that_dies_again_and_again(text: Path, config_for: Make, tmp_path: Path) -> None:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(text, **{**KEYS, "cluster": {"workers": 2, "retries": 0}})))
    process = run(path, tmp_path)
    deadline = time.monotonic() + 100
    while not (busy := workers_of(process)) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(busy[0].pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "parquet: its worker died 1 times; is there memory for each worker (cluster.workers)?" in said
    assert "Traceback" not in said
