"""A fine-tuning writes only what `logging` names, and its log has no table of heads that are not loaded."""

import json
import logging
import os
from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig, BertForMaskedLM

from biphasic.config.load import dump
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import run_trial
from biphasic.model.encoder import load_encoder
from biphasic.quiet import progress_bars
from biphasic.training import anomalies
from helpers import warm
from helpers.toy_sets import config_of


def write_bert(folder: Path, tokenizer: Path) -> Path:
    """A model with a masked language model's head, which fine-tuning doesn't load."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
    BertForMaskedLM(BertConfig(vocab_size=128, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


@pytest.mark.parametrize("shown", [False, True])
def test_bars_in_the_log(shown: bool, toy: Path, tmp_path: Path) -> None:
    model = write_bert(tmp_path / "bert", toy / "start")
    config = config_of("sst2", toy / "tasks", model, tmp_path, max_duration="2ba", logging__progress_bar=shown)
    (tmp_path / "run.yaml").write_text(dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    outcome = warm.run([str(tmp_path / "run.yaml")], 1, environment)
    assert outcome.returncode == 0, outcome.stderr
    log = outcome.stdout + outcome.stderr
    assert "UNEXPECTED" not in log
    assert ("it/s]" in log) == shown, log


def test_spikes_are_recorded_in_the_run_that_has_them(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of a sweep has no loggers; a fine-tuning that is started again begins its files anew."""
    monkeypatch.setattr(anomalies, "_THRESHOLD", 0.0)
    monkeypatch.setattr(anomalies, "_MIN_LOSSES", 1)
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="3ba")
    run_trial(config)
    assert not config.run_folder.exists()
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="3ba", logging__jsonl=True)
    config.run_folder.mkdir(parents=True)
    file = config.run_folder / anomalies.ANOMALOUS_BATCHES
    file.write_text("of an interrupted start")
    run(config)
    assert [json.loads(line)["batch"] for line in file.read_text().splitlines()] == [1, 2]


def test_weights_without_a_place_are_named(toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_bert(tmp_path / "bert", toy / "start")
    with caplog.at_level(logging.WARNING):
        load_encoder(str(model))
    assert "of its weights" not in caplog.text
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert AutoConfig.from_pretrained(model).num_hidden_layers == 1
    with caplog.at_level(logging.WARNING):
        load_encoder(str(model))
    assert "16 of its weights are not used by the network in config.json, e.g. bert.encoder.layer.1." in caplog.text


def test_bars_come_back() -> None:
    from tqdm import tqdm

    with progress_bars(False):
        assert tqdm(total=1, disable=False).disable
    with progress_bars(True):
        assert not tqdm(total=1, disable=False).disable
