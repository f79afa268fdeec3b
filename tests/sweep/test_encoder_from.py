"""Trials that start from the encoder of another task's trial."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from biphasic.config.sweep import SweepConfig
from biphasic.finetuning.trial import keep_encoder, run_trial, train_and_score, trial_name
from biphasic.model.encoder import load_encoder
from biphasic.storage import open_store
from biphasic.sweep.grid import build_grid, content_hash, encoder_folder, trial_configs
from biphasic.sweep.plan import describe_plan, plan_sweep
from biphasic.sweep.records import Grid, TrialRecord, read_grid, read_records, record_file, write_record
from biphasic.sweep.run import run
from biphasic.sweep.selection import encoder_trials
from helpers.small_trials import read_log
from helpers.tiny import write_tokenizer
from helpers.toy_sets import config_of, make_sets, write_encoder

LoadSweep = Callable[..., SweepConfig]
SMALL = "helpers.small_trials"
ONE = {"m": {"do": "train"}}


def read(config: SweepConfig) -> tuple[Grid, dict[str, TrialRecord]]:
    folder = open_store(config.output)
    grid = read_grid(folder)
    return grid, read_records(folder, grid.trials)


def test_order_resumption_and_records(sweep: LoadSweep, log: Path) -> None:
    """RTE comes first in the YAML and starts last, from the chosen trial of MNLI, which is trained once more."""
    models = {"m": {"do": "train"}, "same": {"do": "train"}}
    config = sweep(
        models, ("rte", "mnli"), {"rte": "mnli"}, seeds=[0, 1], cluster={"at_once": 1}, cost={"flops_per_second": 1e3}
    )
    before = plan_sweep(config, SMALL)
    again = "FLOPs, with 1 trial again for its encoder"
    assert [(line.task, line.source) for line in before.lines[:4:2]] == [("rte", "FLOPs"), ("mnli", again)]
    assert before.lines[2].device_hours == 5 * 2.0 and again in describe_plan(before)
    assert run(config, limit=3, module=SMALL) == 0
    assert read_log(log, "kept") == []
    assert run(config, limit=3, module=SMALL) == 0  # MNLI's last trial, its encoder, and a first trial of RTE
    assert run(config, module=SMALL) == 0
    grid, records = read(config)
    assert len(records) == 16
    best = encoder_trials(grid, records)["m", "rte"]
    assert best is not None
    cell = grid.trials[best]
    means = {
        lr: sum(r.results[0].validation or 0 for r in records.values() if r.cell.task == "mnli" and r.cell.lr == lr)
        for lr in grid.learning_rates
    }
    assert (cell.task, cell.seed) == ("mnli", 0) and means[cell.lr] == max(means.values())
    kept = f"mnli-m-{cell.lr:g}-0"
    assert read_log(log, "kept") == [kept]
    rte = [f"rte-m-{lr:g}-{seed}" for seed in (0, 1) for lr in (1e-5, 2e-5)]
    assert read_log(log, "begun") == [f"{name}:{kept}" for name in rte]
    assert read_log(log, "trained")[-4:] == rte
    assert encoder_folder(config.output, best).is_dir()
    for trial, record in records.items():
        expected = best if record.cell.task == "rte" else None
        assert record.about.get("encoder_from") == expected, trial
        assert ("copy_of" in record.about) == (record.cell.model == "same")
    started = len(read_log(log, "started"))
    assert run(config, module=SMALL) == 0 and len(read_log(log, "started")) == started
    after = plan_sweep(config, SMALL)
    assert [(line.left, line.device_hours) for line in after.lines] == [(0, 0)] * 4
    assert after.lines[2].source == "recorded"


def test_names_cover_what_may_be_chosen(sweep: LoadSweep) -> None:
    def names(**keys: object) -> set[str]:
        config = sweep(ONE, ("rte", "mnli"), **keys)  # pyright: ignore[reportArgumentType]
        trials = build_grid(config, trial_configs(config), import_module(SMALL)).trials
        return {name for name, cell in trials.items() if cell.task == "rte" and cell.lr == 1e-5 and cell.seed == 0}

    [alone], [chained] = names(), names(encoder_from={"rte": "mnli"})
    assert alone != chained
    assert names(encoder_from={"rte": "mnli"}) == {chained}
    # A further rate of MNLI may be chosen; a further seed chooses only without rate_seeds.
    assert names(encoder_from={"rte": "mnli"}, learning_rates=[1e-5, 2e-5, 3e-5]) != {chained}
    assert names(encoder_from={"rte": "mnli"}, seeds=[0, 1, 2]) != {chained}
    assert names(encoder_from={"rte": "mnli"}, seeds=[0, 1, 2], rate_seeds=2) == {chained}


def test_a_chain_of_tasks(sweep: LoadSweep, log: Path) -> None:
    chain = {"c": "b", "b": "a"}
    config = sweep(ONE, ("a", "b", "c"), chain, seeds=[0], learning_rates=[1e-5], cluster={"at_once": 1})
    assert run(config, module=SMALL) == 0
    assert read_log(log, "begun") == ["b-m-1e-05-0:a-m-1e-05-0", "c-m-1e-05-0:b-m-1e-05-0"]
    for trial, record in read(config)[1].items():
        if record.cell.task == "c":
            (Path(config.output) / record_file(trial)).unlink()
    assert not any("again" in line.source for line in plan_sweep(config, SMALL).lines)
    shutil.rmtree(Path(config.output) / "encoders")
    assert ["again" in line.source for line in plan_sweep(config, SMALL).lines] == [False, True, False]
    assert run(config, module=SMALL) == 0  # a's encoder is trained for b's, and b's for c
    assert read_log(log, "kept") == ["a-m-1e-05-0", "b-m-1e-05-0"] * 2
    assert read_log(log, "begun")[-1] == "c-m-1e-05-0:b-m-1e-05-0"


def test_a_changed_choice_runs_the_trials_again(sweep: LoadSweep, log: Path) -> None:
    config = sweep(ONE, ("mnli", "rte"), {"rte": "mnli"}, seeds=[0], cluster={"at_once": 1})
    assert run(config, module=SMALL) == 0
    grid, records = read(config)
    old = encoder_trials(grid, records)["m", "rte"]
    # As if this trial had failed: the other rate is chosen.
    write_record(open_store(config.output), TrialRecord(old or "", grid.trials[old or ""], "failed", error="x"))
    assert run(config, module=SMALL) == 1
    grid, records = read(config)
    new = encoder_trials(grid, records)["m", "rte"]
    assert new not in (old, None) and len(read_log(log, "kept")) == 2
    assert {record.about["encoder_from"] for record in records.values() if record.cell.task == "rte"} == {new}


def test_without_an_encoder_trials_fail(sweep: LoadSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MNLI fails, or its encoder can't be written; both can be repaired."""
    mended, space = tmp_path / "mended", tmp_path / "space"
    models = {"bad": {"do": "fail", "mended": str(mended)}, "full": {"do": "train", "lose": str(space)}}
    config = sweep(models, ("rte", "mnli"), {"rte": "mnli"}, seeds=[0], learning_rates=[1e-5])
    assert run(config, module=SMALL) == 1
    errors = {record.cell.model: record.error for record in read(config)[1].values() if record.cell.task == "rte"}
    assert errors["bad"] == "encoder_from: its task has no trial with a validation score"
    assert errors["full"] == "encoder_from: mnli full lr 1e-05 seed 0 couldn't be trained again: OSError: no space"
    assert "1 of 4 trials done, 3 failed, 0 left" in capsys.readouterr().out
    mended.touch()
    space.touch()
    assert run(config, retry_failed=True, module=SMALL) == 0
    assert {record.status for record in read(config)[1].values()} == {"done"}


def test_a_kept_encoder_is_the_fine_tuned_one(tmp_path: Path) -> None:
    """Its weights are those of the trial, its tokenizer is the model's, and it has no head."""
    write_tokenizer(tmp_path / "tokenizer")
    sets = make_sets(tmp_path, {"train": 64, "validation": 8, "test": 8})
    start = write_encoder(tmp_path / "start", tmp_path / "tokenizer")
    config = config_of("sst2", sets, start, tmp_path, max_duration="2ba", task__end_of_text=True, task__max_length=20)
    trained = train_and_score(config)[1].encoder.backbone.state_dict()
    folder = tmp_path / "out" / "encoders" / "x"
    keep_encoder(config, folder)
    kept = load_encoder(str(folder))
    for name, weight in kept.backbone.state_dict().items():
        assert torch.equal(weight, trained[name]), name
    assert not torch.equal(trained["norm.weight"], load_encoder(str(start)).backbone.state_dict()["norm.weight"])
    before = load_encoder(str(start)).text_tokenizer
    assert kept.text_tokenizer.fingerprint == before.fingerprint
    assert kept.text_tokenizer.max_length == before.max_length
    assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [5, 6]
    assert not (folder / "head.safetensors").exists()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["EuroBertModel"]
    regression = config_of("stsb", sets, folder, tmp_path, max_duration="2ba")
    assert run_trial(regression).results[0].metric == "pearson"
    assert content_hash(trial_name(regression)) != trial_name(config)
