"""The plan of an evaluation."""

from pathlib import Path

import pytest

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import load
from biphasic.config.plan import JobPlan
from biphasic.errors import ConfigError
from biphasic.evaluation.plan import plan_evaluation
from helpers.tiny import ROOT


def plan_of(name: str, *overrides: str) -> JobPlan:
    config = load(ROOT / "yamls" / "evaluate" / f"{name}.yaml", list(overrides))
    assert isinstance(config, EvaluateConfig)
    return plan_evaluation(config)


def test_tasks_by_name(tmp_path: Path) -> None:
    job_plan = plan_of("retrieval", f"model.path={tmp_path}")
    assert not job_plan.missing and not job_plan.problems
    assert job_plan.lines["tasks"] == "3: MSMARCO, NQ, MultiLongDocRetrieval"
    assert job_plan.lines["documents"] == "complete corpora and judged documents"
    [problem] = plan_of("quick", f"model.path={tmp_path}", "benchmarks=[]", "tasks=[MSMARKO]").problems
    assert problem.startswith("tasks: mteb has no task of this name: ")


def test_a_task_that_would_not_be_scored_is_refused(tmp_path: Path) -> None:
    changes = ("benchmarks=[]", "tasks=[SciFact,STSBenchmark]", f"model.path={tmp_path}")
    [problem] = plan_of("quick", *changes, "documents=[judged]").problems
    assert problem.startswith("documents: expected full too, because STSBenchmark would not be scored")
    assert not plan_of("quick", *changes, "documents=[full,judged]").problems


def test_a_task_without_texts_is_refused(tmp_path: Path) -> None:
    [problem] = plan_of("quick", "benchmarks=[]", "tasks=[CIFAR10]", f"model.path={tmp_path}").problems
    assert problem.startswith("tasks: CIFAR10 is not of text alone (image")
    [problem] = plan_of("quick", "benchmarks=[]", "tasks=[Flickr30kT2IRetrieval]", f"model.path={tmp_path}").problems
    assert problem.startswith("tasks: Flickr30kT2IRetrieval is not of text alone (image")


def test_a_set_is_named_by_its_folder_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one/qrels", "two", "my set"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    for path, name in ((".", "one"), ("./", "one"), ("qrels/..", "one"), ("../two/", "two"), ("../my set", "my set")):
        assert (
            plan_of("own", f"sets=[{path}]", f"model.path={tmp_path}", f"splits={{{name}: [test]}}").lines["tasks"]
            == f"1: {name}"
        )
    (tmp_path / "link").symlink_to(tmp_path / "two")
    assert plan_of("own", "sets=[../link]", f"model.path={tmp_path}").lines["tasks"] == "1: link"
    with pytest.raises(ConfigError, match="two folders with the same name, one: results are stored by it"):
        plan_of("own", "sets=[., ../two/one]")


def test_what_is_missing() -> None:
    assert plan_of("own", "sets=[runs/nothing]").missing == [
        "model.path runs/encoder: there is no such folder",
        "sets runs/nothing: there is no such folder",
    ]
