"""Metrics of several attempts: in one file, with validations and an incomplete line, and in one run of W&B and MLflow."""

import json
import math
import re
import sys
import tracemalloc
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from composer.core import Timestamp

from biphasic.config.pretrain import LoggingConfig
from biphasic.training.loggers import JSONLLogger, WandBRunLogger, loggers
from biphasic.training.metrics_file import read_columns, read_metrics
from helpers.local_trackers import keep_local


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


def test_a_run_that_begins_again_is_not_mixed_with_the_earlier_one(tmp_path: Path) -> None:
    """Its checkpoints were removed, and it is shorter."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"batch": batch, "tokens": batch, "time": 1.0, "loss/train/total": 3.0} for batch in range(1, 11)]
    lines += [{"batch": 10, "tokens": 10, "time": 1.0, "metrics/mlm/loss": 8.0}]
    again = [{"batch": batch, "tokens": batch, "time": 2.0, "loss/train/total": 2.0} for batch in range(1, 5)]
    path.write_text("\n".join(map(json.dumps, lines + again)))
    assert read_metrics(path) == again


def test_lines_of_others_are_skipped(tmp_path: Path) -> None:
    """A user's notes, and what pandas writes of tables with empty cells."""
    path, own = tmp_path / "metrics.jsonl", {"batch": 3, "time": 1.0, "loss/train/total": 3.0}
    foreign = ('{"note": "restarted by me"}', "null", "12", "[1]", '"batch"', "# a comment", '{"batch": "3", "time": 1}',
               '{"batch": NaN}', '{"batch": 3.5}', '{"batch": 1e400}', '{"batch": 99999999999999999999}',
               '{"batch": null}', '{"batch": {}}')  # fmt: skip
    path.write_text("\n".join([*foreign, json.dumps(own), *foreign]))
    assert read_metrics(path) == [own]
    assert {key: list(values) for key, values in read_columns(path, re.compile("loss/.*")).items()} == {
        "batch": [3], "loss/train/total": [3.0]
    }  # fmt: skip
    path.write_text(f'{json.dumps(own)}\n{{"batch": 3.0, "note": 1}}\n{{"batch": 4.0, "loss/train/total": "2"}}\n')
    assert [(type(each["batch"]), each["batch"], each.get("time")) for each in read_metrics(path)] == [
        (int, 3, 1.0), (int, 4, None)
    ]  # fmt: skip
    found = read_columns(path, re.compile("loss/.*"))
    assert found["batch"].tolist() == [3, 4]
    assert found["loss/train/total"].tolist() == [3.0, pytest.approx(math.nan, nan_ok=True)]


def test_columns_are_the_metrics_of_each_batch(tmp_path: Path) -> None:
    """With attempts that begin anywhere, validations of batches that are trained later or never, and broken lines."""
    path, random = tmp_path / "metrics.jsonl", Random(0)
    for _ in range(300):
        batch, lines = 0, list[str]()
        for _ in range(random.randrange(40)):
            batch = random.randrange(batch + 1) if random.random() < 0.15 else batch + 1
            entry: dict[str, float | None] = {"batch": batch, "time": 1.0}
            if random.random() < 0.8:
                entry |= {
                    "loss/train/total": random.random(),
                    f"loss/train/{random.choice(('clm', 'mlm'))}": random.random(),
                }
            else:
                entry |= {
                    "batch": batch + random.randrange(2),
                    "metrics/clm/loss": random.choice((2.0, math.nan, None)),
                }
            lines.append(json.dumps(entry)[: 5 if random.random() < 0.1 else None])
        path.write_text("\n".join(lines))
        found, each = read_columns(path, re.compile("loss/train/.*|metrics/.*")), read_metrics(path)
        assert found.pop("batch").tolist() == [entry["batch"] for entry in each]
        keys = {key for entry in each for key in entry if "/" in key}
        assert keys <= found.keys()
        for key, values in found.items():
            expected = [math.nan if entry.get(key) is None else entry[key] for entry in each]
            assert values.tolist() == pytest.approx(expected, abs=0, nan_ok=True)


def test_columns_take_the_memory_of_their_values(tmp_path: Path) -> None:
    """Not of the file, whose lines have twenty keys more."""
    path, more = tmp_path / "metrics.jsonl", {f"time/{number}": 0.123456789 for number in range(20)}
    with path.open("w") as file:
        for batch in range(1, 20_001):
            file.write(json.dumps({"batch": batch, "time": 1.0, "loss/train/total": 2.0, **more}) + "\n")
    tracemalloc.start()
    assert len(read_columns(path, re.compile("loss/train/total"))["batch"]) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 16 * 20_000 < path.stat().st_size / 4


def test_a_run_that_resumes_stays_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the same name is another one there."""
    import mlflow
    import wandb

    keep_local(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Composer replaces it
    config = LoggingConfig(jsonl=False, tensorboard=False, progress_bar=False, wandb="project", mlflow="experiment")
    ids = []
    for step, run_id in enumerate(["20260101T000000.5-a", "20260101T000000.5-a", "20260102T000000.5-b", None]):
        for destination in loggers(config, tmp_path, "same", run_id):
            destination.init(Mock(run_name="same"), Mock())
            destination.log_metrics({"loss": 1.0 + step}, step)
            if isinstance(destination, WandBRunLogger):
                destination.log_hyperparameters({"num_nodes": 4})
                # W&B's server returns the earlier value to a resumed run.
                destination.log_hyperparameters({"num_nodes": 2})
            if wandb.run is not None:
                ids.append(wandb.run.id)
            destination.post_close()
    assert ids[0] == ids[1] == "20260101T000000.5-a" and len(set(ids)) == 3
    runs = mlflow.search_runs(experiment_names=["experiment"], output_format="list")
    assert [run.info.run_name for run in runs] == ["same"] * 3
    client = mlflow.MlflowClient()
    steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] for run in runs]
    assert sorted(steps) == [[0, 1], [2], [3]]
