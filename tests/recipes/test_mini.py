"""The small study: its plan fills every figure, and its tasks are what their descriptions say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import tiny
from biphasic.config.convert import ConvertConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.config.study_models import expand
from biphasic.config.sweep import SweepConfig
from biphasic.config.tasks import TasksConfig
from biphasic.report.reference import in_place_of, read_reference
from biphasic.report.run import write_report
from biphasic.report.study_layouts import FIGURES
from biphasic.report.study_models import facets_of_models, facets_of_name
from biphasic.study.compute import trained_compute
from biphasic.study.plan import plan_study
from biphasic.study.run import pretrain
from biphasic.study.stages import export, scored_models, sweep_config
from studies import fine_tune
from tiny import ROOT
from toy_sets import config_of as toy_task
from toy_sets import make_sets

RECIPE = ROOT / "recipes" / "mini"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StudyConfig:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MINI", str(tmp_path))
    config = load(RECIPE / "study.yaml")
    assert isinstance(config, StudyConfig)
    return config


@pytest.fixture(scope="module")
def make_tasks() -> ModuleType:
    sys.path.insert(0, str(RECIPE))  # as when the script runs
    import make_tasks

    return make_tasks


def test_the_models_fill_every_figure(study: StudyConfig) -> None:
    configs = expand(study)
    models, unplaced = facets_of_models(list(scored_models(study)), configs)
    assert not unplaced
    for figure in FIGURES:
        assert len(figure.arrange(models).placements) >= 4, figure.name
    for name in configs:
        assert facets_of_name(name) == models[name], "the name says what the configuration does"


def test_beginnings_are_shared(study: StudyConfig) -> None:
    """CLM and MLM alone with the shorter budget are decays of the longer runs."""
    plan, configs = plan_study(study), expand(study)
    alone = [run for run in plan.runs if run.continues is None and len(configs[run.name].objective.phases) == 1]
    shorter = [run for run in alone if run.length < max(run.length for run in plan.runs)]
    assert len(shorter) == 3 and all(run.own_batches <= run.length / 10 for run in shorter)
    assert plan.shared.flops is not None and plan.alone.flops is not None
    assert plan.shared.flops < 0.7 * plan.alone.flops


def test_models_of_the_paper_have_one_here(study: StudyConfig) -> None:
    reference = in_place_of(
        read_reference(str(ROOT / "recipes/paper/reference.csv")), str(RECIPE / "paper_models.yaml")
    )
    here = scored_models(study)
    assert {score.group for score in reference} == {"SC", "TC", "QA", "IR"}
    for score in reference:
        theirs, ours = facets_of_name(score.model), facets_of_name(here[score.measured_as].name)
        assert theirs.objective == ours.objective and theirs.masking_ratio == ours.masking_ratio
        assert (theirs.continued_from is None) == (ours.continued_from is None)
        assert theirs.clm_steps / theirs.total_steps == pytest.approx(ours.clm_steps / ours.total_steps, abs=0.03)


def test_the_commands_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "biphasic"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >>{tmp_path}/log; echo >>{tmp_path}/log\n')
        (programs / name).chmod(0o755)
    folder = tmp_path / "mini"
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
    run = subprocess.run([RECIPE / "run.sh", str(folder)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    calls = [shlex.split(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len((folder / "times.txt").read_text().splitlines()) == len(calls)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MINI", str(folder))
    configs = {}
    for call in calls:
        assert call[0] == "biphasic" or (ROOT / call[1]).is_file()
        for part in call:
            if part.endswith(".yaml") and not part.endswith("paper_models.yaml"):
                configs[Path(part).name] = load(ROOT / part)
    conversion, tasks, study = configs["data.yaml"], configs["tasks.yaml"], configs["study.yaml"]
    assert isinstance(conversion, ConvertConfig) and isinstance(tasks, TasksConfig) and isinstance(study, StudyConfig)
    for config in expand(study).values():
        assert config.data.train is not None and config.data.train.local == f"{conversion.output}/train"
        assert config.data.sequence_length == conversion.sequence_length
    assert study.folder == f"{folder}/study"
    sweep = load(study.stages.finetune or "")
    assert isinstance(sweep, SweepConfig) and sweep.tasks.keys() == tasks.tasks.keys()
    for name, file in sweep.tasks.items():
        config = load(file)
        assert isinstance(config, FinetuneConfig)
        assert (config.task.data, config.task.kind) == (f"{tasks.output}/{name}", tasks.tasks[name].kind)


NUMPY = """Return the sum of squares of an array.

With numpy and scikit-learn this is a sum of squares of all elements, along an axis if there is one.

Parameters
----------
values : array_like, optional
    The elements to add. More about them.
axis : int
    Along which axis.

Returns
-------
total : float
    The sum.
"""
GOOGLE = """Return the product of all elements.

Args:
    values (list of float): The factors,
        in any order.
    start (`int`): Where to begin.

Returns:
    float: the product.
"""


def test_parameters_of_docstrings(make_tasks: ModuleType) -> None:
    found = [(p.name, p.type, p.description) for p in make_tasks.parameters(NUMPY)]
    assert found == [
        ("values", ("array_like", "optional"), ("The", "elements", "to", "add")),
        ("axis", ("int",), ("Along", "which", "axis")),
    ]
    found = [(p.name, p.type, p.description) for p in make_tasks.parameters(GOOGLE)]
    assert found == [
        ("values", ("list", "of", "float"), ("The", "factors", "in", "any", "order")),
        ("start", ("int",), ("Where", "to", "begin")),
    ]


def test_tasks_of_docstrings(make_tasks: ModuleType, tmp_path: Path) -> None:
    """No file is in two splits, no label is in its text, and no held-out text is pretrained on."""
    packages = make_tasks.PACKAGES
    rows = [
        {
            "id": f"{at:032x}",
            "dump": f"{packages[at % len(packages)]} 1.0",
            "file_path": f"{packages[at % len(packages)]}/file{at // 16}.py::function{at}",
            "text": NUMPY.replace("values", f"values{at}") + f"See {packages[at % len(packages)]}.module and np.sum.",
        }
        for at in range(1600)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "documents.parquet")
    pairs = [{"id": row["id"], "query": f"q {row['id']}", "positive": f"d {row['id']}"} for row in rows]
    for name, part in (("train", pairs[:1000]), ("test", pairs[1000:])):
        (tmp_path / "pairs").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "pairs" / f"{name}.parquet")
    counts = make_tasks.make_tasks(tmp_path)
    assert sum(counts["text"].values()) == 1600 and min(counts["text"].values()) > 50

    def read(task: str, table: str) -> list[dict[str, object]]:
        return pq.read_table(tmp_path / "sources" / task / f"{table}.parquet").to_pylist()

    file_of = {row["id"]: row["file_path"].split("::")[0] for row in rows}
    files: dict[str, set[str]] = {split: set() for split in make_tasks.SPLITS}
    for task in ("package", "parameters", "questions"):
        for split in make_tasks.SPLITS:
            files[split] |= {file_of[row["id"]] for row in read(task, split)}
    files["train"] |= {file_of[row["id"]] for row in pq.read_table(tmp_path / "pretraining.parquet").to_pylist()}
    files["train"] |= {file_of[str(row["query"])[2:]] for row in read("retrieval", "train")}
    for split in ("validation", "test"):
        files[split] |= {file_of[row["query-id"]] for row in read("retrieval", split)}
    assert not files["train"] & files["test"] and not files["train"] & files["validation"]
    assert not files["validation"] & files["test"]

    labels = [row["label"] for row in read("package", "train")]
    assert {labels.count(label) for label in range(len(packages))} == {len(labels) // len(packages)}
    for row in read("package", "train"):
        assert not any(name in str(row["text"]).lower() for name in (*packages, "numpy", "np", "scikit"))
    for row in read("parameters", "test"):
        assert [make_tasks.TAGS[label] for label in row["labels"]] == [
            *("B-NAME", "B-TYPE", "I-TYPE", "O", "O", "O", "O", "B-NAME", "B-TYPE", "O", "O", "O")
        ]  # fmt: skip
    for row in read("questions", "test"):
        [text], [start] = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start:].startswith(text)
        assert (
            row["context"][:start].split()[-3 if str(row["question"]).startswith("values") else -2] == row["question"]
        )


@pytest.mark.slow
def test_the_whole_study_shrunk(tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All models with a fortieth of the batches, killed on the way and resumed: every figure, and the planned compute."""
    text = re.sub(r"(\d+)ba\b", lambda match: f"{shrunk(int(match[1]))}ba", (RECIPE / "study.yaml").read_text())
    content = yaml.safe_load(text)
    base = tiny.content_of("x", tmp_path, dataset)
    base |= {
        "max_duration": "12ba",
        "schedule": {"warmup": "1ba", "decay": "2ba"},
        "checkpoint": {"interval": "4ba", "keep": 1},
    }
    for key in ("job", "run_name", "output", "objective"):
        del base[key]
    for name, keys in content["models"].items():
        if name.startswith("500k"):
            keys["model"] = {"hidden_size": 16, "intermediate_size": 24}
    sets = make_sets(tmp_path, {"train": 64, "validation": 20, "test": 20})
    task = toy_task("sst2", sets, Path("none"), tmp_path, max_duration="2ba").model_dump(mode="json") | {
        "model": {"path": "none"}
    }
    sweep = {"job": "sweep", "output": "none", "models": {"none": {"path": "none"}}, "learning_rates": [1e-3, 1e-2],
             "seeds": [0, 1], "tasks": {"sst2": str(tmp_path / "task.yaml")}}  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    checkpoints = {
        name: [shrunk(batch) for batch in batches] for name, batches in content["stages"]["checkpoints"].items()
    }
    content |= {"folder": str(tmp_path / "study"), "base": base, "executor": {"kind": "local"}}
    content["stages"] = {"finetune": str(tmp_path / "sweep.yaml"), "checkpoints": checkpoints}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    study = load(tmp_path / "study.yaml")
    assert isinstance(study, StudyConfig)

    started: list[str] = []

    def train(file: Path) -> int:
        config = load(file)
        assert isinstance(config, PretrainConfig)
        tiny.train(config)
        started.append(config.run_name)
        if len(started) == 9:  # killed in a run that starts from another
            tiny.keep_checkpoints_up_to(file.parent, batch_of_start(study, config.run_name))
            return 137
        return 0

    assert pretrain(study, train=train) == 137
    assert pretrain(study, train=train) == 0
    assert len(started) == len(study.models) + 1
    plan, compute = plan_study(study), trained_compute(study)
    killed = next(run for run in plan.runs if run.name == started[8])
    assert compute.batches == plan.shared.batches + killed.own_batches
    assert export(study) == 0
    fine_tune(sweep_config(study))
    write_report([study.folder])
    made = {file.name for file in (tmp_path / "study" / "report").iterdir()}
    assert made >= {f"{figure.name}.{kind}" for figure in FIGURES for kind in ("png", "csv")} | {"losses.png"}
    assert "## Left out\n\nNothing." in capsys.readouterr().out


def shrunk(batches: int) -> int:
    return max(round(batches / 40), 1) if batches else 0


def batch_of_start(study: StudyConfig, name: str) -> int:
    return next(run.start for run in plan_study(study).runs if run.name == name)


def test_every_yaml_is_used() -> None:
    """No file of the recipe is left over."""
    texts = "".join(file.read_text() for file in RECIPE.iterdir() if file.suffix in (".sh", ".yaml", ".md"))
    for file in RECIPE.glob("*.yaml"):
        assert file.name in texts, file.name
    assert yaml.safe_load((RECIPE / "paper_models.yaml").read_text())
