"""A small run that meets one fault after another, and what must be true at its end.

The run has 48 batches in three phases: two over a mix of two datasets, with a masking ratio that changes and an optimizer
reset, and one over longer rows in smaller batches, with other rotary positions. It validates, and of its checkpoints, every
four batches, two are kept.
"""

import json
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
import yaml

from biphasic.checkpointing.run_lock import read_attempts
from biphasic.storage import open_store
from helpers import tiny, warm
from helpers.buckets import client
from helpers.s3_proxy import Proxy
from helpers.s3_server import SECRET

INTERVAL, LAST, SHORTER = 4, 48, 40
"""Batches: between checkpoints, of the run, and of a start with a shorter `max_duration`."""
OWN_TEMPORARY = "import tempfile; tempfile.tempdir = None"
"""Lets a job use the folder for temporary files in its environment, not that of the process it was forked from."""
DECAY = 12


def write_data(folder: Path) -> None:
    """Write two datasets and a tokenizer."""
    tiny.write_rows(folder / "one", 500, seed=1)
    tiny.write_rows(folder / "two", 300, seed=3)
    tiny.write_rows(folder / "long", 300, seed=4, length=2 * tiny.LENGTH)
    tiny.write_rows(folder / "validation", 40, seed=2)
    tiny.write_tokenizer(folder / "tokenizer")


def write_yaml(path: Path, data: Path, strategy: str, place: str | None = None) -> Path:
    """Write a run's YAML beside its folder `runs`. `place` is where it saves; None: on this machine."""
    mix = {name: {"local": str(data / name), "proportion": share} for name, share in (("one", 0.7), ("two", 0.3))}
    ramp = {"name": "mlm", "masking_ratio": {"start": 0.5, "end": 0.2}, "until": tokens(30), "reset_optimizer": True}
    long = {
        "name": "mlm",
        "data": {"train": {"local": str(data / "long")}, "sequence_length": 2 * tiny.LENGTH},
        "global_batch_size": 4,
        "model": {"rope_theta": 500.0},
    }
    content = tiny.content_of(path.stem, path.parent / "runs", data)
    content |= {
        "max_duration": f"{LAST}ba",
        "objective": {"phases": [{"name": "clm", "until": tokens(17)}, ramp, long]},
        "schedule": {"warmup": "3ba", "decay": f"{DECAY}ba"},
        "evaluation": {"interval": "7ba", "batch_size": 4},
        "checkpoint": {"interval": f"{INTERVAL}ba", "keep": 2, **({"folder": place} if place else {})},
        "parallelism": {"strategy": strategy},
    }
    content["data"] = {
        **content["data"],
        "mix": mix,
        "validation": {"local": str(data / "validation")},
        "num_workers": 1,
    }
    del content["data"]["train"]
    path.write_text(yaml.safe_dump(content))
    return path


def tokens(batches: int) -> str:
    """Return a duration in tokens."""
    return f"{batches * 8 * tiny.LENGTH}tok"


@dataclass(eq=False)
class Chain:
    """A run that meets one fault after another."""

    path: Path
    """Its YAML."""
    place: str
    """Bucket prefix that it saves to."""
    strategy: str
    proxy: Proxy
    """Between the run and the bucket."""
    seed: str
    """Determines what each fault draws."""
    draw: random.Random = field(init=False)
    """Draws of the fault that the run meets."""
    same_ranks: bool = True
    """Whether each start had two ranks, so that the run must be the undisturbed one bit for bit."""
    exact_repeats: bool = True
    """Whether at most one interval may be repeated: false once a stored checkpoint was damaged or could not be stored."""
    reasons: list[str] = field(default_factory=list)
    """For each attempt, the beginning of the reason that its record must have."""
    groups: list[int] = field(default_factory=list)
    """Process groups of all jobs."""
    outputs: list[str] = field(default_factory=list)
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="chain-", dir="/tmp")))
    """The folder for temporary files of the chain's jobs. Its path is short, because sockets in it have short names."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.path.parent / "runs" / self.path.stem

    def trained(self) -> int:
        """The last batch in the run's metrics, 0 before the first."""
        return max((entry["batch"] for entry in self.entries()), default=0)

    def entries(self) -> list[dict[str, Any]]:
        """The metrics of all batches of all attempts."""
        file = self.folder / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        return [line for line in lines if "loss/train/total" in line]

    def start(self, *overrides: str, ranks: int = 2, code: str = "") -> warm.Job:
        """Start the run."""
        self.same_ranks &= ranks == 2
        job = tiny.start(self.path, *overrides, processes=ranks, code=f"{OWN_TEMPORARY}\n{code}")
        self.groups.append(job.pid)
        return job

    def end(self, job: warm.Job, status: int, reason: str) -> CompletedProcess[str]:
        """Wait for the end of a start; `reason` is the beginning of the reason in its record."""
        run = job.wait(300)
        self.outputs.append(run.stdout + run.stderr)
        assert run.returncode == status, (run.returncode, status, run.stdout[-2000:], run.stderr[-4000:])
        self.reasons.append(reason)
        return run

    def next_batch(self, at_most: int = LAST - 1) -> int:
        """Draw a batch soon after the last one."""
        return min(self.trained() + self.draw.randint(1, 6), at_most)

    def lose_machine(self) -> None:
        """Remove the checkpoints on this machine."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)


def wait_for(chain: Chain, batch: int, job: warm.Job) -> None:
    """Wait until a start has trained a batch."""
    already = len(chain.entries())
    deadline = time.monotonic() + 120
    while not any(entry["batch"] >= batch for entry in chain.entries()[already:]):
        assert job.poll() is None and time.monotonic() < deadline, (job.poll(), batch, chain.trained())
        time.sleep(0.01)


def processes() -> list[int]:
    """Return the ids of all running processes."""
    return [pid for path in Path("/proc").glob("[0-9]*") if _stat(pid := int(path.name))[:1] not in ([], ["Z"])]


def parent_of(pid: int) -> int | None:
    """Return a process's parent, None if it has ended."""
    return int(stat[1]) if (stat := _stat(pid)) else None


def group_of(pid: int) -> int | None:
    """Return a process's group, None if it has ended."""
    return int(stat[2]) if (stat := _stat(pid)) else None


def _stat(pid: int) -> list[str]:
    """Return a process's state, parent, process group and so on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def verify(chain: Chain, reference: Path) -> None:
    """Check a chain whose last start has trained to the end.

    Args:
        chain: the chain.
        reference: folder of the run without faults.
    """
    assert_same_run(chain, reference)
    batches = [entry["batch"] for entry in chain.entries()]
    repeated = [before - now + 1 for before, now in pairwise(batches) if now <= before]
    if chain.exact_repeats:
        assert max(repeated, default=0) <= INTERVAL, batches
    attempts = read_attempts(open_store(chain.place))
    reasons = [attempt.get("reason") for attempt in attempts]
    assert len(reasons) == len(chain.reasons), (reasons, chain.reasons)
    for reason, beginning in zip(reasons, chain.reasons, strict=True):
        assert reason and reason.startswith(beginning), (reasons, chain.reasons)
    names = set(open_store(chain.place).list())
    manifests = {name for name in names if re.fullmatch(r"ba\d+\.json", name)}
    files = {name for manifest in manifests for name in json.loads(open_store(chain.place).read(manifest))["files"]}
    assert {name for name in names - manifests if not name.startswith("attempts/")} == files, names
    assert_nothing_left(chain)
    assert_no_secret(chain)


def assert_same_run(chain: Chain, reference: Path) -> None:
    """Check losses and weights: bit for bit on equal ranks, otherwise within 1e-5."""
    actual, expected = tiny.losses(chain.folder), tiny.losses(reference)
    weights, expected_weights = (tiny.weights(folder, LAST) for folder in (chain.folder, reference))
    assert weights.keys() == expected_weights.keys()
    if chain.same_ranks:
        assert actual == expected
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())
    else:
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=1e-5, atol=1e-5)


def assert_nothing_left(chain: Chain) -> None:
    """Check for processes, shared memory and temporary files of the chain's jobs."""
    deadline = time.monotonic() + 20
    while left := [pid for pid in processes() if group_of(pid) in chain.groups]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.2)
    data = str(chain.path.parent).encode()
    left = [path.name for path in Path("/dev/shm").glob("*_locals") if data in path.read_bytes()]
    assert not left, left
    temporary = {path.name for path in chain.temporary.iterdir()}
    # Streaming's lock files are removed by a later start, after a minute. Python's folders of sockets (pymp-) stay after a
    # loader process was killed: nothing tells whose they are.
    left = {name for name in temporary if not name.endswith("_filelock") and not name.startswith("pymp-")}
    assert not left, left
    shutil.rmtree(chain.temporary)


def assert_no_secret(chain: Chain) -> None:
    """Check that no output, file or stored object holds the bucket's secret key."""
    bucket, _, prefix = chain.place.removeprefix("s3://").partition("/")
    stored = client().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", [])
    contents = {item["Key"]: client().get_object(Bucket=bucket, Key=item["Key"])["Body"].read() for item in stored}
    contents |= {str(path): path.read_bytes() for path in chain.folder.rglob("*") if path.is_file()}
    contents |= {f"output {number}": output.encode() for number, output in enumerate(chain.outputs)}
    for where, content in contents.items():
        assert SECRET.encode() not in content, where
