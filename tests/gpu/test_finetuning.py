"""On a GPU: each family trains, in bf16 too, with the CPU's losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from biphasic.finetuning.trial import run_trial
from tiny import write_tokenizer
from toy_sets import config_of, make_sets, write_encoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_tokenizer(folder / "tokenizer")
    make_sets(folder)
    write_encoder(folder / "start", folder / "tokenizer")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("name", ["sst2", "conll2003", "squad_v2", "msmarco"])
def test_families(name: str, precision: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name, root / "tasks", root / "start", tmp_path, max_duration="5ba", precision=precision)
    there = run_trial(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = run_trial(config.model_copy(update={"precision": "fp32"}))
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    assert there.about["loss"] == pytest.approx(here.about["loss"], rel=tolerance)
    assert there.results[0].test == pytest.approx(here.results[0].test, abs=0.1)
