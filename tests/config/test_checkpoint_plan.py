"""Numbers of checkpoints, compared with a run that saves and deletes one after another."""

import random

import pytest

from biphasic.config.load import load
from biphasic.config.plan import branch_points, plan
from biphasic.config.pretrain import PretrainConfig
from helpers.tiny import ROOT


def config_with(*overrides: str) -> PretrainConfig:
    config = load(ROOT / "yamls" / "1b_biphasic.yaml", list(overrides))
    assert isinstance(config, PretrainConfig)
    return config


Counts = tuple[int | None, int | None, int | None]
"""Checkpoints that are saved, that remain, and that are stored at a time at most."""


def planned(config: PretrainConfig) -> Counts:
    counts = plan(config, 1).details["checkpoints"]
    return counts["count"], counts["kept"], counts["most"]


def simulate(config: PretrainConfig) -> Counts:
    """Save batch by batch; delete as `checkpointing.manifest.outdated_checkpoints` does once a checkpoint is complete."""
    end, every, keep = (
        int(config.max_duration.value),
        int(config.checkpoint.interval.value),
        config.checkpoint.keep,
    )
    points, stored, saved, most = {int(point.value) for point in branch_points(config)}, [], 0, 0
    for batch in range(1, end + 1):
        if batch % every == 0 or batch in points or batch == end:
            saved, stored = saved + 1, [*stored, batch]
            most = max(most, len(stored))
            if keep >= 0:
                stored = [b for b in stored if b in points or b in stored[-keep:]]
    return saved, len(stored), most


def test_the_paper_s_run() -> None:
    """Every thousand of 42,000; the switch at 10,000 and the decay's start at 40,000 are kept."""
    assert planned(config_with()) == (42, 4, 4)
    assert planned(config_with("checkpoint.keep=-1")) == (42, 42, 42)
    assert planned(config_with("max_duration=1ep", "schedule.decay=0ba")) == (None, None, None)


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_a_simulation(seed: int) -> None:
    draw = random.Random(seed)
    end = draw.randint(20, 60)
    keep_at = sorted(draw.sample(range(1, end), draw.randint(0, 4)))
    config = config_with(
        f"max_duration={end}ba",
        f"objective.phases.0.until={draw.randint(1, end - 1)}ba",
        f"schedule.warmup={draw.randint(0, 3)}ba",
        f"schedule.decay={draw.randint(0, 9)}ba",
        f"checkpoint.interval={draw.randint(1, 12)}ba",
        f"checkpoint.keep={draw.choice([-1, 1, 2, 5])}",
        f"checkpoint.keep_at=[{','.join(f'{batch}ba' for batch in keep_at)}]",
    )
    assert planned(config) == simulate(config)
