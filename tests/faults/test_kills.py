"""A run of two FSDP2 ranks that saves to a bucket and is killed repeatedly is the same run as one that was never killed.

Its last phase has other data.

`make faults` kills 20 times (BIPHASIC_KILLS=20); the default suite kills three times.
"""

import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from biphasic.checkpointing.run_lock import KILLED, read_attempts
from biphasic.runs import report
from biphasic.storage import open_store
from conftest import Write
from helpers.buckets import bucket_for
from helpers.signal_points import IN_SAVE, IN_TRAINING
from helpers.tiny import LENGTH, config_of, launch, losses, weights, write_rows

KILLS = int(os.environ.get("BIPHASIC_KILLS", "3"))
INTERVAL, SWITCH, DECAY, LAST = (4, 30, 50, 64) if KILLS > 3 else (4, 14, 22, 28)


def kill_points(count: int, seed: int) -> list[tuple[str, int]]:
    """Kinds and batches, in order. A point in a save lies in the first save from its batch on."""
    generator = random.Random(seed)
    kinds = [*IN_SAVE, *IN_TRAINING]
    points = [("start", SWITCH), ("backward", DECAY + 3)]
    for number in range(count - len(points)):
        points.append((kinds[number % len(kinds)], generator.randrange(1, LAST - INTERVAL)))
    return sorted(points, key=lambda point: point[1])


def test_a_killed_run_is_the_same_run(s3: Path, write_yaml: Write, tmp_path: Path) -> None:
    write_yaml()
    write_rows(tmp_path / "data" / "long", 300, seed=4, length=2 * LENGTH)
    data = {"train": {"local": str(tmp_path / "data" / "long")}, "sequence_length": 2 * LENGTH}
    long = {"name": "mlm", "data": data, "global_batch_size": 4}
    keys: dict[str, Any] = {
        "parallelism__strategy": "fsdp", "max_duration": f"{LAST}ba", "data__num_workers": 1,
        "objective__phases": [{"name": "clm", "until": f"{SWITCH}ba"}, long],
        "schedule": {"warmup": "3ba", "decay": f"{LAST - DECAY}ba"}, "checkpoint__keep": 2,
    }  # fmt: skip
    path = write_yaml("uninterrupted", **keys, checkpoint__interval="1000ba")
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(path).output)
    destination = f"s3://{bucket_for(s3, 'kills')}/killed"
    path = write_yaml("killed", **keys, checkpoint__interval=f"{INTERVAL}ba", checkpoint__folder=destination)
    folder = runs / "killed"
    generator, points = random.Random(KILLS), kill_points(KILLS, seed=11)
    for kind, batch in points:
        run = launch(path, processes=2, code=f"from helpers import signal_points\nsignal_points.patch('{kind}:{batch}')")
        assert run.returncode == -9, f"{kind}:{batch}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
        if generator.random() < 0.5:
            # The next attempt runs on another machine.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]

    assert losses(folder) == losses(runs / "uninterrupted")
    actual, expected = weights(folder, LAST), weights(runs / "uninterrupted", LAST)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in actual.items())
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = [entry["batch"] for entry in entries if "loss/train/total" in entry]
    repeated = [before - now + 1 for before, now in pairwise(batches) if now <= before]
    assert max(repeated, default=0) <= INTERVAL, (points, batches)
    attempts = read_attempts(open_store(destination))
    assert [attempt["reason"] for attempt in attempts] == [KILLED] * KILLS + ["finished"]
    assert "\n".join(report(destination)).count("lost: at least") == KILLS
    # Every file belongs to a complete checkpoint.
    names = open_store(destination).list()
    manifests = [json.loads(open_store(destination).read(name)) for name in names if name.startswith("ba")]
    assert {name for name in names if not name.startswith(("ba", "attempts/"))} == {
        name for manifest in manifests for name in manifest["files"]
    }
