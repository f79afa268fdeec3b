"""The comparison with the paper's own models: on small ones in their format, up to the table."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic import main as program
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from helpers.papers_models import write_model
from helpers.tiny import ROOT, write_tokenizer
from helpers.toy_sets import config_of, make_sets

HARNESS = ROOT / "recipes" / "paper" / "harness"
sys.path.insert(0, str(HARNESS.parent))
against: Any = import_module("against")


def test_the_published_cells_are_those_of_the_sweep() -> None:
    sweep = load(str(HARNESS / "sweep.yaml"))
    assert isinstance(sweep, SweepConfig)
    cells = against.read_reference().query("test_set != '' and lr == '5e-05'")
    compared = cells[cells.model.isin(list(sweep.models))]
    assert compared[compared.test_set == "mldr"].groupby(["model", "split"]).seed.nunique().eq(5).all()
    assert {"sst2", "msmarco", "mldr"} <= set(compared.test_set)


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
    assert against.main([str(tmp_path / "sweep")]) == 0
    section = capsys.readouterr().out.partition("## At the same rate")[2]
    assert "| 610m-clm-42k | sst2 | test | 5e-5 |" in section and "90.94 (1)" in section
    assert "| 610m-mlm40-42k | msmarco | test | 5e-5 |" in section
