"""The first losses of a tiny biphasic run, so that a change of the mathematics is never an accident.

`BIPHASIC_WRITE_GOLDEN=1 pytest tests/training/test_golden.py` writes the file anew, for a change that is meant.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Write
from tiny import config_of, dump_json, losses, train

GOLDEN = Path(__file__).parent / "golden_losses.json"


def test_first_fifty_losses(write_yaml: Write) -> None:
    path = write_yaml(
        max_duration="50ba",
        objective__phases=[{"name": "clm", "until": "25ba"}, {"name": "mlm", "masking_ratio": 0.4}],
        schedule={"warmup": "5ba", "decay": "10ba"},
        checkpoint__interval="50ba",
    )
    found = losses(train(config_of(path)))
    if os.environ.get("BIPHASIC_WRITE_GOLDEN"):
        dump_json(GOLDEN, found)
    expected = json.loads(GOLDEN.read_text())
    assert len(found) == len(expected) == 50
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    # It learns, in both phases.
    assert found[24] < found[0] - 0.3
    assert found[49] < found[26] - 0.1
