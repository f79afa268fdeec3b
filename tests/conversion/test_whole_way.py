"""From text in a bucket to a trained model: converted, killed, resumed, verified, and trained on through a small cache."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.config.load import dump, load
from biphasic.data.tokenizer import load_tokenizer
from conftest import Write
from helpers import warm
from helpers.buckets import bucket_for, smallest_limit, upload
from helpers.outputs import same_bytes
from helpers.texts import sentences, write_parquet
from helpers.tiny import LENGTH, config_of, launch, losses, train

UNITS = 5


def start(name: str, *arguments: str) -> warm.Job:
    return warm.start([name, *arguments], 1, dict(os.environ), module="biphasic")


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return start(name, *arguments).wait()


def test_conversion_to_training_through_a_bucket(
    s3: Path, config_for: Callable[..., ConvertConfig], tokenizer_folder: Path, tmp_path: Path, write_yaml: Write
) -> None:
    bucket = bucket_for(s3, "whole-way")
    (tmp_path / "text").mkdir()
    for number in range(UNITS):
        write_parquet(tmp_path / "text" / f"{number}.parquet", sentences(2500, seed=number))
    text, out = upload(tmp_path / "text", bucket, "text"), f"s3://{bucket}/out"
    keys = {"sequence_length": LENGTH, "unit_bytes": 450_000, "shard_bytes": 1 << 15, "validation_fraction": 0.05,
            "cluster": {"workers": 1}}  # fmt: skip
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config_for(text, output=out, **keys)))
    stored = s3 / bucket / "out"

    # Killed in the middle: some units have their records, and nothing can be opened.
    process = start("convert", str(path))
    deadline = time.monotonic() + 120
    while len(list(stored.glob("units/*.json"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, process.wait()
        time.sleep(0.02)
    process.kill()
    process.wait()
    finished = len(list(stored.glob("units/*.json")))
    assert 2 <= finished < UNITS
    assert not list(stored.rglob("index.json"))
    cache = tmp_path / "cache"
    remote = {
        "data__train": {"local": str(cache), "remote": f"{out}/train"},
        "data__validation": {"local": str(tmp_path / "cache-validation"), "remote": f"{out}/validation"},
        "tokenizer": f"{out}/tokenizer",
        "model__vocab_size": load_tokenizer(str(tokenizer_folder)).vocab_size,
        "evaluation__batches": 2,
    }
    too_early = launch(write_yaml("early", **{**remote, "tokenizer": str(tokenizer_folder)}))
    assert too_early.returncode != 0
    assert f"{out}: its conversion is not finished; run `biphasic verify` on it" in too_early.stderr
    missing = run("verify", out)
    assert missing.returncode == 2
    assert f"{out}: is an unfinished conversion: {UNITS - finished} work unit" in missing.stderr
    assert f"{text}/{UNITS - 1}.parquet); run `biphasic convert` again" in missing.stderr

    # Resumed: what is finished is kept, and all is as if nothing had happened.
    resumed = run("convert", str(path))
    assert resumed.returncode == 0, resumed.stderr
    assert f"{finished} of {UNITS} work units were finished before and are kept" in resumed.stdout + resumed.stderr
    undisturbed = tmp_path / "undisturbed"
    local = dump(config_for(text, output=str(undisturbed), **keys))
    path.write_text(local)
    assert run("convert", str(path)).returncode == 0
    assert same_bytes(stored, undisturbed)
    verified = run("verify", out)
    assert verified.returncode == 0, verified.stderr
    assert f"{out}: complete and consistent with its record" in verified.stdout

    # Trained on through a cache that is smaller than the data, with the tokenizer from the bucket too.
    index = json.loads((undisturbed / "train" / "index.json").read_text())
    size = sum(shard["raw_data"]["bytes"] for shard in index["shards"])
    small = {**remote, "data__predownload": 8}
    limit = smallest_limit(config_of(write_yaml("limit", **small)).data)
    assert limit < size / 2
    overrides = {**small, "data__cache_limit": f"{limit}b"}
    through_cache = losses(train(config_of(write_yaml("through-the-cache", **overrides))))
    at_once = {**remote, "data__train": {"local": str(undisturbed / "train")}}
    at_once["data__validation"] = {"local": str(undisturbed / "validation")}
    assert through_cache == losses(train(config_of(write_yaml("from-the-folder", **at_once))))
    assert len(through_cache) == 12


@pytest.mark.parametrize("prefix", ["s3://{bucket}/none", "s3://{bucket}"])
def test_a_bucket_without_a_tokenizer(s3: Path, write_yaml: Write, prefix: str) -> None:
    from biphasic.errors import UserError

    prefix = prefix.format(bucket=bucket_for(s3, "no-tokenizer"))
    with pytest.raises(UserError, match=f"^tokenizer {prefix}: has no tokenizer.json"):
        load_tokenizer(prefix)
    assert load(write_yaml(tokenizer=prefix))
