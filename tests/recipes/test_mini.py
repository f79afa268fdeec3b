"""The small study: its plan fills every figure, and its tasks are what their descriptions say."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from biphasic.config.convert import ConvertConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.model_names import facets_of_models
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.config.sweep import SweepConfig
from biphasic.config.tasks import TasksConfig
from biphasic.report.run import write_report
from biphasic.report.study_report import FIGURES, arrange, facet_table
from biphasic.study.plan import plan_study
from biphasic.study.run import pretrain
from biphasic.study.stages import export, scored_models, sweep_config
from helpers import tiny
from helpers.studies import count_batches, facets_of_name, fine_tune
from helpers.tiny import ROOT
from helpers.toy_sets import config_of as toy_task
from helpers.toy_sets import make_sets

sys.path.insert(0, str(ROOT / "recipes" / "paper"))
against: Any = import_module("against")

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


@pytest.fixture(scope="module")
def make_text() -> ModuleType:
    sys.path.insert(0, str(RECIPE))
    import make_text

    return make_text


def test_the_models_fill_every_figure(study: StudyConfig) -> None:
    configs = expand(study)
    models, unplaced = facets_of_models(list(scored_models(study)), configs)
    assert not unplaced
    for figure in FIGURES:
        # The study has one size.
        fewest = 2 if figure.name == "objective-by-size" else 4
        assert len(arrange(figure, facet_table(models))[0]) >= fewest, figure.name
    for name in configs:
        said = replace(facets_of_name(name), size=models[name].size)
        assert said == models[name], "the name says what the configuration does"


def test_beginnings_are_shared(study: StudyConfig) -> None:
    """CLM and MLM alone with the shorter budgets are decays of the longer runs."""
    plan, configs = plan_study(study), expand(study)
    objectives = {run.name: configs[run.name].objective for run in plan.runs}
    longest = [run for run in plan.runs if run.length == 2560]
    decays = [
        run
        for run in plan.runs
        if run.continues is None and run.length < 2560 and objectives[run.name] in [objectives[x.name] for x in longest]
    ]
    assert sorted(run.name for run in decays) == ["1m-clm-160", "1m-clm-640", "1m-mlm40-160", "1m-mlm40-640"]
    assert all(run.length - run.start <= run.length / 10 for run in decays)
    assert plan.shared.flops is not None and plan.alone.flops is not None
    assert plan.shared.flops < 0.7 * plan.alone.flops


def test_other_seeds_have_the_main_objectives(study: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model of seeds.yaml is one of study.yaml with another seed, and nothing else differs."""
    monkeypatch.setenv("MINI_SEED", "1")
    other = load(RECIPE / "seeds.yaml")
    assert isinstance(other, StudyConfig) and Path(other.folder).name == "seed1"
    first, second = expand(study), expand(other)
    assert len(second) == 9
    for name, config in second.items():
        assert config.seed == 1 and first[name].seed == 42
        # Fewer models start from its checkpoints.
        same = {"seed": 42, "output": first[name].output, "checkpoint": first[name].checkpoint}
        assert config.model_copy(update=same) == first[name], name


@pytest.mark.parametrize("seed", [42, 1])
def test_the_long_runs_share_half_of_clm(study: StudyConfig, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    if seed != 42:
        monkeypatch.setenv("MINI_SEED", str(seed))
    longer = load(RECIPE / "long.yaml")
    assert isinstance(longer, StudyConfig) and Path(longer.folder).name == f"long{seed}"
    plan, objectives = plan_study(longer), [config.objective for config in expand(study).values()]
    assert sorted((run.name, run.length - run.start) for run in plan.runs) == [
        ("1m-clm-10240", 10240), ("1m-clm-5120-mlm40-10240", 5120), ("1m-mlm40-10240", 10240)
    ]  # fmt: skip
    for name, config in expand(longer).items():
        facets = facets_of_name(name)
        assert config.max_duration.value == facets.total_steps == 4 * 2560
        assert config.seed == seed and (config.objective in objectives or facets.clm_steps == 5120)


def test_models_of_the_paper_have_one_here(study: StudyConfig) -> None:
    reference = against.read_reference(RECIPE / "paper_models.yaml")
    here = scored_models(study)
    assert set(reference.group) == {"SC", "TC", "QA", "IR"}
    for score in reference.itertuples():
        theirs, ours = facets_of_name(score.model), facets_of_name(here[score.measured_model].name)
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
    monkeypatch.setenv("MINI_SEED", "1")
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
    for name, task in sweep.tasks.items():
        config = load(task)
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


SOURCE = '''"""A module with a docstring that is long enough for a piece of text of its own."""
# A comment in two lines, which make one block of text
# because no line of code stands between them.
NAME = """
# This line is in a string and is no comment, whatever its first character says.
"""  # A comment after code is left out, because it is about this line only, and long.


def total(values):
    """Return the sum of all values, in an order that is not defined, if there is one."""
'''


def test_text_of_a_file(make_text: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    pieces = make_text.pieces(make_text.Source(tmp_path / "a.py", "package/a.py", "package"))
    assert [(piece.place, piece.text[:9]) for piece in pieces] == [
        ("", "A module "), (None, "A comment"), ("total", "Return th")
    ]  # fmt: skip
    assert pieces[1].text.splitlines()[1].startswith("because")


def test_no_held_out_text_is_trained_on(make_text: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not if a training package has a copy of it, in other letters."""
    shared = f"Return the {'shared ' * 40}text of two packages."
    files = {
        "pandas/a.py": f'def shared():\n    """{shared}"""\n\ndef own():\n    """Return {"pandas " * 40}"""\n',
        "torch/a.py": f'def copy():\n    """{shared.upper().replace("TEXT OF", "text of")}"""\n\n'
        f'def own():\n    """Return {"torch " * 40}"""\n',
    }
    sources = []
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        sources.append(make_text.Source(tmp_path / name, name, name.partition("/")[0]))
    monkeypatch.setattr(make_text, "source_files", lambda: sources[::-1])
    make_text.make_text(tmp_path / "text")
    [row] = pq.read_table(tmp_path / "text" / "pretraining.parquet").to_pylist()
    assert row["id"] == "torch/a.py" and "torch torch" in row["text"] and "SHARED" not in row["text"]
    docstrings = pq.read_table(tmp_path / "text" / "docstrings.parquet").to_pylist()
    assert sorted((row["split"], row["name"]) for row in docstrings) == [
        ("test", "own"), ("test", "shared"), ("train", "own")
    ]  # fmt: skip


PARAMETERS = """Parameters
----------
values{0} : array_like, optional
    Lists of {1} to add. More about them.
axis : int
    The axis of {1} integers.
start{0} : float
    Where {1} begins.
"""
WORDS = ("vector", "matrix", "column", "window", "kernel", "number", "letter", "folder")


def test_tasks_of_docstrings(make_tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits keep apart, no label is in its text, and answers are where they are said to be."""
    monkeypatch.setattr(make_tasks, "EVALUATED", {"validation": 16, "test": 24})
    monkeypatch.setattr(make_tasks, "_FREQUENT", 12)
    rows = [
        {
            "id": hashlib.md5(str(at).encode()).hexdigest(),
            "split": ("train", "train", "validation", "test")[at % 4],
            "name": f"function{at}",
            "text": f"Return the {WORDS[at % 8]} of {WORDS[at // 8 % 8]} number {'abcdefghij'[at // 64]} at this place\n\n"
            f"This is the {WORDS[at % 8]} that every other user of the {'klmnopqrst'[at // 64]}code may want to see.\n\n"
            + PARAMETERS.format(at, f"{WORDS[at % 8]} {WORDS[at // 8 % 8]} {'abcdefghij'[at // 64]}"),
        }
        for at in range(640)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "docstrings.parquet")
    counts = make_tasks.make_tasks(tmp_path)
    assert counts["docstrings"] == {"train": 320, "validation": 160, "test": 160}
    split_of = {row["id"]: row["split"] for row in rows}

    def read(task: str, table: str) -> list[dict[str, Any]]:
        return pq.read_table(tmp_path / "sources" / task / f"{table}.parquet").to_pylist()

    for task in ("types", "parameters", "questions"):
        for split in make_tasks.SPLITS:
            assert {split_of[row["id"].partition("-")[0]] for row in read(task, split)} == {split}, task
            assert len(read(task, split)) == counts[task][split] <= make_tasks.EVALUATED.get(split, 960)
    for row in read("parameters", "test"):
        assert [make_tasks.TAGS[label] for label in row["labels"]] == [
            *("B-NAME", "B-TYPE", "I-TYPE", *["O"] * 7, "B-NAME", "B-TYPE", *["O"] * 7, "B-NAME", "B-TYPE", *["O"] * 5)
        ]  # fmt: skip
    kinds = list(make_tasks.KINDS)
    kind_of = {"axis": "int", "start": "float", "values": "array"}
    named_a_type = {"array_like", "int", "float", "lists", "integers"}
    for row in read("types", "test"):
        name, *described = row["text"].casefold().split()
        assert kinds[row["label"]] == kind_of[name.rstrip("0123456789")]
        assert described and not named_a_type & set(described)
    for row in read("questions", "test"):
        [answer], [start] = row["answers"]["text"], row["answers"]["answer_start"]
        assert f" {row['context']}"[start:].startswith(f" {answer} ")
        assert row["question"] == make_tasks.QUESTION.format(kind=kind_of[answer.rstrip("0123456789")])
        assert not named_a_type & set(row["context"].casefold().split())
    for task in ("types", "questions"):
        key = "text" if task == "types" else "context"
        train, test = ({row[key].casefold() for row in read(task, split)} for split in ("train", "test"))
        assert not train & test, task
    corpus = {row["_id"]: row["text"] for row in read("retrieval", "corpus")}
    queries = {row["_id"]: row["text"] for row in read("retrieval", "queries")}
    for split in ("validation", "test"):
        for judged in read("retrieval", split):
            assert split_of[judged["query-id"]] == split and judged["query-id"] == judged["corpus-id"]
    assert corpus.keys() == queries.keys() and corpus
    masked = {word for name, text in queries.items() for word in WORDS if word in text and word not in corpus[name]}
    assert masked and all(" x " in text for text in corpus.values())


@pytest.mark.slow
def test_the_whole_study_shrunk(tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All models with a fortieth of the batches, killed on the way and resumed: every figure, and the planned compute."""
    text = re.sub(r"(\d+)ba\b", lambda match: f"{shrunk(int(match[1]))}ba", (RECIPE / "study.yaml").read_text())
    content = yaml.safe_load(text)
    base = tiny.content_of("x", tmp_path, dataset)
    base |= {
        "max_duration": "64ba",
        "schedule": {"warmup": "1ba", "decay": "6ba"},
        "checkpoint": {"interval": "4ba", "keep": 1},
    }
    for key in ("job", "run_name", "output", "objective"):
        del base[key]
    sets = make_sets(tmp_path, {"train": 64, "validation": 20, "test": 20})
    task = toy_task("sst2", sets, Path("none"), tmp_path, max_duration="2ba").model_dump(mode="json") | {
        "model": {"path": "none"}
    }
    sweep = {"job": "sweep", "output": "none", "models": {"none": {"path": "none"}}, "learning_rates": [1e-3, 1e-2],
             "seeds": [0, 1], "tasks": {"sst2": str(tmp_path / "task.yaml")}}  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    checkpoints = {name: [shrunk(batch) for batch in batches] for name, batches in content["stages"]["checkpoints"].items()}
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
    plan = plan_study(study)
    trained = sum(count_batches(Path(study.local_folder, name, "metrics.jsonl")) for name in study.models)
    killed = next(run for run in plan.runs if run.name == started[8])
    assert trained == plan.shared.batches + killed.length - killed.start
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
