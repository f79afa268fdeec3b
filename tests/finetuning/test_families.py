"""The families on small sets with the hub's columns: they learn, are reproducible and share tokenized data."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from biphasic.errors import UserError
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import FAMILIES, require_unchanged, run_trial, scored_sets, train_and_score, trial_name
from biphasic.model.encoder import Encoder, load_encoder
from helpers.toy_sets import config_of

EPOCHS = {"sst2": 4, "stsb": 2, "conll2003": 4, "squad": 12, "squad_v2": 16, "msmarco": 2}
CHANCE = {"sst2": 0.6, "stsb": 0.5, "conll2003": 0.0, "squad": 0.5, "squad_v2": 0.5, "msmarco": 0.1}
"""Chance-level baselines: the more frequent label; any correlation; no entity; one of two candidate words (SQuAD v2: or no
answer); a random order of 160 documents."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "squad" else []) for name in EPOCHS]
)
def test_trial_scores_above_chance(name: str, toy: Path, tmp_path: Path) -> None:
    config = config_of(name, toy / "tasks", toy / "start", tmp_path, max_duration=f"{EPOCHS[name]}ep")
    trial = run_trial(config)
    [result] = trial.results
    assert ((result.task, result.name, result.metric),) == scored_sets(config)
    assert result.family == config.task.kind
    assert result.test is not None
    assert result.validation is not None
    assert result.test > CHANCE[name] + 0.25, result
    assert result.validation > CHANCE[name] + 0.25, result
    assert trial.about["steps"] == EPOCHS[name] * (1600 if name == "msmarco" else 800) // 32
    if name == "squad_v2":
        assert result.more["test"]["no_answer_f1"] > 0.5
        assert result.more["test"]["no_answer_threshold"] == result.more["validation"]["no_answer_threshold"]


def test_a_trial_is_reproducible(toy: Path, tmp_path: Path) -> None:
    def trial(**changes: Any) -> tuple[Any, float]:
        config = config_of("conll2003", toy / "tasks", toy / "start", tmp_path, max_duration="20ba", **changes)
        result = run_trial(config)
        return result.results, result.about["loss"]

    first = trial()
    assert trial() == first
    # Microbatches change nothing but rounding; the seed does.
    smaller = trial(microbatch_tokens=64)
    assert abs(smaller[1] - first[1]) < 1e-5
    assert smaller[0][0].test == pytest.approx(first[0][0].test, abs=0.02)
    assert trial(seed=1)[1] != first[1]


def test_trial_name_depends_on_all_that_decides_the_result(toy: Path, tmp_path: Path) -> None:
    def name(**changes: Any) -> str:
        return trial_name(config_of("sst2", toy / "tasks", toy / "start", tmp_path, **changes))

    first = name()
    same = ({"run_name": "other"}, {"output": "x"}, {"cache": str(tmp_path / "c")}, {"microbatch_tokens": 77},
            {"save_model": True}, {"logging__jsonl": True})  # fmt: skip
    for changes in same:
        assert name(**changes) == first, changes
    other: list[dict[str, Any]] = [
        {"seed": 1}, {"optimizer__lr": 1e-4}, {"batch_size": 16}, {"task__max_length": 20}, {"warmup": "0.2dur"},
        {"task__text": "{text} w0"}, {"precision": "amp_bf16"}, {"task__metrics": ["f1"]}, {"max_duration": "3ba"},
    ]  # fmt: skip
    names = [name(**changes) for changes in other]
    assert len({first, *names}) == len(names) + 1


def test_trial_name_depends_on_the_files(toy: Path, tmp_path: Path) -> None:
    for part in ("tasks", "start"):
        shutil.copytree(toy / part, tmp_path / part)
    config = config_of("sst2", tmp_path / "tasks", tmp_path / "start", tmp_path)
    first = trial_name(config)
    assert first == trial_name(config_of("sst2", toy / "tasks", toy / "start", tmp_path / "elsewhere"))
    for file in ("tasks/sst2/test.parquet", "start/model.safetensors"):
        path = tmp_path / file
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert trial_name(config) != first, file
        path.write_bytes(content)
        assert trial_name(config) == first
    # A separator changes the inputs, and is in no hash of these files.
    path = tmp_path / "start" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sep_token": "w1"}))
    assert trial_name(config) != first


@pytest.mark.parametrize("file", ["start/model.safetensors", "tasks/sst2/train.parquet"])
def test_files_that_change_while_the_model_is_loaded(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The result would be recorded by the hash of the old files."""
    for part in ("tasks", "start"):
        shutil.copytree(toy / part, tmp_path / part)
    config = config_of("sst2", tmp_path / "tasks", tmp_path / "start", tmp_path, max_duration="1ba")
    name = trial_name(config)
    require_unchanged(config, name)

    def load_and_change(*arguments: Any) -> Encoder:
        loaded, path = load_encoder(*arguments), tmp_path / file
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return loaded

    monkeypatch.setattr("biphasic.model.encoder.load_encoder", load_and_change)
    with pytest.raises(UserError, match="start or the data of sst2: a file has changed since the trial was named"):
        run_trial(config)
    with pytest.raises(UserError, match="a file has changed"):
        require_unchanged(config, name)


def test_a_trial_s_model_is_freed(toy: Path, tmp_path: Path) -> None:
    """A sweep's worker runs hundreds."""
    _, model, *_ = train_and_score(config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="2ba"))
    backbone = weakref.ref(model.encoder.backbone)
    del model
    gc.collect()
    assert backbone() is None


def test_data_is_tokenized_once_for_all_trials(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("squad", toy / "tasks", toy / "start", tmp_path, max_duration="2ba")
    run_trial(config)
    made = sorted((tmp_path / "cache" / "arrays").glob("*/key.json"))
    assert len(made) == 3

    def refuse(*_: Any) -> Any:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("biphasic.data.tokenizer.Tokenizer.encode_with_offsets", refuse)
    run_trial(config_of("squad", toy / "tasks", toy / "start", tmp_path, max_duration="2ba", seed=3, optimizer__lr=1e-3))
    assert sorted((tmp_path / "cache" / "arrays").glob("*/key.json")) == made


def test_no_padding(toy: Path, tmp_path: Path) -> None:
    """The tokens of all batches are those of the texts."""
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, max_duration="1ep")
    rows = pq.read_table(toy / "tasks" / "sst2" / "train.parquet")["text"].to_pylist()
    assert run_trial(config).about["tokens"] == sum(len(text.split()) for text in rows)


def test_run_writes_scores_and_a_model(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sst2", "conll2003", "squad"):
        config = config_of(name, toy / "tasks", toy / "start", tmp_path, max_duration="30ba", save_model=True)
        folder = run(config)
        record = json.loads((folder / "record.json").read_text())
        [result] = record["results"]
        assert f"{name}: validation {result['metric']} {result['validation']:.4f}" in capsys.readouterr().out
        card = (folder / "model" / "README.md").read_text()
        assert f"{result['test']:.4f} (test)" in card and f"| {record['about']['loss']:.4f} |" in card
        assert score_exported(folder / "model", name, toy) == result["test"], name
        run(config)
        assert "already fine-tuned" in capsys.readouterr().out
    options = {"max_duration": "30ba", "save_model": True, "seed": 5}
    with pytest.raises(UserError, match=rf"holds another fine-tuning \(seed: {config.seed}, now 5\): choose another"):
        run(config_of("squad", toy / "tasks", toy / "start", tmp_path, **options))
    options |= {"max_duration": "20ba", "warmup": "1ba", "optimizer__lr": 3e-4}
    with pytest.raises(UserError, match=r"holds another fine-tuning \((.*: .*, now .*; ){3}and others\): choose another"):
        run(config_of("squad", toy / "tasks", toy / "start", tmp_path, **options))


def test_other_label_names_are_another_fine_tuning(toy: Path, tmp_path: Path) -> None:
    """Labels are numbers in the tables, so that the order of their names changes no table."""
    shutil.copytree(toy / "tasks" / "sst2", tmp_path / "sst2")
    config = config_of("sst2", tmp_path, toy / "start", tmp_path, max_duration="2ba", save_model=True)
    assert run(config) == run(config)
    record = tmp_path / "sst2" / "task.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "label_names": content["label_names"][::-1]}))
    with pytest.raises(UserError, match=r"holds another fine-tuning \(its model, its data or Biphasic has changed"):
        run(config)
    # A record of an earlier version has no names.
    file = config.run_folder / "record.json"
    written = json.loads(file.read_text())
    del written["label_names"]
    file.write_text(json.dumps(written))
    run(config)


def score_exported(folder: Path, name: str, toy: Path) -> float | None:
    """Return the test score of a written model, by transformers' own classes where these have the head."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

    from biphasic.finetuning.task import TrainedModel
    from biphasic.model.encoder import load_encoder

    config = config_of(name, toy / "tasks", folder, folder.parent)
    encoder = load_encoder(str(folder))
    task = FAMILIES[config.task.kind](config.task, encoder.text_tokenizer, config.cache)
    if name == "squad":
        head = task.build_head(encoder.width)
        head.load_state_dict(load_file(folder / "head.safetensors"))
        return task.evaluate(TrainedModel(encoder, head, 4096, bf16=False))[0][0].test
    kinds = {"sst2": AutoModelForSequenceClassification, "conll2003": AutoModelForTokenClassification}
    model = kinds[name].from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = pq.read_table(toy / "tasks" / name / "test.parquet").to_pydict()
    predictions = []
    with torch.inference_mode():
        for text in table["text"] if name == "sst2" else map(" ".join, table["tokens"]):
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
            predictions.append(logits.argmax(-1).tolist())
    assert model.config.id2label[1] in ("positive", "B-PER")
    if name == "sst2":
        return float(np.mean([a == b for a, b in zip(predictions, table["label"], strict=True)]))
    from biphasic.finetuning.classification import entity_scores

    names = task.data.label_names
    gold, predicted = ([[names[label] for label in line] for line in lines] for lines in (table["labels"], predictions))
    return entity_scores(gold, predicted)["f1"]


def test_bad_input_is_refused_in_one_line(toy: Path, tmp_path: Path) -> None:
    sets = toy / "tasks"

    def fails(name: str, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message) as caught:
            run_trial(config_of(name, sets, toy / "start", tmp_path, **changes))
        assert "\n" not in str(caught.value)

    fails("sst2", "has no task.json", task__data=str(tmp_path))
    fails("sst2", "sst: there is no such folder: expected one that", task__data=str(sets / "sst"))
    fails("sst2", "is a dataset of kind tokens; expected classification", task__data=str(sets / "conll2003"))
    fails("sst2", "has no dev", task__validation="dev")
    fails("sst2", "has single texts", task__text="{text} {text_pair}")
    fails("sst2", "don't fill one batch of 1024", batch_size=1024)
    fails("sst2", r"^warmup: 30ba is not shorter than the training of 25 batches", max_duration="1000ba", warmup="30ba")
    fails("conll2003", "can't be loaded", model__path=str(tmp_path / "no-model"))
    fails("msmarco", "of 1,600 pairs in .* have none", task__hard_negatives=1)
    fails("sst2", "loss is not a finite number", optimizer__lr=1e30)
    if not torch.cuda.is_available():
        fails("sst2", "amp_bf16 needs a GPU", precision="amp_bf16")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "task.json").write_text('{"kind": "classification", "label_names": ["a", "b"]}')
    (broken / "train.parquet").write_bytes(b"PAR1")
    fails("sst2", "train.parquet: can't be read", task__data=str(broken))
