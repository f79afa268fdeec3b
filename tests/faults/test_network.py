"""A run whose data and checkpoints lie in a bucket of which some requests fail, or which is unavailable for a while.

In `make faults` the bucket is unavailable for two minutes and stalls for 30 s; in the default suite for 3 s and 2 s. A slow
bucket answers after 1.5 s and has 5 MB/s, in the default suite 0.2 s and 50 MB/s.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from biphasic.checkpointing.manifest import list_checkpoints
from biphasic.preflight import rank_facts
from biphasic.storage import open_store
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.buckets import bucket_for, upload
from helpers.s3_proxy import KINDS, Proxy
from helpers.tiny import config_of, launch, losses, start, wait_for_batch, weights

FULL = "BIPHASIC_KILLS" in os.environ
STALL, UNAVAILABLE = (30.0, 120.0) if FULL else (2.0, 3.0)
LATENCY, BANDWIDTH = (1.5, 5e6) if FULL else (0.2, 50e6)
BALLAST = """
import torch
from helpers import tiny
from composer.core import Callback
class Ballast(Callback):
    def state_dict(self):
        return {"ballast": torch.rand(5_000_000)}
    def load_state_dict(self, state):
        pass
    def batch_start(self, state, logger):
        time.sleep(SECONDS)
tiny.add_callback(Ballast())
"""
"""Makes a checkpoint 20 MB larger, and steps longer."""
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


def test_an_answer_that_breaks_off_is_read_again(s3: Path, proxy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"s3://{bucket_for(s3, 'breaks')}/run"
    open_store(place).write("ba1.json", b"manifest")
    faults, bad = iter(("truncated", "none", "truncated")), proxy(0.0)
    monkeypatch.setattr(bad, "fault", lambda: next(faults, "truncated"))
    assert open_store(place).read("ba1.json") == b"manifest"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with pytest.raises(OSError, match=r"IncompleteRead|bytes"):
        open_store(place).read("ba1.json")
    assert bad.requests["GET"] == 4


def test_a_bucket_that_is_away_ends_a_run_with_status_1(
    s3: Path, write_yaml: Write, proxy: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers restart it."""
    path, place = yaml_in_bucket(s3, write_yaml, "outage", data__num_workers=1)
    bad = proxy(0.0)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    bad.away = True
    run = launch(path)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr[-3000:]
    assert f"checkpoint.folder {place}: can't be read and written (" in run.stderr
    facts = rank_facts(config_of(path))
    assert facts["unavailable"] == len(facts["faults"]) == 2, facts
    # When a shard is needed.
    monkeypatch.setattr(bad, "count", lambda command, path: setattr(bad, "away", ".mds" in path))
    attempts = "from biphasic.data import shards\nshards._DOWNLOAD_ATTEMPTS = 2"  # Streaming waits 1, 2, 4 and 8 s
    run = launch(path, "checkpoint.folder=null", code=attempts)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr[-3000:]
    assert "shard.00000.mds.zstd: can't be read into" in run.stderr


def test_training_continues_while_the_bucket_is_unavailable(s3: Path, write_yaml: Write, proxy: Start) -> None:
    keys: dict[str, Any] = {"max_duration": "60ba", "checkpoint__interval": "10ba", "data__num_workers": 0}
    path, place = yaml_in_bucket(s3, write_yaml, "away", **keys)
    assert launch(path.parent / "plain.yaml").returncode == 0
    bad = proxy(0.0)
    folder = Path(config_of(path).output) / "away"
    # Steps take longer, so that the run is in its middle when the bucket becomes unavailable.
    code = f"""
import os, time
from helpers import tiny
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
        while trained() <= 25 and job.poll() is None:  # on a busy machine, steps take longer still
            time.sleep(0.02)
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


def slow_run(s3: Path, write_yaml: Write, proxy: Start, name: str, **keys: Any) -> tuple[Path, str, Proxy]:
    """A run whose data is on this machine, and whose checkpoints go to a slow bucket."""
    place = f"s3://{bucket_for(s3, name)}/run"
    slow = proxy(0.0)
    slow.latency, slow.bandwidth = LATENCY, BANDWIDTH
    return write_yaml(name, checkpoint__folder=place, **keys), place, slow


def stored(place: str) -> list[int]:
    return [checkpoint.batch for checkpoint in list_checkpoints(open_store(place)) if checkpoint.manifest]


def test_a_slow_bucket_doesn_t_hold_up_training(s3: Path, write_yaml: Write, proxy: Start) -> None:
    keys: dict[str, Any] = {"max_duration": "32ba", "checkpoint__interval": "8ba"}
    seconds = 30 * LATENCY / 32
    code = f"import time\nSECONDS = {seconds}\n{BALLAST}"
    assert launch(write_yaml("plain", **keys), code=code).returncode == 0
    path, place, slow = slow_run(s3, write_yaml, proxy, "slow", **keys)
    start = time.monotonic()
    run = launch(path, code=code)
    total = time.monotonic() - start
    assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(path).output)
    times, plain_times = (training_seconds(runs / name) for name in ("slow", "plain"))
    blocked = [entry["checkpoint/blocked_seconds"] for entry in read_metrics(runs / "slow" / "metrics.jsonl")
               if "checkpoint/blocked_seconds" in entry]  # fmt: skip
    print(f"\nslow bucket: training {times:.1f} s (plain {plain_times:.1f} s), blocked {max(blocked):.2f} s at most, "
          f"all {total:.1f} s; {dict(slow.requests)}")  # fmt: skip
    assert losses(runs / "slow") == losses(runs / "plain")
    slow.latency = slow.bandwidth = 0.0
    # Those at the switch and at the start of the decay, too.
    assert stored(place) == [32, 28, 24, 16, 8, 6]
    upload_seconds = 20e6 / BANDWIDTH + 5 * LATENCY
    assert max(blocked) < upload_seconds / 2 and times < plain_times + 6 * upload_seconds / 2


def training_seconds(folder: Path) -> float:
    """Seconds from the first batch to the last."""
    entries = [entry["time"] for entry in read_metrics(folder / "metrics.jsonl")]
    return entries[-1] - entries[0]


def test_a_preempted_run_says_what_a_slow_bucket_lacks(s3: Path, write_yaml: Write, proxy: Start) -> None:
    keys: dict[str, Any] = {"max_duration": "24ba", "checkpoint__interval": "1000ba"}
    code = f"import time\nSECONDS = 0.1\n{BALLAST}\nfrom biphasic.checkpointing import save\nsave._QUIET_SECONDS = 0.2"
    assert launch(write_yaml("plain", **keys), code=code).returncode == 0
    path, place, slow = slow_run(s3, write_yaml, proxy, "preempted", **keys)
    folder = Path(config_of(path).output) / "preempted"
    # In time: the machine is there long enough.
    job = start(path, code=code)
    wait_for_batch(folder, 5, job)
    os.kill(job.ranks[0], signal.SIGTERM)
    run = job.wait(300)
    assert run.returncode == 75, run.stderr[-3000:]
    saved = re.search(r"SIGTERM: saved at batch (\d+), ([\d.]+) s after the request", run.stdout)
    assert saved, run.stdout[-2000:]
    print(f"\npreempted, slow bucket: {saved[0]}")
    pending = rf"SIGTERM: saved on this machine, but not yet in {place}: .*ba{saved[1]}-rank0.pt \(2\d\.\d MB\); waiting"
    assert re.search(pending, run.stdout), run.stdout[-2000:]
    assert stored(place)[0] == int(saved[1])
    # Not in time: the machine is switched off while the run waits for the upload.
    slow.bandwidth = 0.5e6
    job = start(path, code=code)
    wait_for_batch(folder, int(saved[1]) + 3, job)
    os.kill(job.ranks[0], signal.SIGTERM)
    message = rf"SIGTERM: saved on this machine, but not yet in {place}: .*ba(\d+)-rank0.pt \("
    deadline = time.monotonic() + 60
    while (kept := re.search(message, job._read("out"))) is None:
        assert job.poll() is None and time.monotonic() < deadline, job._read("out", "err")
        time.sleep(0.1)
    job.kill()
    slow.latency = slow.bandwidth = 0.0
    assert int(kept[1]) > int(saved[1]) == stored(place)[0]
    # The next start on this machine uploads it first, and repeats no batch.
    run = launch(path, code=code)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "was not uploaded to" in run.stderr and f"resuming at batch {kept[1]} of 24" in run.stdout
    assert losses(folder) == losses(folder.parent / "plain")
    assert int(kept[1]) in stored(place)
