"""From a bucket, to a bucket: against real servers."""

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

import biphasic.conversion.convert as convert_module
from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.conversion import worker
from biphasic.conversion.convert import convert
from biphasic.conversion.output import tokenizer_record
from biphasic.conversion.sources import find_files
from biphasic.conversion.verify import verify
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store
from conftest import MakeBucket
from helpers.buckets import upload_to
from helpers.outputs import open_dataset
from helpers.s3_proxy import Proxy
from helpers.texts import Records, sentences, write_parquet

Make = Callable[..., ConvertConfig]
Patch = pytest.MonkeyPatch


def put(bucket: Path, name: str, content: bytes) -> None:
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    client.put_object(Bucket=bucket.name, Key=name, Body=content)


def jsonl(records: Records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def bucket(s3: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket of the test's own, with two files of text; where it lies on disk, to look at."""
    monkeypatch.chdir(tmp_path)
    name = request.node.name.replace("_", "-")[:60].strip("-")
    boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"]).create_bucket(Bucket=name)
    put(s3 / name, "text/a.parquet", write_parquet(tmp_path / "a.parquet", sentences(150, seed=1)).read_bytes())
    put(s3 / name, "text/more/b.jsonl", jsonl(sentences(150, seed=2)))
    return s3 / name


@pytest.fixture
def url(store: MakeBucket, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket of the test's own in a store of each kind, with the two files of text in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text" / "more").mkdir(parents=True)
    write_parquet(tmp_path / "text" / "a.parquet", sentences(150, seed=1))
    (tmp_path / "text" / "more" / "b.jsonl").write_bytes(jsonl(sentences(150, seed=2)))
    address = store(request.node.originalname.replace("_", "-").removeprefix("test-"))
    upload_to(tmp_path / "text", f"{address}/text")
    return address


def test_conversion_from_and_to_a_bucket(url: str, config_for: Make, tmp_path: Path) -> None:
    record = convert(config_for(f"{url}/text", output=f"{url}/deep/out", validation_fraction=0.2))
    local = convert(config_for(str(tmp_path / "text"), output=str(tmp_path / "local"), validation_fraction=0.2))
    # The units are named after their files' paths, and these lie elsewhere.
    assert list(record["splits"]) == list(local["splits"])
    for split in record["splits"]:
        outputs = (f"{url}/deep/out", str(tmp_path / "local"))
        indexes = [json.loads(open_store(output).read(f"{split}/index.json")) for output in outputs]
        stored, expected = ([shard["zip_data"]["hashes"] for shard in index["shards"]] for index in indexes)
        assert stored == expected
    assert [file["path"] for file in record["source"]["files"]] == [f"{url}/text/a.parquet", f"{url}/text/more/b.jsonl"]
    assert verify(f"{url}/deep/out").faults == []
    dataset = open_dataset(tmp_path / "cache", f"{url}/deep/out/train")
    assert len(dataset) == record["splits"]["train"]["rows"]
    assert dataset[0]["tokens"].shape == (64,)


def test_patterns_in_a_bucket(url: str) -> None:
    for pattern, expected in (
        ("text/*.parquet", ["text/a.parquet"]),
        ("text/**/*.jsonl", ["text/more/b.jsonl"]),
        ("text/**/*.parquet", ["text/a.parquet"]),
        ("te?t/[a-c].parquet", ["text/a.parquet"]),
        ("text/*[!bc].parquet", ["text/a.parquet"]),
        ("text/**/[!a]*", ["text/more/b.jsonl"]),
        ("text/more/", ["text/more/b.jsonl"]),
        ("text/a.parquet", ["text/a.parquet"]),
    ):
        files = find_files(FilesSource(kind="files", paths=[f"{url}/{pattern}"])).files
        assert [file.path for file in files] == [f"{url}/{name}" for name in expected], pattern
    with pytest.raises(UserError, match="there is no such file"):
        find_files(FilesSource(kind="files", paths=[f"{url}/text/*.jsonl"]))


def test_a_bucket_and_a_folder_have_the_same_hidden_files(bucket: Path) -> None:
    """What notebooks, desktops and Spark keep beside the text was converted again from a bucket."""
    hidden = (".ipynb_checkpoints/a-checkpoint.jsonl", ".Trash-0/files/old.jsonl", "more/.b.jsonl", "_temporary/0/a.jsonl")
    for name in ("kept/a.jsonl", "kept/more/b.jsonl", *(f"kept/{name}" for name in hidden)):
        put(bucket, name, jsonl(sentences(9)))
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(jsonl(sentences(9)))
    named = ("kept/**/.*/**/*.jsonl", "kept/.Trash-0", "kept/more/.b.jsonl", "k*/_t*/**/*.jsonl", "kept/_temporary/")
    for pattern in ("kept/", "kept/**/*.jsonl", "k*/mo*/*", *named):
        local, stored = (find_files(FilesSource(kind="files", paths=[f"{root}{pattern}"]))
                         for root in ("", f"s3://{bucket.name}/"))  # fmt: skip
        assert [file.path.removeprefix(f"s3://{bucket.name}/") for file in stored.files] == [f.path for f in local.files]
        # Hidden folders of a disk aren't looked into, and each counts as one file.
        assert "**" in pattern or stored.unread == local.unread, pattern
    assert find_files(FilesSource(kind="files", paths=[f"s3://{bucket.name}/kept"])).unread == {"hidden": 4}


def test_each_small_file_of_a_bucket_is_one_request(bucket: Path, config_for: Make, monkeypatch: Patch) -> None:
    """Sizes and versions come with the listing, and the text that is looked at beforehand isn't read again."""
    for number in range(300):
        put(bucket, f"many/{number:03}.jsonl", jsonl([{"id": str(number), "text": f"text {number}"}]))
    port = urlsplit(os.environ["S3_ENDPOINT_URL"]).port
    assert port is not None
    proxy = Proxy(port)
    monkeypatch.setenv("S3_ENDPOINT_URL", proxy.address)
    record = convert(config_for(f"s3://{bucket.name}/many", validation_fraction=0.1))
    proxy.close()
    assert record["documents"]["read"] == 300
    assert proxy.requests == {"LIST": 1, "GET": 300}


def test_a_file_that_changes_while_it_waits_is_named(bucket: Path, config_for: Make, monkeypatch: Patch) -> None:
    """Of a small file, the answer with its content says so. What was read before is what was listed."""
    real = convert_module.inspect_files

    def change(*arguments: Any) -> Any:
        put(bucket, "text/more/b.jsonl", jsonl(sentences(150, seed=3)))
        return real(*arguments)

    monkeypatch.setattr(convert_module, "inspect_files", change)
    with pytest.raises(UserError, match=rf"source s3://{bucket.name}/text/more/b\.jsonl: has changed since this command"):
        convert(config_for(f"s3://{bucket.name}/text"))


def test_a_finished_conversion_in_a_bucket_is_left_as_it_is(
    bucket: Path, config_for: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{bucket.name}"
    config = config_for(f"{url}/text", output=f"{url}/out")
    record = convert(config)
    assert convert(config) == record
    assert "already converted" in capsys.readouterr().out


def test_a_failed_conversion_has_no_index_and_resumes_after_the_repair(
    bucket: Path, config_for: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file breaks, after shards have been uploaded; then it is mended."""
    monkeypatch.setattr(worker, "_BATCH_CHARACTERS", 5000)
    url = f"s3://{bucket.name}"
    good = gzip.compress(jsonl(sentences(12000, seed=3)))
    put(bucket, "text/more/b.jsonl", b" ")
    put(bucket, "text/more/c.jsonl.gz", good[: len(good) - 2000])
    keys = {"segments": {"window": 5}, "unit_bytes": 1 << 20, "shard_bytes": 1 << 16, "cluster": {"workers": 1}}
    config = config_for(f"{url}/text", output=f"{url}/out", **keys)
    with pytest.raises(UserError, match=r"c\.jsonl\.gz: is damaged after line \d+ \(") as error:
        convert(config)
    assert str(error.value).splitlines()[1].endswith("1 of 2 work units are finished and kept; no dataset is published yet")
    left = {path.name for path in (bucket / "out").rglob("*") if path.is_file()}
    assert "shard.00000.mds.zstd" in left
    assert not left & {"index.json", "conversion.json"}
    with pytest.raises(UserError, match=r"unfinished conversion: 1 work units are missing \(.*text/more/c\.jsonl\.gz\)"):
        verify(f"{url}/out")
    put(bucket, "text/more/c.jsonl.gz", good)
    record = convert(config)
    assert verify(f"{url}/out").faults == []
    assert not (bucket / "out" / "conversion.started").exists()
    undisturbed = convert(config_for(f"{url}/text", output=f"{url}/two", **keys))
    assert record["splits"] == undisturbed["splits"]


def test_a_prefix_with_something_else_is_refused(bucket: Path, config_for: Make) -> None:
    url = f"s3://{bucket.name}"
    with pytest.raises(UserError, match=r"already holds files that do not belong to a conversion \(e\.g\. a\.parquet\)"):
        convert(config_for(f"{url}/text/a.parquet", output=f"{url}/text"))
    assert (bucket / "text" / "a.parquet").exists()


def test_a_missing_bucket_is_named(store: MakeBucket, config_for: Make) -> None:
    missing = store("there-is-a-bucket").replace("there-is-a", "no-such")
    with pytest.raises(
        UserError, match=rf"^output {missing}/out: can't be read \(.*(not exist|NoSuchBucket).*\)$"
    ) as refused:
        convert(config_for(sentences(5), output=f"{missing}/out"))
    assert len(str(refused.value)) < 300
    with pytest.raises(UserError, match=rf"^source {missing}/text: can't be read \(.*(not exist|NoSuchBucket).*\)$"):
        convert(config_for(f"{missing}/text"))


def test_a_failing_upload_is_named(bucket: Path, config_for: Make) -> None:
    """A file lies where the store must make a folder for the shards of the second split."""
    url = f"s3://{bucket.name}"
    config = config_for(f"{url}/text", output=f"{url}/out", validation_fraction=0.5)
    put(bucket, "out/conversion.started", json_bytes(started(config)))
    (bucket / "out" / "validation").write_text("in the way")
    with pytest.raises(UserError, match=r"output s3://.*/out: can't be written \(.*finished work units are kept"):
        convert(config)
    assert not list((bucket / "out").rglob("index.json"))
    (bucket / "out" / "validation").unlink()
    convert(config)
    assert verify(f"{url}/out").faults == []


def started(config: ConvertConfig) -> dict[str, Any]:
    tokenizer = tokenizer_record(load_tokenizer(config.tokenizer))
    return {"config": config.model_dump(mode="json"), "tokenizer": tokenizer, "commit": None, "units": {}}


def test_an_interrupted_conversion_leaves_nothing_in_the_temporary_folder(
    bucket: Path, config_for: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that are killed do not remove their scratch folders themselves."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    output = f"s3://{bucket.name}/out"

    def interrupt(driver: Any) -> None:
        if not (pid := os.fork()):
            (open_store(output).scratch() / "shard").write_text("half")
            os._exit(1)
        os.waitpid(pid, 0)
        assert len(list((tmp_path / "scratch").glob("*/shard"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("biphasic.conversion.convert._Driver.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(config_for(sentences(20, seed=1), output=output))
    assert list((tmp_path / "scratch").iterdir()) == []
