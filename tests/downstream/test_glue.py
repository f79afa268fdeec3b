"""GLUE's eight sets from small ones with the hub's columns, by both protocols, and its scores."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from biphasic.config.load import load
from biphasic.config.tasks import TasksConfig
from biphasic.downstream.prepare import prepare_task
from biphasic.errors import UserError
from biphasic.finetuning.classification import Classification, Regression
from helpers.downstream_sets import GLUE, ROWS, jsonl, make_glue, one_task, rows_of
from helpers.tiny import ROOT

DATA = ROOT / "yamls" / "data"


def glue(file: str, source: Path, output: Path) -> TasksConfig:
    config = load(DATA / file, [*(f"tasks.{name}.source.path={source}" for name in GLUE), f"output={output}"])
    assert isinstance(config, TasksConfig)
    return config


def test_both_protocols(tmp_path: Path) -> None:
    """The official dev set is the test, by glue_dev.yaml the validation too; MNLI has two."""
    source = make_glue(tmp_path / "hub")
    held_out, dev = (glue(file, source, tmp_path / file) for file in ("glue.yaml", "glue_dev.yaml"))
    assert held_out.tasks.keys() == dev.tasks.keys() == GLUE.keys()
    for name, columns in GLUE.items():
        test = "test_matched" if name == "mnli" else "test"
        record = prepare_task(name, held_out)
        assert (record["rows"]["train"], record["rows"]["validation"], record["rows"][test]) == (38, 2, ROWS)
        assert record["kind"] == ("regression" if name == "stsb" else "classification")
        assert not record["warnings"]
        row = rows_of(tmp_path / "glue.yaml" / name, test)[3]
        split = "validation_matched" if name == "mnli" else "validation"
        assert row["text"] == f"{split} {columns[0]} 3" and row["label"] == 1 and row["id"] == "3"
        assert row["text_pair"] == (f"{split} {columns[1]} 3" if len(columns) == 2 else None)
        record = prepare_task(name, dev)
        assert record["rows"]["train"] == ROWS
        folder = tmp_path / "glue_dev.yaml" / name
        assert rows_of(folder, "validation") == rows_of(folder, test)
        assert "100% of" in record["warnings"][0] and "also occurs in" in record["warnings"][0]


def test_shared_sets_are_the_papers() -> None:
    """SST-2, MNLI and QQP stand in two YAMLs."""
    both = [yaml.safe_load((DATA / file).read_text())["tasks"] for file in ("glue.yaml", "tasks.yaml")]
    shared = both[0].keys() & both[1].keys()
    assert shared == {"sst2", "mnli", "qqp"}
    assert all(both[0][name] == both[1][name] for name in shared)


def test_numbers_in_files(tmp_path: Path) -> None:
    """As in a CSV file, numbers may be text; what is no finite number is a fault."""
    labels: list[Any] = [1, "2.5", 3.0]
    split = jsonl(tmp_path / "train.jsonl", [{"text": f"text {at}", "label": label} for at, label in enumerate(labels)])
    task = {"kind": "regression", "text_column": "text", "source": {"files": {"train": [split]}}}
    task["splits"] = {"train": "train", "validation": "train"}
    record = prepare_task("it", one_task(tmp_path, task))
    assert [row["label"] for row in rows_of(tmp_path / "out" / "it", "train")] == [1.0, 2.5, 3.0]
    assert record["label_names"] is None
    for wrong in ("no number", "nan", None, True, 1e39, "1e39", "1_000", [1]):
        jsonl(tmp_path / "train.jsonl", [{"text": "text", "label": wrong}])
        with pytest.raises(UserError, match=re.escape(f"label_column 'label': {wrong!r} is not a finite")):
            prepare_task("it", one_task(tmp_path, task, output=str(tmp_path / f"{wrong!r}")))


def scores(task: type[Classification], gold: list[Any], predicted: list[Any]) -> dict[str, float]:
    about: Any = SimpleNamespace(config=SimpleNamespace(name="t"), data=SimpleNamespace(label_names=["no", "yes"]))
    return task.metrics(about, gold, {"predicted": predicted}, {})


def test_matthews_correlation() -> None:
    """By hand: TP 3, TN 2, FP 1, FN 2 give (3*2 - 1*2) / sqrt(4 * 5 * 3 * 4)."""
    gold = ["yes"] * 5 + ["no"] * 3
    predicted = ["yes", "yes", "yes", "no", "no", "no", "no", "yes"]
    result = scores(Classification, gold, predicted)
    assert result["matthews"] == pytest.approx(4 / np.sqrt(240))
    assert result["accuracy"] == 5 / 8
    assert result["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    assert scores(Classification, gold, ["yes"] * 8)["matthews"] == 0


def test_correlations() -> None:
    """By hand: deviations -1.5 -0.5 0.5 1.5 and -2 -1 -1 4, products 3 + 0.5 - 0.5 + 6; ranks of ties are means."""
    gold, predicted = [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 1.0, 6.0]
    result = scores(Regression, gold, predicted)
    assert result["pearson"] == pytest.approx(9 / np.sqrt(5 * 22))
    assert result["spearman"] == pytest.approx(4.5 / np.sqrt(5 * 4.5))
    with pytest.warns(UserWarning, match="t: all numbers are equal: their correlation counts as 0"):
        assert scores(Regression, gold, [2.0] * 4) == {"pearson": 0, "spearman": 0}
    nan = scores(Regression, gold, [1.0, 2.0, float("nan"), 3.0])
    assert np.isnan([nan["pearson"], nan["spearman"]]).all()
