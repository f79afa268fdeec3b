"""The last line of each command: what it names can be run, with the folders that it names."""

import shlex
from pathlib import Path
from typing import Any

import pytest

import main as job
from biphasic.commands import main
from biphasic.commands.next_step import after_conversion, after_run, after_tasks
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.tasks import TasksConfig
from helpers.texts import sentences, write_parquet, write_tokenizer
from helpers.tiny import ROOT


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def load_line(line: str) -> Any:
    """Load the YAML of a printed command."""
    words = shlex.split(line.removeprefix("next: "))
    assert words[:2] == ["composer", "src/main.py"]
    return load(words[2], [word for word in words[3:] if not word.startswith("--")])


def test_convert_and_verify_name_the_pretraining_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "text.parquet", sentences(60))
    tokenizer, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "my text" / "mine"
    keys = [f"source.paths=[{tmp_path / 'text.parquet'}]", f"tokenizer={tokenizer}", f"output={out}", "id_column=id"]
    keys += ["sequence_length=64", "validation_fraction=0.2", "cluster.workers=1"]
    assert main(["convert", "yamls/data/own_text.yaml", *keys]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    config = load_line(line)
    assert isinstance(config, PretrainConfig)
    assert (config.run_name, config.data.folder, config.data.sequence_length) == ("mine", str(out), 64)
    assert (config.model.vocab_size, config.output, config.tokenizer) == (300, "runs", str(out / "tokenizer"))
    assert line.startswith("next: composer src/main.py yamls/quickstart.yaml ")
    assert main(["verify", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("da ta", "da-ta"),
        ("out/Köln (1)/", "K-ln-1"),
        (".", ROOT.name),
        ("日本", "mine"),
        ("s3://bucket/.web", "web"),
        ("2024", "2024"),
        ("1e5", "1e5"),
    ],
)
def test_a_run_name_from_any_folder_s_name(output: str, name: str) -> None:
    record = {"splits": {"train": {"tokens": 10**5}}, "sequence_length": 64, "tokenizer": {"vocab_size": 300}}
    config = load_line(after_conversion(output, record))
    assert (config.run_name, config.data.folder) == (name, output.rstrip("/"))


def test_without_a_validation_split() -> None:
    for tokens, validation in ((10**9, {}), (10**9, {"validation": {"rows": 0}}), (10**5, {})):
        splits = {"train": {"tokens": tokens}, **validation}
        record = {"splits": splits, "sequence_length": 2048, "tokenizer": {"vocab_size": 128_003}}
        assert load_line(after_conversion("out", record)).data.validation is None


def test_the_paper_s_tokenizer_needs_no_other_vocabulary() -> None:
    splits = {"train": {"tokens": 10**9}, "validation": {"rows": 1}}
    record = {"splits": splits, "sequence_length": 2048, "tokenizer": {"vocab_size": 128_003}}
    line = after_conversion("s3://bucket/web/", record)
    expected = "yamls/210m_biphasic.yaml run_name=web data.folder=s3://bucket/web data.sequence_length=2048"
    assert line == f"next: composer src/main.py {expected}"


@pytest.mark.parametrize(
    ("file", "names", "task", "data"),
    [
        ("tasks", ["mnli"], "mnli", "data/tasks/mnli"),
        ("tasks", ["nq", "mldr", "squad"], "squad", "data/tasks/squad"),
        ("own_retrieval", ["mine"], "mine", "data/tasks/mine"),
    ],
)
def test_tasks_name_the_fine_tuning(file: str, names: list[str], task: str, data: str) -> None:
    config = load(f"yamls/data/{file}.yaml")
    assert isinstance(config, TasksConfig)
    finetune = load_line(after_tasks(config, names))
    assert isinstance(finetune, FinetuneConfig)
    assert (finetune.task.name, finetune.task.data, finetune.model.path) == (task, data, "ENCODER")
    other = load_line(after_tasks(config.model_copy(update={"output": "s3://bucket"}), names))
    assert other.task.data == f"s3://bucket/{task}"


def test_a_retrieval_set_of_one_s_own_is_scored_on_itself() -> None:
    config = load("yamls/data/own_retrieval.yaml")
    assert isinstance(config, TasksConfig)
    other = config.model_copy(update={"tasks": {"scifact": config.tasks["mine"]}})
    finetune = load_line(after_tasks(other, ["scifact"]))
    assert isinstance(finetune, FinetuneConfig)
    assert finetune.task.retrieval_sets == {"scifact": "data/tasks/scifact"}
    assert finetune.task.name == "scifact"


@pytest.mark.parametrize("kind", ["classification", "regression", "multi_label"])
def test_pairs_of_one_s_own_are_read_with_both_texts(kind: str) -> None:
    about = {"kind": kind, "license": "none", "source": {"files": {"train": ["a.jsonl"]}}, "text_column": "a"}
    sets = {"single": about, "pair": {**about, "text_pair_column": "b"}}
    config = TasksConfig.model_validate({"job": "tasks", "output": "out", "tasks": sets})
    assert load_line(after_tasks(config, ["pair"])).task.text == "{text} {text_pair}"
    assert load_line(after_tasks(config, ["single"])).task.text == "{text}"


def test_tasks_without_training_data() -> None:
    config = load("yamls/data/tasks.yaml")
    assert isinstance(config, TasksConfig)
    assert load_line(after_tasks(config, ["nq"])).sets == ["data/tasks/nq"]


def test_runs_name_what_follows() -> None:
    pretrain = load("yamls/quickstart.yaml")
    folder = "runs/quickstart/clm-mlm"
    assert after_run(pretrain) == f"next: biphasic export {folder}/checkpoints {folder}/encoder"
    retrieval = load("yamls/finetune/own_retrieval.yaml")
    evaluation = load_line(after_run(retrieval))
    assert (evaluation.model.path, evaluation.sets) == ("runs/own-retrieval/model", ["data/tasks/mine"])
    assert after_run(load("yamls/finetune/sst2.yaml")) == "next: biphasic predict runs/sst2/model FILE.jsonl"
    assert after_run(load("yamls/evaluate/quick.yaml")) == "scores: runs/evaluate/quick/scores.md"
    assert after_run(load("yamls/sweep/paper.yaml")) == "tables: runs/sweep/report"


def test_the_next_command_keeps_the_overrides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them, it would be about other results."""
    monkeypatch.setattr("biphasic.sweep.run.run", lambda config, limit, retry_failed: 1)
    monkeypatch.setattr("biphasic.report.run.write_report", lambda folders, report: None)
    assert job.main(["yamls/sweep/paper.yaml", "output=runs/my sweep", "seeds=[0]"]) == 1
    next_line = capsys.readouterr().out.splitlines()[-1]
    assert next_line == "next: python src/main.py yamls/sweep/paper.yaml 'output=runs/my sweep' 'seeds=[0]' --retry-failed"


@pytest.mark.parametrize("option", [["--json"], ["--ranks", "8"]])
def test_options_of_plans_start_no_job(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["yamls/quickstart.yaml", *option]) == 2
    assert f"{option[0]} belongs to --plan" in capsys.readouterr().err


def test_a_plan_shows_the_errors_of_its_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(checked: object) -> None:
        raise PermissionError(13, "Permission denied", "/data/a")

    monkeypatch.setattr("biphasic.config.conversion_checks.check_rows", refuse)
    monkeypatch.setattr("biphasic.checkpointing.start_rules.ResumeGuard.plan_start", refuse)
    assert job.main(["yamls/quickstart.yaml", "--plan"]) == 2
    printed = capsys.readouterr().out
    for name in ("rows", "start"):
        assert f"PROBLEM        {name}: can't be checked ([Errno 13] Permission denied: '/data/a')" in printed


def test_overrides_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main([]) == 2
    assert capsys.readouterr().err.endswith("error: the following arguments are required: FILE.yaml\n")
