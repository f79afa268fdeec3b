"""The first losses of a tiny biphasic run, so that no change of the numerics goes unnoticed.

`BIPHASIC_WRITE_GOLDEN=1 pytest tests/training/test_golden.py` writes the file again, for an intended change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Write
from tiny import config_of, dump_json, losses, train

GOLDEN = Path(__file__).parent / "golden_losses.json"


def test_the_first_fifty_losses_are_the_golden_ones(write_yaml: Write) -> None:
    path = write_yaml(
        max_duration="50ba",
        objective__phases=[{"name": "clm", "until": "25ba"}, {"name": "mlm", "masking_ratio": 0.4}],
        schedule={"warmup": "5ba", "decay": "10ba"},
        checkpoint__interval="50ba",
    )
    values = losses(train(config_of(path)))
    if os.environ.get("BIPHASIC_WRITE_GOLDEN"):
        dump_json(GOLDEN, values)
    expected = json.loads(GOLDEN.read_text())
    assert len(values) == len(expected) == 50
    assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-4
    # It learns, in both phases.
    assert values[24] < values[0] - 0.3
    assert values[49] < values[26] - 0.1
