"""The plan of a fine-tuning: what it finds, and what is missing."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.finetuning.batches import warmup_batches
from biphasic.finetuning.plan import plan_finetuning
from biphasic.finetuning.run import run
from helpers.tiny import ROOT, WORDS
from helpers.toy_sets import SIZES

SST2 = ROOT / "yamls" / "finetune" / "sst2.yaml"


def config_of(*overrides: str) -> FinetuneConfig:
    config = load(SST2, ["precision=fp32", *overrides])
    assert isinstance(config, FinetuneConfig)
    return config


def test_everything_is_there(toy: Path, tmp_path: Path) -> None:
    keys = [
        f"model.path={toy / 'start'}",
        f"task.data={toy / 'tasks' / 'sst2'}",
        f"output={tmp_path}",
        "max_duration=2ep",
    ]
    job_plan = plan_finetuning(config_of(*keys), 1)
    assert not job_plan.missing and not job_plan.problems
    lines = job_plan.lines
    assert lines["length"] == "2ep, of 32 examples; 0.1dur warmup"
    assert f"train {SIZES['train']}" in lines["data"] and "test 80" in lines["data"]
    assert lines["writes"].startswith(f"{tmp_path}/sst2: record.json")
    assert json.loads(job_plan.to_json())["lines"] == lines
    assert not list(tmp_path.iterdir())


def test_a_warmup_that_never_ends(toy: Path) -> None:
    keys = [f"model.path={toy / 'start'}", f"task.data={toy / 'tasks' / 'sst2'}", "max_duration=1000ba"]
    [problem] = plan_finetuning(config_of(*keys, "warmup=25ba"), 1).problems
    assert problem.startswith("warmup: 25ba is not shorter than the training of 25 batches (one epoch, which max_duration")
    assert not plan_finetuning(config_of(*keys, "warmup=24ba"), 1).problems


def test_a_tokenizer_that_is_larger_than_the_embedding(toy: Path, tmp_path: Path) -> None:
    """The plan knows it from config.json."""
    folder = tmp_path / "start"
    shutil.copytree(toy / "start", folder)
    settings = json.loads((folder / "config.json").read_text())
    keys = [f"model.path={folder}", f"task.data={toy / 'tasks' / 'sst2'}", "max_duration=2ep"]
    for vocabulary, problems in (
        (WORDS, []),
        (
            WORDS - 1,
            [f"model {folder}: its tokenizer has {WORDS} tokens, its embedding {WORDS - 1}: they don't belong together"],
        ),
    ):
        (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": vocabulary}))
        assert plan_finetuning(config_of(*keys), 1).problems == problems


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [("0.1dur", 1, 0), ("0.1dur", 2, 1), ("0.9dur", 2, 1), ("0.99dur", 10, 9), ("0dur", 1, 0)],
)
def test_a_share_of_warmup_leaves_a_batch(warmup: str, steps: int, expected: int) -> None:
    assert warmup_batches(config_of(f"warmup={warmup}"), steps) == expected


def test_a_training_of_one_batch_is_trained(toy: Path, tmp_path: Path) -> None:
    keys = [f"model.path={toy / 'start'}", f"task.data={toy / 'tasks' / 'sst2'}", f"cache={tmp_path}/cache"]
    folder = run(config_of(*keys, f"output={tmp_path}", f"batch_size={SIZES['train']}", "optimizer.lr=1e-2"))
    start, trained = (load_file(path / "model.safetensors") for path in (toy / "start", folder / "model"))
    assert any((trained[f"model.{name}"] - weight).abs().max() > 5e-3 for name, weight in start.items())


def test_what_is_missing(tmp_path: Path) -> None:
    job_plan = plan_finetuning(config_of(f"task.data={tmp_path}"), 1)
    assert job_plan.missing == [
        "model.path runs/encoder: there is no such folder",
        f"task.data {tmp_path}: there is no task.json: prepare it with biphasic tasks",
    ]
    assert "\n  MISSING        model.path runs/encoder" in job_plan.describe()


def test_data_of_another_kind(toy: Path) -> None:
    data = toy / "tasks" / "squad"
    job_plan = plan_finetuning(config_of(f"model.path={toy / 'start'}", f"task.data={data}"), 1)
    assert job_plan.problems == [
        f"task.data {data}: is a dataset of kind question_answering; expected classification, the task.kind"
    ]
