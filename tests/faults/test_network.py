"""A run whose data and checkpoints lie in a bucket of which some requests fail, or which is unavailable for a while.

In `make faults` the bucket is unavailable for two minutes and stalls for 30 s; in the default suite for 3 s and 2 s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.storage import open_store
from buckets import bucket_for, upload
from conftest import Write
from s3_proxy import KINDS, Proxy
from tiny import config_of, launch, losses, start, weights

FULL = "BIPHASIC_KILLS" in os.environ
STALL, UNAVAILABLE = (30.0, 120.0) if FULL else (2.0, 3.0)
Start = Callable[..., Proxy]


@pytest.fixture
def proxy(s3: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    port = urlsplit(os.environ["S3_ENDPOINT_URL"]).port
    assert port is not None
    made: list[Proxy] = []

    def start(rate: float, seed: int = 5) -> Proxy:
        made.append(Proxy(port, rate, seed, STALL, stalls=2))
        monkeypatch.setenv("S3_ENDPOINT_URL", made[0].address)
        # As users have it: the SDK's own retries.
        monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
        return made[0]

    yield start
    for one in made:
        one.close()


def yaml_in_bucket(s3: Path, write_yaml: Write, name: str, **keys: Any) -> tuple[Path, str]:
    bucket = bucket_for(s3, name)
    path = write_yaml("plain", **keys)
    remote = upload(path.parent / "data" / "train", bucket, "train")
    train = {"local": str(path.parent / "cache"), "remote": remote}
    place = f"s3://{bucket}/run"
    return write_yaml(name, data__train=train, checkpoint__folder=place, **keys), place


@pytest.mark.parametrize("rate", [pytest.param(0.05, marks=pytest.mark.slow), 0.2])
def test_a_run_with_failing_requests_is_the_same_run(s3: Path, write_yaml: Write, proxy: Start, rate: float) -> None:
    keys: dict[str, Any] = {"max_duration": "16ba", "checkpoint__interval": "2ba", "data__num_workers": 1}
    path, place = yaml_in_bucket(s3, write_yaml, f"net{int(rate * 100)}", **keys)
    plain = path.parent / "plain.yaml"
    assert launch(plain).returncode == 0
    bad = proxy(rate)
    run = launch(path)
    assert run.returncode == 0, run.stderr[-3000:]
    if rate == 0.2:
        assert all(bad.given[kind] for kind in KINDS), bad.given
    assert sum(bad.given[kind] for kind in KINDS) > rate * bad.given["none"] / 2
    bad.rate = 0.0
    runs = Path(config_of(path).output)
    assert losses(runs / path.stem) == losses(runs / "plain")
    actual, expected = weights(runs / path.stem, 16), weights(runs / "plain", 16)
    assert all(torch.equal(weight, expected[name]) for name, weight in actual.items())
    assert [checkpoint.batch for checkpoint in list_checkpoints(open_store(place)) if checkpoint.manifest] == list(
        range(16, 0, -2)
    )


def test_training_continues_while_the_bucket_is_unavailable(s3: Path, write_yaml: Write, proxy: Start) -> None:
    keys: dict[str, Any] = {"max_duration": "60ba", "checkpoint__interval": "10ba", "data__num_workers": 0}
    path, place = yaml_in_bucket(s3, write_yaml, "away", **keys)
    assert launch(path.parent / "plain.yaml").returncode == 0
    bad = proxy(0.0)
    folder = Path(config_of(path).output) / "away"
    # Steps take longer, so that the run is in its middle when the bucket becomes unavailable.
    code = f"""
import os, time, tiny
from composer.core import Callback
class Slow(Callback):
    def batch_start(self, state, logger):
        time.sleep({UNAVAILABLE / 30})
tiny.add_callback(Slow())
os.environ["AWS_MAX_ATTEMPTS"] = "2"
"""
    job = start(path, code=code)

    def trained() -> int:
        file = folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def interrupt() -> None:
        while trained() < 15 and job.poll() is None:
            time.sleep(0.02)
        bad.away = True
        time.sleep(UNAVAILABLE)
        at.append(trained())
        bad.away = False

    at: list[int] = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    run = job.wait(600)
    thread.join()
    assert run.returncode == 0, run.stderr[-3000:]
    # Training continued meanwhile, with a checkpoint to upload.
    assert at[0] > 25 and bad.given["away"] > 2, (at, bad.given)
    assert "can't be stored in" in run.stderr and "is stored in" in run.stderr
    assert [checkpoint.batch for checkpoint in list_checkpoints(open_store(place)) if checkpoint.manifest] == [
        60,
        56,
        50,
        40,
        30,
        20,
        10,
        6,
    ]
    assert losses(folder) == losses(folder.parent / "plain")
