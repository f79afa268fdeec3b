"""A run whose data and checkpoints lie in a bucket that fails, a little or altogether for a while.

`make faults` lets the bucket be away for two minutes and stalls for 30 s; the default suite has less patience.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from biphasic.checkpointing.manifest import checkpoints_in
from biphasic.storage import store
from buckets import bucket_for, upload
from conftest import Write
from s3_proxy import KINDS, Proxy
from tiny import ROOT, config_of, launch, losses, weights

FULL = "BIPHASIC_KILLS" in os.environ
STALL, AWAY = (30.0, 120.0) if FULL else (3.0, 12.0)
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


def in_bucket(s3: Path, write_yaml: Write, name: str, **keys: Any) -> tuple[Path, str]:
    bucket = bucket_for(s3, name)
    path = write_yaml("plain", **keys)
    remote = upload(path.parent / "data" / "train", bucket, "train")
    train = {"local": str(path.parent / "cache"), "remote": remote}
    place = f"s3://{bucket}/run"
    return write_yaml(name, data__train=train, checkpoint__folder=place, **keys), place


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_a_share_of_all_requests_fails(s3: Path, write_yaml: Write, proxy: Start, rate: float) -> None:
    keys: dict[str, Any] = {"max_duration": "24ba", "checkpoint__interval": "2ba", "data__num_workers": 1}
    path, place = in_bucket(s3, write_yaml, f"net{int(rate * 100)}", **keys)
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
    ours, theirs = weights(runs / path.stem, 24), weights(runs / "plain", 24)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert [found.batch for found in checkpoints_in(store(place)) if found.manifest] == list(range(24, 0, -2))


def test_the_bucket_is_away_in_the_middle(s3: Path, write_yaml: Write, proxy: Start) -> None:
    keys: dict[str, Any] = {"max_duration": "60ba", "checkpoint__interval": "10ba", "data__num_workers": 0}
    path, place = in_bucket(s3, write_yaml, "away", **keys)
    assert launch(path.parent / "plain.yaml").returncode == 0
    bad = proxy(0.0)
    folder = Path(config_of(path).output) / "away"
    # A step takes as long as it does on a GPU, so that the run is in its middle when the bucket goes.
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT / "src")!r}]
from composer.core import Callback
from biphasic.training import pretrain
class Slow(Callback):
    def batch_start(self, state, logger):
        time.sleep({AWAY / 30})
old = pretrain.callbacks
pretrain.callbacks = lambda *a: [Slow(), *old(*a)]
import main
sys.exit(main.main([{str(path)!r}]))
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1", "AWS_MAX_ATTEMPTS": "2"})  # fmt: skip

    def done() -> int:
        file = folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def go_away() -> None:
        while done() < 15 and run.poll() is None:
            time.sleep(0.02)
        bad.away = True
        time.sleep(AWAY)
        at.append(done())
        bad.away = False

    at: list[int] = []
    thread = threading.Thread(target=go_away)
    thread.start()
    said = run.communicate()[0]
    thread.join()
    assert run.returncode == 0, said[-3000:]
    # It trained on meanwhile, and had a checkpoint to store.
    assert at[0] > 25 and bad.given["away"] > 2, (at, bad.given)
    assert "can't be stored in" in said and "is stored in" in said
    assert [found.batch for found in checkpoints_in(store(place)) if found.manifest] == [60, 56, 50, 40, 30, 20, 10, 6]
    assert losses(folder) == losses(folder.parent / "plain")
