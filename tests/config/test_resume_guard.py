"""The resume guard: the keys that a resumed run may change."""

from __future__ import annotations

from typing import Any

import pytest

from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.resume_guard import changed_keys, guarded_keys
from tiny import ROOT


def differences(override: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """The guarded keys that an override changes."""

    def keys(*overrides: str) -> dict[str, Any]:
        config = load(ROOT / "yamls" / "quickstart.yaml", list(overrides))
        assert isinstance(config, PretrainConfig)
        return guarded_keys(config)

    return changed_keys(keys(), keys(override), list(allowed))


@pytest.mark.parametrize(
    "override",
    ["run_name=other", "output=elsewhere", "microbatch_size=4", "logging.tensorboard=false", "checkpoint.interval=7ba",
     "data.num_workers=5", "data.train.local=moved/train", "evaluation.interval=1ba", "checkpoint.keep=9",
     "parallelism.strategy=fsdp", "data.validation.local=moved/validation", "tokenizer=moved/tokenizer"],
)  # fmt: skip
def test_keys_that_do_not_affect_the_weights_may_change(override: str) -> None:
    assert differences(override) == []


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
        ("model.num_kv_heads=2", "model.num_kv_heads: nothing until now, 2 here"),
        ("precision=amp_bf16", "precision: 'fp32' until now, 'amp_bf16' here"),
        ("model.num_layers=5", "model.num_layers: 4 until now, 5 here"),
    ],
)
def test_keys_that_affect_the_weights_may_not_change(override: str, line: str) -> None:
    assert differences(override) == [line]
    key = override.partition("=")[0]
    assert differences(override, allowed=(key,)) == []
    assert differences(override, allowed=(key.partition(".")[0],)) == []
    assert differences(override, allowed=(key[:-1],)) == [line]
