"""The comparison with the paper's own models: on small ones in their format, up to the table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

import main as program
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from helpers.papers_models import write_model
from helpers.tiny import ROOT, write_tokenizer
from helpers.toy_sets import config_of, make_sets

HARNESS = ROOT / "recipes" / "paper" / "harness"
sys.path.insert(0, str(HARNESS))

from compare import CELLS, TEST_SETS, compare, main  # noqa: E402  # pyright: ignore[reportMissingImports]


def measured(scores: dict[str, list[float]]) -> pd.DataFrame:
    """The columns of a sweep's results.csv that are read, with one score for each seed."""
    rows = [
        {"model": model, "test_set": "mldr", "lr": 5e-5, "seed": seed, "validation": None, "test": score}
        for model, values in scores.items()
        for seed, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def published(scores: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {
            "model": model,
            "task": "IR",
            "dataset": "mldr_en",
            "rate": 5e-5,
            "seed": seed,
            "split": "test",
            "score": score,
        }
        for model, values in scores.items()
        for seed, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_the_interval_is_that_of_the_pooled_t_test() -> None:
    ours, theirs = [0.53, 0.55, 0.54, 0.535], [0.531, 0.536, 0.528]
    [row] = compare(measured({"a": ours, "b": [0.5]}), published({"a": theirs, "b": [0.5], "c": [0.4]})).itertuples()
    interval = stats.ttest_ind(ours, theirs).confidence_interval(0.95)
    assert (row.difference - row.half, row.difference + row.half) == pytest.approx(tuple(interval))
    assert row.agrees
    far = compare(measured({"a": ours}), published({"a": [score - 0.1 for score in theirs]}))
    assert not far.agrees.any()


def test_one_published_seed_is_compared_with_our_spread() -> None:
    ours = [0.50, 0.52, 0.54]
    spread = stats.t.ppf(0.975, 2) * np.std(ours, ddof=1) * (1 + 1 / 3) ** 0.5
    for offset, agrees in ((0.99, True), (1.01, False)):
        [row] = compare(measured({"a": ours}), published({"a": [0.52 + offset * spread]})).itertuples()
        assert bool(row.agrees) is agrees


def test_the_cells_are_those_of_the_sweep() -> None:
    sweep = load(str(HARNESS / "sweep.yaml"))
    assert isinstance(sweep, SweepConfig)
    cells = pd.read_csv(CELLS)
    assert len(cells) == 56 and cells.path.str.startswith("results/").all()
    compared = cells[cells.model.isin(list(sweep.models)) & (cells.rate == 5e-5)]
    assert compared[compared.dataset == "mldr_en"].groupby(["model", "split"]).seed.nunique().eq(5).all()
    assert {"sst2", "msmarco", "mldr_en"} <= set(compared.dataset)
    assert set(TEST_SETS) <= set(cells.dataset)


def test_up_to_the_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's own sweep, with small models and sets, down to the table."""
    write_tokenizer(tmp_path / "tokenizer")
    make_sets(tmp_path)
    models = {name: {"path": str(write_model(tmp_path / name))} for name in ("610m-clm-42k", "610m-mlm40-42k")}
    tasks = {}
    for name in ("msmarco", "sst2"):
        config = config_of(name, tmp_path / "tasks", tmp_path / "610m-clm-42k", tmp_path, max_duration="6ba")
        content = config.model_dump(mode="json", exclude_unset=True, exclude={"optimizer", "run_name", "save_model"})
        content["task"] |= {"end_of_text": True}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**content, "run_name": name}))
        tasks[name] = str(tmp_path / f"{name}.yaml")
    small = {
        "defaults": str(HARNESS / "sweep.yaml"),
        "output": str(tmp_path / "sweep"),
        "models": models,
        "tasks": tasks,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(small))
    assert program.main([str(tmp_path / "sweep.yaml"), "seeds=[0,1]", "cluster.at_once=2"]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "sweep" / "report" / "results.csv")]) == 1
    printed = capsys.readouterr().out
    assert "| 610m-clm-42k | sst2 | test | 5e-05 |" in printed and "90.94 (1)" in printed
    assert "| 610m-mlm40-42k | msmarco | test | 5e-05 |" in printed
    assert main([str(tmp_path / "nothing.csv")]) == 2
