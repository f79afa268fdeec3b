"""From a bucket, to a bucket: against a real S3 server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest

from biphasic.config.conversion import ConvertConfig, FilesSource
from biphasic.config.errors import UserError
from biphasic.data import convert as converting
from biphasic.data.convert import convert
from biphasic.data.sources import find_files
from biphasic.data.storage import destination
from biphasic.data.verify import verify
from texts import Records, sentences, write_parquet

Make = Callable[..., ConvertConfig]


def put(bucket: Path, name: str, content: bytes) -> None:
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    client.put_object(Bucket=bucket.name, Key=name, Body=content)


def jsonl(records: Records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def bucket(s3: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A bucket of the test's own, with two files of text; where it lies on disk, to look at."""
    name = request.node.name.replace("_", "-")[:60].strip("-")
    boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"]).create_bucket(Bucket=name)
    put(s3 / name, "text/a.parquet", write_parquet(tmp_path / "a.parquet", sentences(150, seed=1)).read_bytes())
    put(s3 / name, "text/more/b.jsonl", jsonl(sentences(150, seed=2)))
    return s3 / name


def test_there_and_back(bucket: Path, config_for: Make, tmp_path: Path) -> None:
    from streaming import StreamingDataset

    url = f"s3://{bucket.name}"
    record = convert(config_for(f"{url}/text", output=f"{url}/deep/out", validation_fraction=0.2))
    local = convert(config_for(str(bucket / "text"), output=str(tmp_path / "local"), validation_fraction=0.2))
    assert record["splits"] == local["splits"]
    assert [file["path"] for file in record["source_files"]] == [f"{url}/text/a.parquet", f"{url}/text/more/b.jsonl"]
    there = {
        path.relative_to(bucket / "deep" / "out") for path in (bucket / "deep" / "out").rglob("*") if path.is_file()
    }
    here = {path.relative_to(tmp_path / "local") for path in (tmp_path / "local").rglob("*") if path.is_file()}
    assert there == here
    assert verify(f"{url}/deep/out", progress=False).faults == []
    dataset = StreamingDataset(
        remote=f"{url}/deep/out/train",
        local=str(tmp_path / "cache"),
        shuffle=False,
        batch_size=1,
        validate_hash="xxh64",
    )
    assert len(dataset) == record["splits"]["train"]["rows"]
    assert dataset[0]["tokens"].shape == (64,)


def test_patterns_in_a_bucket(bucket: Path) -> None:
    url = f"s3://{bucket.name}"
    for pattern, expected in (
        ("text/*.parquet", ["text/a.parquet"]),
        ("text/**/*.jsonl", ["text/more/b.jsonl"]),
        ("text/**/*.parquet", ["text/a.parquet"]),
        ("te?t/[a-c].parquet", ["text/a.parquet"]),
        ("text/more/", ["text/more/b.jsonl"]),
    ):
        found = find_files(FilesSource(kind="files", paths=[f"{url}/{pattern}"]))
        assert [file.path for file in found] == [f"{url}/{name}" for name in expected], pattern
    with pytest.raises(UserError, match="there is no such file"):
        find_files(FilesSource(kind="files", paths=[f"{url}/text/*.jsonl"]))


def test_done_once_is_enough(bucket: Path, config_for: Make, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"s3://{bucket.name}"
    config = config_for(f"{url}/text", output=f"{url}/out")
    record = convert(config)
    assert convert(config) == record
    assert "already converted" in capsys.readouterr().out


def test_a_failed_conversion_has_no_index_and_the_next_one_replaces_it(
    bucket: Path, config_for: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file breaks, after shards have been uploaded; then it is mended."""
    url = f"s3://{bucket.name}"
    monkeypatch.setattr(converting, "_BATCH_CHARACTERS", 5000)
    put(bucket, "text/more/b.jsonl", jsonl(sentences(2000, seed=3)) + b"{broken\n")
    with pytest.raises(UserError, match=r"b\.jsonl, line 2001: is not JSON"):
        convert(config_for(f"{url}/text", output=f"{url}/out", segments={"window": 5}))
    left = {path.name for path in (bucket / "out").rglob("*") if path.is_file()}
    assert "shard.00000.mds.zstd" in left
    assert not left & {"index.json", "conversion.json"}
    with pytest.raises(UserError, match=r"holds no conversion\.json"):
        verify(f"{url}/out")
    put(bucket, "text/more/b.jsonl", jsonl(sentences(20, seed=2)))
    record = convert(config_for(f"{url}/text", output=f"{url}/out", segments={"window": 5}))
    assert len(record["splits"]["train"]["shards"]) < len([name for name in left if name.startswith("shard")])
    assert verify(f"{url}/out", progress=False).faults == []
    assert not (bucket / "out" / "conversion.started").exists()


def test_a_prefix_with_something_else_is_refused(bucket: Path, config_for: Make) -> None:
    url = f"s3://{bucket.name}"
    with pytest.raises(UserError, match=r"already holds files that are no conversion \(e\.g\. a\.parquet\)"):
        convert(config_for(f"{url}/text/a.parquet", output=f"{url}/text"))
    assert (bucket / "text" / "a.parquet").exists()


def test_a_bucket_that_is_not_there(s3: Path, config_for: Make) -> None:
    with pytest.raises(UserError, match="output s3://no-such-bucket/out: can't be written"):
        convert(config_for(sentences(5), output="s3://no-such-bucket/out"))
    with pytest.raises(UserError, match="source s3://no-such-bucket/text"):
        convert(config_for("s3://no-such-bucket/text"))


def test_an_upload_that_fails(bucket: Path) -> None:
    """A file lies where the store must make a folder for the shards of the second split."""
    url = f"s3://{bucket.name}"
    place = destination(f"{url}/out")
    (bucket / "out" / "validation").write_text("in the way")
    for name in ("validation/shard.00000.mds", "train/index.json"):
        (place.folder / name).parent.mkdir()
        (place.folder / name).write_bytes(b"x")
        place.written(name)
    with pytest.raises(OSError, match="Failed to upload"):
        place.publish({})
    place.abandon()
    assert not place.folder.exists()
    assert {path.name for path in (bucket / "out").iterdir()} == {"conversion.started", "validation"}
