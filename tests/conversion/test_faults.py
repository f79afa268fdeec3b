"""Faults end a conversion with a clear message; after the repair the bytes are those of an undisturbed run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.config.load import dump
from biphasic.conversion import source_files
from biphasic.conversion.convert import convert
from biphasic.conversion.verify import verify
from biphasic.conversion.worker import convert_unit
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from helpers.outputs import same_bytes, segments_in
from helpers.s3_server import serve_s3
from helpers.texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
ALONE = {"workers": 1}
KEYS: dict[str, Any] = {"unit_bytes": 450_000, "shard_bytes": 1 << 16, "cluster": ALONE, "validation_fraction": 0.05}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files, a work unit each."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(6):
        write_parquet(folder / f"{number}.parquet", sentences(2000, seed=number))
    return folder


@pytest.fixture(scope="module")
def undisturbed(text: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an undisturbed conversion."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    source = {"kind": "files", "paths": [str(text)]}
    keys = {"job": "convert", "source": source, "tokenizer": str(tokenizer_folder), "sequence_length": 64, **KEYS}
    convert(ConvertConfig.model_validate({**keys, "output": str(output)}))
    return output


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Overwrite some bytes in the middle of a file during the block."""
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(500) + content[middle + 500 :])
    try:
        yield
    finally:
        file.write_bytes(content)


def test_a_damaged_file_does_not_stop_other_units(text: Path, undisturbed: Path, config_for: Make, tmp_path: Path) -> None:
    config = config_for(text, **KEYS)
    with damaged(text / "2.parquet"), pytest.raises(UserError) as error:
        convert(config)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"source {text}/2.parquet: is damaged after row ")
    assert first.endswith("; restore the file and run the same command again, or set on_bad_file: skip")
    assert second == f"{tmp_path}/out: 5 of 6 work units are finished and kept; no dataset is published yet"
    with pytest.raises(UserError, match=r"1 work units are missing \(.*2\.parquet\)"):
        verify(str(tmp_path / "out"))
    convert(config)
    assert same_bytes(tmp_path / "out", undisturbed)


def test_a_damaged_file_can_be_skipped(
    text: Path, config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(text, tmp_path / "copy")
    (copy / "4.parquet").write_bytes(b"")
    with damaged(copy / "2.parquet"):
        record = convert(config_for(copy, on_bad_file="skip", **KEYS))
        empty, message = record["source"]["left_out"]
        assert empty == f"source {copy}/4.parquet: is empty (0 bytes)"
        assert message.startswith(f"source {copy}/2.parquet: is damaged after row ")
        # The rows before the damage are taken.
        rows = int(message.split("after row ")[1].split()[0])
        assert record["documents"]["read"] == 4 * 2000 + rows
        assert rows > 500
        assert f"skipped: {message}" in capsys.readouterr().out
        assert verify(str(tmp_path / "out")).faults == []
    with pytest.raises(UserError, match=r"4\.parquet: is empty \(0 bytes\); restore the file"):
        convert(config_for(copy, output=str(tmp_path / "other"), **KEYS))


def odd_text(folder: Path) -> Path:
    folder.mkdir()
    binary = [b"a good text", None, b"", b"bad \xff bytes", b"x" * 17_000_000, b"another good text"]
    column = pa.array(binary, pa.large_binary()).cast(pa.large_string(), safe=False)
    pq.write_table(pa.table({"id": [f"d{at}" for at in range(6)], "text": column}), folder / "odd.parquet")
    return folder


def test_odd_documents_are_skipped_and_counted(config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = odd_text(tmp_path / "odd")
    record = convert(config_for(folder, cluster=ALONE))
    assert record["documents"]["skipped"] == {"not UTF-8": 1, "too long": 1, "without text": 2}
    assert record["splits"]["train"]["documents"] == 2
    lines = capsys.readouterr().out.splitlines()
    prefix = f"skipped: {folder}/odd.parquet, row"
    assert [line for line in lines if line.startswith("skipped")] == [
        f"{prefix} 2: has no text",
        f"{prefix} 3: has no text",
        f"{prefix} 4: its text is not UTF-8",
        f"{prefix} 5: its text has 17,000,000 characters; the limit is 16,777,216",
    ]


def test_odd_documents_can_stop_the_conversion(config_for: Make, tmp_path: Path) -> None:
    folder = odd_text(tmp_path / "odd")
    with pytest.raises(UserError, match=r"odd\.parquet, row 2: has no text; fix the file, or set on_bad_document: skip"):
        convert(config_for(folder, cluster=ALONE, on_bad_document="stop"))
    # Once they are allowed, the same output resumes.
    convert(config_for(folder, cluster=ALONE))


@pytest.mark.parametrize("characters", [3_000_000, pytest.param(16_777_216, marks=pytest.mark.slow)])
def test_a_very_long_text_is_converted_completely(config_for: Make, tmp_path: Path, characters: int) -> None:
    """It is tokenized in parts."""
    words = (" ".join(record["text"] for record in sentences(4000)) * 120)[:characters]
    assert len(words) == characters
    file = tmp_path / "book.txt"
    file.write_text(words)
    config = config_for(file, cluster=ALONE, add_eos=False, sequence_length=2048)
    record = convert(config)
    assert record["splits"]["train"]["documents"] == 1
    decode = load_tokenizer(config.tokenizer).tokenizer.decode
    text = "".join(decode(segment.tolist()) for segment in segments_in(tmp_path / "out" / "train"))
    assert text == words.rstrip("\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(text: Path, undisturbed: Path, config_for: Make, small_disk: Path) -> None:
    config = config_for(text, **{**KEYS, "output": str(small_disk / "out")})
    with pytest.raises(UserError) as error:
        convert(config)
    first, second = str(error.value).splitlines()
    assert first == (
        f"output {small_disk}/out: can't be written (No space left on device); finished work units are kept; fix the cause, "
        "and run the same command again"
    )
    assert " of 6 work units are finished and kept" in second
    assert not second.startswith(f"{small_disk}/out: 0 ")
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    convert(config)
    assert same_bytes(small_disk / "out", undisturbed)


class Server:
    """An S3 server that can be stopped and started again."""

    def __init__(self, root: Path):
        self.root, self.port = root, 0
        self.start()

    def start(self) -> None:
        self.process, self.port = serve_s3(self.root, self.port)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    server = Server(tmp_path / "root")
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.chdir(tmp_path)
    yield server
    server.stop()


def after(count: int, act: Callable[[], None]) -> Callable[..., Any]:
    """`convert_unit` that acts before the unit with this number."""
    seen: list[str] = []

    def convert(context: Any, encoder: Any, unit: Any, limit: Any, report: Any) -> Any:
        seen.append(unit.name)
        if len(seen) == count + 1:
            act()
        return convert_unit(context, encoder, unit, limit, report)

    return convert


def test_an_output_bucket_that_becomes_unreachable(
    text: Path, undisturbed: Path, config_for: Make, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(text, **{**KEYS, "output": "s3://bucket/out"})
    monkeypatch.setattr("biphasic.conversion.pool.convert_unit", after(3, server.stop))
    with pytest.raises(UserError) as error:
        convert(config)
    first, second = str(error.value).splitlines()
    assert first.startswith("output s3://bucket/out: can't be written (")
    assert first.endswith("finished work units are kept; fix the cause, and run the same command again")
    assert second == "s3://bucket/out: 3 of 6 work units are finished and kept; no dataset is published yet"
    monkeypatch.undo()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    server.start()
    convert(config)
    assert verify("s3://bucket/out").faults == []
    assert same_bytes(server.root / "bucket" / "out", undisturbed)


def test_a_source_bucket_that_becomes_unreachable(
    text: Path, undisturbed: Path, config_for: Make, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for file in sorted(text.iterdir()):
        client.upload_file(str(file), "bucket", f"text/{file.name}")
    config = config_for("s3://bucket/text", **KEYS)

    def stop() -> None:
        server.stop()
        source_files._small.cache_clear()  # what was looked at before the work began

    monkeypatch.setattr("biphasic.conversion.pool.convert_unit", after(2, stop))
    with pytest.raises(UserError) as error:
        convert(config)
    first, second = str(error.value).splitlines()
    assert first.startswith("source s3://bucket/text/2.parquet: can't be read (")
    assert first.endswith("what is finished is kept; run the same command again when it can be read")
    assert second == f"{tmp_path}/out: 2 of 6 work units are finished and kept; no dataset is published yet"
    monkeypatch.undo()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    server.start()
    record = convert(config)
    assert verify(str(tmp_path / "out")).faults == []
    expected = json.loads((undisturbed / "conversion.json").read_text())["splits"]["train"]
    assert record["splits"]["train"]["documents"] == expected["documents"]


def run(path: Path) -> subprocess.Popen[bytes]:
    """Start the command. It writes to a file: nobody reads a pipe, which would fill up."""
    command = [sys.executable, "-m", "biphasic", "convert", path]
    with path.with_name("output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=path.parent, stdout=output, stderr=subprocess.STDOUT)


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Workers: the children of the fork server, which is a child of the command."""
    try:
        children = psutil.Process(process.pid).children()
        return [worker for child in children for worker in child.children()]
    except psutil.Error:
        return []


def send_signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process.pid, number)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        if child.is_running():
            child.kill()
    process.wait()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_no_byte(
    text: Path, undisturbed: Path, config_for: Make, tmp_path: Path, kills: int
) -> None:
    """SIGKILL to workers, and every sixth time to the command with all its processes."""
    keys = {**KEYS, "cluster": {"workers": 2, "retries": 30}}
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(text, **keys)))
    generator = np.random.default_rng(0)
    process = run(path)
    killed, deadline = 0, time.monotonic() + 400
    try:
        while killed < kills and time.monotonic() < deadline:
            time.sleep(float(generator.uniform(0, min(1.5, 5 / kills))))
            if process.poll() is not None:
                # It ended before enough kills: again from the beginning.
                assert process.returncode == 0, (tmp_path / "output.txt").read_text()
                shutil.rmtree(tmp_path / "out")
                process = run(path)
                continue
            workers = workers_of(process)
            if not workers:
                continue
            if killed % 6 == 1:
                kill_with_children(process)
                published = (tmp_path / "out" / "conversion.json").exists()
                assert published or not list((tmp_path / "out").glob("*/index.json"))
                process = run(path)
            else:
                os.kill(workers[int(generator.integers(len(workers)))].pid, signal.SIGKILL)
            killed += 1
        assert process.wait(timeout=300) == 0, (tmp_path / "output.txt").read_text()
    finally:
        process.kill()
    assert killed == kills
    assert same_bytes(tmp_path / "out", undisturbed)
    assert verify(str(tmp_path / "out")).faults == []


def test_a_unit_whose_workers_die_too_often_stops_the_conversion(text: Path, config_for: Make, tmp_path: Path) -> None:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(text, **{**KEYS, "cluster": {"workers": 2, "retries": 0}})))
    process = run(path)
    unfinished, deadline = tmp_path / "out", time.monotonic() + 100
    workers: list[psutil.Process] = []
    # Stopped workers stay where they are: one of the two is in the middle of a unit when they are killed.
    while not workers or not any(path.is_dir() for path in unfinished.glob(".unfinished-*")):
        assert process.poll() is None and time.monotonic() < deadline
        send_signal(workers, signal.SIGCONT)
        time.sleep(0.01)
        workers = workers_of(process)
        send_signal(workers, signal.SIGSTOP)
    send_signal(workers, signal.SIGKILL)
    assert process.wait(timeout=100) == 2
    output = (tmp_path / "output.txt").read_text()
    assert "parquet: its worker died 1 times; is there memory for each worker (cluster.workers)?" in output
    assert "Traceback" not in output
