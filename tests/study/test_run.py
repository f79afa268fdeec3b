"""Running a study on this machine, with kills between."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import dump, load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.evaluation.run import run as run_evaluation
from biphasic.model.encoder import load_encoder
from biphasic.report.run import write_report
from biphasic.study.plan import describe_plan, plan_study
from biphasic.study.run import pretrain, resolved
from biphasic.study.stages import encoder_folder, evaluate, export, scored_models, sweep_config
from biphasic.study.state import read_states
from biphasic.study.tree import study_tree
from helpers import tiny
from helpers.buckets import bucket_for
from helpers.studies import count_batches, fine_tune
from helpers.toy_sets import config_of as toy_task
from helpers.toy_sets import make_sets
from main import main as run_main

ROOT = Path(__file__).parents[2]
CLM, MLM = {"name": "clm"}, {"name": "mlm", "masking_ratio": 0.4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tiny.write_rows(folder / "train", 100, seed=1)
    tiny.write_tokenizer(folder / "tokenizer")
    return folder


def study_of(place: Path, data: Path, **keys: object) -> StudyConfig:
    """Four models: CLM, a switch in it, MLM continued from its end, and the same longer."""
    base = tiny.content_of("x", place, data)
    for key in ("job", "run_name", "output"):
        del base[key]
    base |= {
        "max_duration": "6ba",
        "schedule": {"warmup": "2ba", "decay": "2ba"},
        "checkpoint": {"interval": "3ba", "keep": 1},
    }
    base["objective"] = {"phases": [CLM]}
    more = {"continues": "clm", "objective.phases": [MLM], "schedule.warmup": "0ba", "data.start_at": "6ba"}
    content = {
        "job": "study",
        "folder": str(place / "study"),
        "base": base,
        "models": {
            "clm": {},
            "clm-mlm": {"objective.phases": [{**CLM, "until": "2ba"}, MLM]},
            "clm-mlm-8": {**more, "max_duration": "2ba"},
            "clm-mlm-10": {**more, "max_duration": "4ba"},
        },
        **keys,
    }
    path = place / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    config = load(path)
    assert isinstance(config, StudyConfig)
    return config


def train(file: Path) -> int:
    config = load(file)
    assert isinstance(config, PretrainConfig)
    tiny.train(config)
    return 0


def killed_after(batch: int, file: Path) -> int:
    """Train, and delete what a run that was killed would not have saved."""
    train(file)
    tiny.keep_checkpoints_up_to(file.parent, batch)
    return 137


@dataclass
class Trained:
    """A study that was killed in its first run, stopped after each run, and resumed."""

    study: StudyConfig
    place: Path
    started: list[str]
    """The runs that were started after the kill."""
    states: list[str]
    """The runs' states after the kill."""


def write_stages(place: Path) -> None:
    """Write a task's, a sweep's and an evaluation's YAML, and their sets."""
    sets = make_sets(place, {"train": 64, "validation": 20, "test": 20})
    task = toy_task("sst2", sets, Path("none"), place, max_duration="2ba").model_dump(mode="json") | {
        "model": {"path": "none"}
    }
    (place / "task.yaml").write_text(yaml.safe_dump(task))
    sweep = {"job": "sweep", "output": "none", "models": {"none": {"path": "none"}}, "learning_rates": [1e-3],
             "seeds": [0, 1], "tasks": {"sst2": str(place / "task.yaml")}}  # fmt: skip
    (place / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    evaluation = {"job": "evaluate", "run_name": "x", "model": {"path": "none"}, "sets": [str(sets / "msmarco")],
                  "cache": str(place / "cache"), "baselines": []}  # fmt: skip
    (place / "evaluate.yaml").write_text(yaml.safe_dump(evaluation))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trained:
    place = tmp_path_factory.mktemp("trained")
    write_stages(place)
    stages = {"checkpoints": {"clm-mlm": [1, 5]}, "finetune": "sweep.yaml", "evaluate": "evaluate.yaml"}
    study = study_of(
        place,
        data,
        stages={name: str(place / at) if isinstance(at, str) else at for name, at in stages.items()},
        merges={"mean": {"merge_of": {"clm-mlm": [2, 3], "clm": [6]}, "weights": [1, 1, 2]}},
    )
    assert pretrain(study, train=lambda file: killed_after(2, file)) == 137
    states = [run.state for run in plan_study(study).runs]
    started: list[str] = []

    def note(file: Path) -> int:
        started.append(file.parent.name)
        return train(file)

    for _ in range(4):
        assert pretrain(study, limit=1, train=note) == 0
    assert pretrain(study, train=note) == 0
    return Trained(study, place, started, states)


def test_shared_beginnings_give_the_weights_of_whole_runs(trained: Trained) -> None:
    """A study's models are those of runs trained alone, bit for bit."""
    study, place = trained.study, trained.place
    assert trained.states == ["at 2", "ready", "waits", "waits"]
    assert trained.started == ["clm", "clm-mlm", "clm-mlm-8", "clm-mlm-10"]
    assert {run.state for run in plan_study(study).runs} == {"done"}

    # The switch was trained from the shared checkpoint on.
    switched = place / "study" / "clm-mlm"
    assert len(tiny.losses(switched)) == 4
    config = expand(study)["clm-mlm"]
    own_folder = {
        "output": str(place / "alone"),
        "checkpoint": config.checkpoint.model_copy(update={"folder": None}),
    }
    alone = config.model_copy(update=own_folder)
    expected = tiny.weights(tiny.train(alone), 6)
    assert all(torch.equal(expected[name], value) for name, value in tiny.weights(switched, 6).items())
    # Continued runs begin with the final weights of the other run, a new optimizer, and new rows.
    config = load(place / "study" / "clm-mlm-10" / "run.yaml")
    assert isinstance(config, PretrainConfig) and config.data.start_at.value == 6
    assert config.model.init_from == str(place / "study" / "clm" / "checkpoints")


def test_what_was_trained_is_what_was_planned(trained: Trained) -> None:
    """The records say what the plan does, and the four batches that were trained again after the kill."""
    plan = plan_study(trained.study)
    files = [Path(trained.study.local_folder, name, "metrics.jsonl") for name in trained.study.models]
    assert sum(map(count_batches, files)) == plan.shared.batches + 4
    assert plan.alone.batches == 6 + 6 + 2 + 4 > plan.shared.batches


def test_stages_after_pretraining(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """Models and checkpoints are exported, fine-tuned, scored and drawn, each once."""
    study, place = trained.study, trained.place
    # The checkpoint at 1 is that of the run that trained the shared beginning.
    names = ["clm", "clm-mlm", "clm-mlm-1", "clm-mlm-5", "clm-mlm-8", "clm-mlm-10", "mean"]
    assert export(study, limit=1) == 0
    assert [name for name in names if (encoder_folder(study, name) / "config.json").is_file()] == ["clm"]
    assert export(study) == 0
    assert all((encoder_folder(study, name) / "config.json").is_file() for name in names)
    assert "not trained yet" not in capsys.readouterr().out
    models = scored_models(study)
    assert models["clm-mlm-1"].sources == (("clm", 1),)
    # The shared beginning's checkpoint is that of the run that trained it; 3 is kept for the mean alone.
    assert models["mean"].sources == (("clm", 2), ("clm-mlm", 3), ("clm", 6))
    merged = load_encoder(str(encoder_folder(study, "mean"))).backbone.state_dict()
    sources = [tiny.weights(place / "study" / run, batch) for run, batch in models["mean"].sources]
    for name, value in merged.items():
        parts = [weights[f"backbone.{name}"] for weights in sources]
        torch.testing.assert_close(value, parts[0] / 4 + parts[1] / 4 + parts[2] / 2, rtol=1e-6, atol=1e-7)
    for name, run, batch in (("clm-mlm-1", "clm", 1), ("clm-mlm-5", "clm-mlm", 5)):
        exported = load_encoder(str(encoder_folder(study, name))).backbone.state_dict()
        checkpoint = load_encoder(str(place / "study" / run / "checkpoints" / f"ba{batch}-rank0.pt")).backbone.state_dict()
        assert exported and all(torch.equal(value, checkpoint[key]) for key, value in exported.items())

    assert "mean" in sweep_config(study).models
    fine_tune(sweep_config(study))

    scored: list[str] = []

    def score(file: Path) -> int:
        config = load(file)
        assert isinstance(config, EvaluateConfig)
        run_evaluation(config)
        scored.append(config.run_name)
        return 0

    for _ in range(2):
        assert evaluate(study, limit=1, score=score) == 0
    assert scored == names[:2]

    write_report([study.folder])
    page = (place / "study" / "report" / "report.md").read_text()
    assert "| clm-mlm-5 |" in page and "| mean |" in page
    for figure in ("learning-curves", "continued-pretraining", "losses"):
        assert (place / "study" / "report" / f"{figure}.png").is_file(), page


def test_a_model_that_trains_on_is_exported_and_scored_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a mean whose merge has changed, and what is trained again to the same batch. Until then, stages leave out an
    export of other weights."""
    weights = {6: [1, 1], 8: [1, 3]}

    def study_to(batch: int) -> StudyConfig:
        mean = {"merge_of": {"clm": [3, 6]}, "weights": weights[batch]}
        model = {"max_duration": f"{batch}ba", "schedule.decay": "0ba", "checkpoint.keep": 3}
        stages = {"checkpoints": {"clm": [3]}, "finetune": "yamls/sweep/paper.yaml"}
        return study_of(tmp_path, data, models={"clm": model}, merges={"mean": mean}, stages=stages)

    def swept(study: StudyConfig) -> list[str]:
        return list(sweep_config(study).models)

    monkeypatch.chdir(ROOT)
    short, long = study_to(6), study_to(8)
    names = ["clm", "clm-3", "mean"]
    assert pretrain(short, train=train) == export(short) == 0
    assert swept(short) == ["clm", "clm-3", "mean"]
    before = {name: (encoder_folder(short, name) / "model.safetensors").read_bytes() for name in names}
    scores = {name: tmp_path / "study" / "evaluate" / name / "scores.json" for name in names}
    for file in scores.values():
        file.parent.mkdir(parents=True)
        file.touch()

    assert swept(long) == ["clm-3"]
    assert "not exported yet: clm, mean\n" in capsys.readouterr().out
    assert pretrain(long, train=train) == export(long) == 0
    assert swept(long) == ["clm", "clm-3", "mean"]
    after = {name: (encoder_folder(long, name) / "model.safetensors").read_bytes() for name in names}
    assert [before[name] == after[name] for name in names] == [False, True, False]
    assert [file.exists() for file in scores.values()] == [False, True, False]
    shutil.rmtree(tmp_path / "study" / "clm" / "checkpoints")
    long.base["seed"] = 6  # pyright: ignore[reportIndexIssue]
    assert pretrain(long, train=train) == export(long) == 0
    again = {name: (encoder_folder(long, name) / "model.safetensors").read_bytes() for name in names}
    assert not any(again[name] == after[name] for name in names)
    # An export that was made by hand is taken as it is.
    (encoder_folder(long, "clm") / "biphasic.json").write_text("{}")
    assert swept(short) == ["clm", "clm-3"]


@pytest.mark.parametrize(
    ("absent", "following"), [([], "finetune"), (["finetune"], "evaluate"), (["finetune", "evaluate"], "report")]
)
def test_the_next_command_is_that_of_a_stage_which_the_study_has(
    trained: Trained, absent: list[str], following: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = trained.study.stages.model_copy(update=dict.fromkeys(absent))
    file = tmp_path / "study.yaml"
    file.write_text(dump(trained.study.model_copy(update={"stages": stages})))
    assert run_main([str(file), "--stage", "export"]) == 0
    assert capsys.readouterr().out.endswith(f"next: python src/main.py {file} --stage {following}\n")


def test_a_change_is_a_warning_that_names_the_key(trained: Trained, data: Path) -> None:
    """Nothing is trained again."""
    changed = study_of(trained.place, data)
    changed.base["optimizer"]["lr"] = 1e-3  # pyright: ignore[reportIndexIssue]
    warnings = plan_study(changed).warnings
    assert len(warnings) == 4 and all(
        "optimizer.lr: 0.005 in its checkpoints, 0.001 in the study" in line for line in warnings
    )
    assert "WARNING clm: optimizer.lr: 0.005 in its checkpoints" in describe_plan(plan_study(changed), None)
    # What is allowed hides nothing else.
    changed.base["checkpoint"]["resume_overrides"] = ["optimizer.lr"]  # pyright: ignore[reportIndexIssue]
    assert not plan_study(changed).warnings
    changed.base["global_batch_size"] = 16  # pyright: ignore[reportIndexIssue]
    assert "clm: global_batch_size: 8 in its checkpoints, 16 in the study" in plan_study(changed).warnings
    del changed.base["checkpoint"]["resume_overrides"]  # pyright: ignore[reportIndexIssue]
    changed.base["global_batch_size"] = 8  # pyright: ignore[reportIndexIssue]
    started: list[Path] = []
    assert pretrain(changed, train=lambda file: started.append(file) or 1) == 0 and not started
    # A run that is longer than the study's isn't its model.
    shorter = study_of(trained.place, data)
    shorter.base["max_duration"] = "4ba"  # pyright: ignore[reportIndexIssue]
    config, state = expand(shorter)["clm"], read_states(shorter)["clm"]
    assert not state.is_done(config) and state.trained > 4


def test_a_run_starts_above_a_parent_that_kept_no_checkpoint_for_it(tmp_path: Path, data: Path) -> None:
    """A model that is added when its parent is trained already: it starts from what there is."""
    study = study_of(tmp_path, data)
    tree, configs = study_tree(expand(study), study.continues), expand(study)
    assert tree["clm-mlm"].parent == "clm" and tree["clm-mlm"].start == 2
    tiny.train(configs["clm"])  # without keep_at
    for batch in (3, 4):
        assert (tmp_path / "study" / "clm" / "checkpoints" / f"ba{batch}.json").exists() == (batch == 4)
    started: list[PretrainConfig] = []

    def note(file: Path) -> int:
        config = load(file)
        assert isinstance(config, PretrainConfig)
        started.append(config)
        return 1

    assert pretrain(study, train=note) == 1
    assert started[0].run_name == "clm-mlm" and started[0].start_from is None
    kept = resolved(study, tree["clm"], configs["clm"], None).checkpoint.keep_at
    assert [str(time) for time in kept] == ["2ba"]


@pytest.mark.slow
def test_the_command_in_a_bucket_stopped_and_resumed(tmp_path: Path, data: Path, s3: Path) -> None:
    """With Composer's launcher: a signal to the study lets its run save, and the same command finishes everything."""
    address = f"s3://{bucket_for(s3, 'study')}/tiny"
    study = study_of(tmp_path, data, folder=address, output=str(tmp_path / "runs"))
    longer = "base={max_duration: 400ba, checkpoint: {interval: 100ba}}"
    command = [sys.executable, "src/main.py", str(tmp_path / "study.yaml"), longer]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    first = subprocess.Popen(command, cwd=ROOT, env=environment)
    tiny.wait_for_batch(tmp_path / "runs" / "clm", 20, first)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 75
    saved = read_states(study)["clm"].trained
    assert 20 <= saved < 400
    assert subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    assert len(tiny.losses(tmp_path / "runs" / "clm")) == 400
    assert [read_states(study)[name].trained for name in study.models] == [400, 400, 2, 4]
    plan = subprocess.run([*command, "--plan"], cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert plan.stdout.count(" done") == 4 and "WARNING" not in plan.stdout
