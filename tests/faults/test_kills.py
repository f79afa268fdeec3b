"""A run of two FSDP2 ranks that saves to a bucket and is killed, again and again, is the run that was never killed.

`make faults` kills 20 times (BIPHASIC_KILLS=20); the default suite does it less often.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from biphasic.checkpointing.claim import SILENT, attempts_in
from biphasic.runs import report
from biphasic.storage import store
from buckets import bucket_for
from conftest import Write
from tiny import ROOT, composer_command, config_of, launch, losses, weights

KILLS = int(os.environ.get("BIPHASIC_KILLS", "3"))
INTERVAL, SWITCH, DECAY, LAST = 4, 30, 50, 64
IN_BATCH, IN_SAVE = ("start", "backward", "end"), ("write", "index", "upload", "manifest", "forget")


def moments(count: int, seed: int) -> list[tuple[str, int]]:
    """In order; a moment in a save is in the first one from its batch on. The switch and the decay are among them."""
    draw = random.Random(seed)
    kinds = [*IN_SAVE, *IN_BATCH]
    found = [("start", SWITCH), ("backward", DECAY + 3)]
    for number in range(count - len(found)):
        found.append((kinds[number % len(kinds)], draw.randrange(1, LAST - INTERVAL)))
    return sorted(found, key=lambda moment: moment[1])


def test_every_chain_of_restarts_is_the_same_run(s3: Path, write_yaml: Write) -> None:
    keys: dict[str, Any] = {
        "parallelism__strategy": "fsdp", "max_duration": f"{LAST}ba", "data__num_workers": 1,
        "objective__phases": [{"name": "clm", "until": f"{SWITCH}ba"}, {"name": "mlm"}],
        "schedule": {"warmup": "3ba", "decay": f"{LAST - DECAY}ba"}, "checkpoint__keep": 2,
    }  # fmt: skip
    path = write_yaml("whole", **keys, checkpoint__interval="1000ba")
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(path).output)
    place = f"s3://{bucket_for(s3, 'kills')}/killed"
    path = write_yaml("killed", **keys, checkpoint__interval=f"{INTERVAL}ba", checkpoint__folder=place)
    folder = runs / "killed"
    command = composer_command(ROOT / "tests" / "faults" / "killed.py", path, processes=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    draw, plan = random.Random(KILLS), moments(KILLS, seed=11)
    for kind, batch in plan:
        run = subprocess.run(command, env={**environment, "KILL": f"{kind}:{batch}"},
                             capture_output=True, text=True, start_new_session=True)  # fmt: skip
        assert run.returncode == -9, f"{kind}:{batch}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
        if draw.random() < 0.5:
            # The next attempt has another machine.
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]

    assert losses(folder) == losses(runs / "whole")
    ours, theirs = weights(folder, LAST), weights(runs / "whole", LAST)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    trained = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    batches = [entry["batch"] for entry in trained if "loss/train/total" in entry]
    repeated = [before - now + 1 for before, now in pairwise(batches) if now <= before]
    assert max(repeated, default=0) <= INTERVAL, (plan, batches)
    attempts = attempts_in(store(place))
    assert [one["reason"] for one in attempts] == [SILENT] * KILLS + ["finished"]
    assert "\n".join(report(place)).count("lost: at least") == KILLS
    # Nothing half done stays: every file belongs to a checkpoint that is complete.
    there = store(place).list()
    named = {
        name for found in there if found.startswith("ba") for name in json.loads(store(place).read(found))["files"]
    }
    assert {name for name in there if not name.startswith(("ba", "attempts/"))} == named
