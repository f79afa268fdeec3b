"""Reading metrics of several attempts, with validations and an incomplete line."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

from composer.core import Timestamp

from biphasic.training.loggers import JSONLLogger
from biphasic.training.metrics_file import read_metrics


def test_several_lines_of_one_batch_are_merged(tmp_path: Path) -> None:
    lines = [
        {"batch": 1, "tokens": 5, "time": 1.0, "loss/train/total": 3.0},
        {"batch": 2, "tokens": 9, "time": 2.0, "loss/train/total": 2.9},
        # The same batch, trained again by another attempt.
        {"batch": 2, "tokens": 9, "time": 7.0, "loss/train/total": 2.8},
        # A validation after it, and the end: their time isn't the batch's.
        {"batch": 2, "tokens": 9, "time": 8.5, "metrics/clm/loss": 2.5},
        {"batch": 2, "tokens": 9, "time": 9.0, "data/wait_share_total": 0.1},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"batch": 3, "ti')
    first, second = read_metrics(path)
    assert first == lines[0]
    assert second == {**lines[2], "metrics/clm/loss": 2.5, "data/wait_share_total": 0.1}
    # A resumed run appends lines of its own.
    logger = JSONLLogger(path)
    logger.init(Mock(), Mock())
    logger.log_metrics({"loss/train/total": 2.7})
    logger.batch_end(Mock(timestamp=Timestamp(batch=3, token=14)), Mock())
    logger.post_close()
    assert [entry["loss/train/total"] for entry in read_metrics(path)] == [3.0, 2.8, 2.7]
