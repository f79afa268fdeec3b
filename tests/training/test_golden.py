"""The first losses of a tiny biphasic run, so that no change of the numerics goes unnoticed.

`BIPHASIC_WRITE_GOLDEN=1 pytest tests/training/test_golden.py` writes the file again, for an intended change.
"""

import json
import os
from functools import partial
from pathlib import Path

import composer.trainer.trainer
import pytest
import torch

from conftest import Write
from helpers.tiny import config_of, dump_json, losses, train

GOLDEN = Path(__file__).parent / "golden_losses.json"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_fifty_losses_are_the_golden_ones(
    precision: str, write_yaml: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "bf16":  # Composer's context for it needs a GPU
        context = partial(torch.autocast, "cpu", torch.bfloat16)
        monkeypatch.setattr(composer.trainer.trainer, "get_precision_context", lambda *_, **__: context())
    path = write_yaml(
        max_duration="50ba",
        objective__phases=[{"name": "clm", "until": "25ba"}, {"name": "mlm", "masking_ratio": 0.4}],
        schedule={"warmup": "5ba", "decay": "10ba"},
        checkpoint__interval="50ba",
    )
    values = losses(train(config_of(path)))
    expected: dict[str, list[float]] = json.loads(GOLDEN.read_text())
    if os.environ.get("BIPHASIC_WRITE_GOLDEN"):
        expected[precision] = values
        dump_json(GOLDEN, expected)
    assert len(values) == len(expected[precision]) == 50
    # Sums of bf16 products are rounded in another order on other processors.
    tolerance = {"fp32": 1e-4, "bf16": 1e-2}[precision]
    assert max(abs(a - b) for a, b in zip(values, expected[precision], strict=True)) < tolerance
    # It learns, in both phases.
    assert values[24] < values[0] - 0.3
    assert values[49] < values[26] - 0.1
