"""What follows pretraining: which models a stage takes, and the configurations that it gives to the other jobs."""

from pathlib import Path

import pytest

from biphasic.config.load import load
from biphasic.config.study import StudyConfig
from biphasic.errors import ConfigError, UserError
from biphasic.study.plan import plan_study
from biphasic.study.run import pretrain
from biphasic.study.stages import check_stages, encoder_folder, evaluation_config, export, sweep_config
from biphasic.study.state import RunState, require_own_folders

ROOT = Path(__file__).parents[2]


def paper_study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StudyConfig:
    monkeypatch.chdir(ROOT)
    study = load("recipes/paper/study.yaml", [f"folder={folder}"])
    assert isinstance(study, StudyConfig)
    return study


def test_the_sweep_of_exported_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = paper_study(tmp_path, monkeypatch)
    with pytest.raises(UserError, match="no model of the study is exported yet"):
        sweep_config(study)
    exported = {"610m-clm-3k-mlm40-12k", "610m-clm-dec42k-mlm40-54k"}
    for name in exported:
        encoder_folder(study, name).mkdir(parents=True)
        (encoder_folder(study, name) / "biphasic.json").write_text("{}")
    sweep = sweep_config(study)
    assert sweep.models.keys() == exported
    assert sweep.models["610m-clm-3k-mlm40-12k"].path == f"{tmp_path}/610m-clm-3k-mlm40-12k/encoder"
    assert sweep.output == f"{tmp_path}/sweep" and len(sweep.tasks) == 10
    assert "610m-clm-42k" in capsys.readouterr().out.partition("not exported yet: ")[2]


def test_the_evaluation_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = paper_study(tmp_path, monkeypatch)
    config = evaluation_config(study, "1b-clm-42k")
    assert config.run_folder == tmp_path / "evaluate" / "1b-clm-42k"
    assert config.model.path == f"{tmp_path}/1b-clm-42k/encoder" and config.documents == ["full", "judged"]
    without = study.model_copy(update={"stages": study.stages.model_copy(update={"evaluate": None})})
    with pytest.raises(UserError, match=r"stages.evaluate is missing"):
        evaluation_config(without, "1b-clm-42k")


def test_names_and_folders_are_not_read_as_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = paper_study(tmp_path, monkeypatch).model_copy(update={"folder": f"{tmp_path}/study #1: größer"})
    config = evaluation_config(study, "640")
    assert config.run_name == "640" and config.output == f"{tmp_path}/study #1: größer/evaluate"
    assert config.model.path == f"{tmp_path}/study #1: größer/640/encoder"


def test_exports_of_a_bucket_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    study = load("recipes/paper/study.yaml", ["folder=s3://bucket/paper", f"output={tmp_path}"])
    assert isinstance(study, StudyConfig)
    assert encoder_folder(study, "1b-clm-42k") == tmp_path / "1b-clm-42k" / "encoder"
    encoder_folder(study, "1b-clm-42k").mkdir(parents=True)
    (encoder_folder(study, "1b-clm-42k") / "biphasic.json").write_text("{}")
    assert sweep_config(study).output == "s3://bucket/paper/sweep"
    assert study.checkpoints_of("1b-clm-42k") == "s3://bucket/paper/1b-clm-42k"


def test_a_stage_that_could_not_run_is_refused_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = paper_study(tmp_path, monkeypatch)
    check_stages(study)
    stages = study.stages.model_copy(update={"finetune": "yamls/sweep/none.yaml"})
    with pytest.raises(ConfigError, match=r"yamls/sweep/none\.yaml: can't be read"):
        plan_study(study.model_copy(update={"stages": stages}))
    missing = study.stages.model_copy(update={"evaluate": "yamls/none.yaml"})
    with pytest.raises(ConfigError, match=r"yamls/none\.yaml: can't be read"):
        pretrain(study.model_copy(update={"stages": missing}))


def test_a_damaged_manifest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = paper_study(tmp_path, monkeypatch)
    checkpoint = tmp_path / "610m-clm-42k" / "checkpoints"
    checkpoint.mkdir(parents=True)
    batches = study.stages.checkpoints["610m-clm-42k"]
    for batch in batches:
        (checkpoint / f"ba{batch}.manifest.json").write_text("{")
    states = {**dict.fromkeys(study.models, RunState()), "610m-clm-42k": RunState(frozenset(batches))}
    monkeypatch.setattr("biphasic.study.stages.read_states", lambda _: states)
    with pytest.raises(UserError, match=r"^610m-clm-42k-1000: its checkpoints can't be read \("):
        export(study)


def test_a_study_in_a_bucket_needs_local_folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = paper_study(tmp_path, monkeypatch).model_copy(update={"folder": "s3://bucket/paper", "output": str(tmp_path)})
    file = tmp_path / "610m-clm-42k" / "config.yaml"
    file.parent.mkdir()
    file.write_text("checkpoint: {folder: s3://bucket/paper/610m-clm-42k}")
    require_own_folders(study)
    file.write_text("checkpoint: {folder: s3://bucket/610m-clm-42k}")
    with pytest.raises(
        UserError, match=r"^output .*: .*/610m-clm-42k is of the run that saves to s3://bucket/610m-clm-42k: set"
    ):
        sweep_config(study)
