"""Which keys a resumed run may change."""

from __future__ import annotations

from typing import Any

import pytest

from biphasic.config.load import load
from biphasic.config.same_run import deciding, differences
from biphasic.config.schema import PretrainConfig
from tiny import ROOT


def changed(*overrides: str, allowed: tuple[str, ...] = ()) -> list[str]:
    def of(*more: str) -> dict[str, Any]:
        config = load(ROOT / "yamls" / "quickstart.yaml", list(more))
        assert isinstance(config, PretrainConfig)
        return deciding(config)

    return differences(of(), of(*overrides), list(allowed))


@pytest.mark.parametrize(
    "override",
    ["run_name=other", "output=elsewhere", "microbatch_size=4", "logging.tensorboard=false", "checkpoint.interval=7ba",
     "data.num_workers=5", "data.train.local=moved/train", "evaluation.interval=1ba", "checkpoint.keep=9",
     "parallelism.strategy=fsdp", "data.validation.local=moved/validation", "tokenizer=moved/tokenizer"],
)  # fmt: skip
def test_what_does_not_decide_the_weights_may_change(override: str) -> None:
    assert changed(override) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.lr=1e-3", "optimizer.lr: 0.002 until now, 0.001 here"),
        ("seed=43", "seed: 42 until now, 43 here"),
        ("global_batch_size=16", "global_batch_size: 8 until now, 16 here"),
        ("objective.phases.1.masking_ratio=0.3", "objective.phases.1.masking_ratio: 0.4 until now, 0.3 here"),
        ("data.shuffle_block_size=9", "data.shuffle_block_size: 262144 until now, 9 here"),
        ("max_duration=500ba", "max_duration: '360ba' until now, '500ba' here"),
        ("schedule.final_lr=1e-5", "schedule.final_lr: 0.0 until now, 1e-05 here"),
        ("data.shuffle_seed=1", "data.shuffle_seed: nothing until now, 1 here"),
        ("precision=amp_bf16", "precision: 'fp32' until now, 'amp_bf16' here"),
        ("model.num_layers=5", "model.num_layers: 4 until now, 5 here"),
    ],
)
def test_what_decides_them_may_not(override: str, line: str) -> None:
    assert changed(override) == [line]
    key = override.partition("=")[0]
    assert changed(override, allowed=(key,)) == []
    assert changed(override, allowed=(key.partition(".")[0],)) == []
    assert changed(override, allowed=(key[:-1],)) == [line]
