"""The paper's study: its 38 models, and what they cost by hand."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from biphasic.config.history import history_of
from biphasic.config.load import dump, load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.errors import ConfigError, UserError
from biphasic.model.architecture import PRESETS
from biphasic.study import tree
from biphasic.study.plan import StudyPlan, describe_plan, plan_study, retained_batches
from biphasic.study.run import resolved
from biphasic.study.tree import StudyRun, study_tree
from biphasic.timeline import decay_start
from helpers.cpu_time import run_measured

ROOT = Path(__file__).parents[2]
PAPER = "recipes/paper/study.yaml"
ROW, ROWS = 2048, 1152  # the paper's tokens in a row, and rows in a batch


@pytest.fixture(scope="module", autouse=True)
def _at_the_root() -> Iterator[None]:
    with chdir(ROOT):  # paths in a study are relative to it
        yield


@pytest.fixture(scope="module")
def study() -> StudyConfig:
    return study_of(ROOT / PAPER)


@pytest.fixture(scope="module")
def configs(study: StudyConfig) -> dict[str, PretrainConfig]:
    return expand(study)


@pytest.fixture(scope="module")
def plan(study: StudyConfig) -> StudyPlan:
    return plan_study(study)


def study_of(path: Path, *overrides: str) -> StudyConfig:
    config = load(path, list(overrides))
    assert isinstance(config, StudyConfig)
    return config


def test_the_38_models(study: StudyConfig, configs: dict[str, PretrainConfig]) -> None:
    assert len(configs) == 38
    # The 50 folders of the authors' published scores.
    splits = {12: (3, 6, 9), 22: (5, 11, 17), 42: (10, 21, 32)}
    published = {f"610m-clm-{first}k-mlm40-{total}k" for total, firsts in splits.items() for first in firsts}
    published |= {"610m-mlm40-12k", "610m-clm-12k", "610m-mlm40-22k", "610m-clm-22k"}
    published |= {f"610m-clm-40k-mlm{percent}-42k" for percent in (20, 30, 40, 50)}
    assert len(published) == 17
    objectives = ("clm", "mlm20", "mlm30", "mlm40", "mlm50")
    published |= {f"{size}-{objective}-42k" for size in ("210m", "610m", "1b") for objective in objectives}
    published |= {f"610m-{start}-dec42k-mlm40-{total}k" for start in ("clm", "mlm40") for total in (44, 54, 64)}
    assert set(configs) == published
    curve = [1000, 2000, 5000, 10000, 20000, 40000]
    assert study.stages.checkpoints == {"610m-clm-42k": curve, "610m-mlm40-42k": curve}


def test_names_say_what_the_models_are(configs: dict[str, PretrainConfig]) -> None:
    for name, config in configs.items():
        size, *parts = name.split("-")
        steps = {part: int(part.removeprefix("dec")[:-1]) * 1000 for part in parts if part.removeprefix("dec")[0].isdigit()}
        objectives = [part for part in parts if part[:3] in ("clm", "mlm")]
        phases = config.objective.phases
        if "dec" in name:
            steps = dict.fromkeys(["total"], steps[parts[-1]] - 42_000)
            objectives = objectives[1:]
            assert config.model.init_from == f"runs/paper/{size}-{parts[0]}-42k/checkpoints"
        else:
            assert config.model.preset == size
        assert [phase.name for phase in phases] == [objective[:3] for objective in objectives]
        assert [phase.until.value for phase in phases if phase.until] == list(steps.values())[:-1]
        assert config.max_duration.value == list(steps.values())[-1]
        assert [getattr(phase, "masking_ratio", None) for phase in phases] == [
            int(objective[3:]) / 100 if objective[3:] else None for objective in objectives
        ]
        # The decay of 2,000, which begins when all switches are over.
        assert decay_start(config.schedule, config.max_duration).value == config.max_duration.value - 2000
        assert config.output == "runs/paper" and config.checkpoint_destination == f"runs/paper/{name}/checkpoints"


def test_totals_by_hand(plan: StudyPlan) -> None:
    """Batches by the sums below; FLOPs by the formula of 6 x parameters x tokens, with attention and the head added."""
    base = {"clm": 42, "mlm20": 42, "mlm30": 42, "mlm40": 42, "mlm50": 42}
    # (CLM, MLM) thousands of steps, of which the CLM ones are shared with the CLM model.
    biphasic = {"mlm40": [9, 6, 3, 17, 11, 5, 32, 21, 10, 2], "mlm20": [2], "mlm30": [2], "mlm50": [2]}
    endpoints = {"clm": [2, 2], "mlm40": [2, 2]}  # decays alone
    continued = 2 * (20 + 2 + 2 + 2)  # the constant part once, three decays, from two models
    thousands = {size: dict(base) for size in PRESETS}
    for objective, steps in (*biphasic.items(), *endpoints.items()):
        thousands["610m"][objective] += sum(steps)
    thousands["610m"]["mlm40"] += continued
    total = sum(sum(steps.values()) for steps in thousands.values())
    assert total == 812
    assert plan.shared.batches == total * 1000
    assert plan.shared.tokens == total * 1000 * ROWS * ROW
    assert plan.alone.batches == 1000 * (15 * 42 + 5 * 12 + 5 * 22 + 7 * 42 + 2 * (2 + 12 + 22)) == 1_166_000

    def flops_of_a_row(size: str, objective: str) -> float:
        shape = PRESETS[size]
        matrices = shape.layers * (
            2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads) + 3 * shape.hidden * shape.ffn
        )
        share = 1.0 if objective == "clm" else int(objective[3:]) / 100
        pairs = ROW * (ROW + 1) / 2 if objective == "clm" else ROW * ROW
        attention = 12 * shape.layers * shape.heads * shape.head_dim * pairs
        return 6 * ROW * (matrices + share * shape.hidden * shape.vocab_size) + attention

    flops = sum(
        1000 * count * ROWS * flops_of_a_row(size, objective)
        for size, steps in thousands.items()
        for objective, count in steps.items()
    )
    assert plan.shared.flops == pytest.approx(flops, rel=1e-9)
    hours = flops / (0.4 * 9.89e14) / 3600
    assert plan.shared.hours == pytest.approx(hours) and plan.shared.dollars == pytest.approx(2.5 * hours)
    assert plan.alone.flops is not None and plan.alone.flops > plan.shared.flops


def test_where_the_papers_runs_start(plan: StudyPlan) -> None:
    runs = {run.name: run for run in plan.runs}
    assert runs["610m-clm-42k"].kept == (
        3000, 5000, 6000, 9000, 10000, 11000, 17000, 20000, 21000, 32000, 40000,
    )  # fmt: skip
    assert runs["610m-mlm40-42k"].kept == (10000, 20000)
    for name, run in runs.items():
        parts = name.split("-")
        if "dec42k" in name:
            assert run.continues == "-".join(parts[:2]) + "-42k"
        elif len(parts) == 5:
            assert (run.parent, run.start) == (f"{parts[0]}-clm-42k", int(parts[2][:-1]) * 1000)
        elif parts[2] != "42k":
            assert (run.parent, run.start) == (f"610m-{parts[1]}-42k", int(parts[2][:-1]) * 1000 - 2000)
        else:
            assert run.parent is None
    long, middle = (runs[f"610m-clm-dec42k-mlm40-{end}k"] for end in (64, 54))
    assert (long.parent, long.start, middle.kept) == (middle.name, 10_000, (10_000,))


def test_storage_by_hand(study: StudyConfig, configs: dict[str, PretrainConfig], plan: StudyPlan) -> None:
    tree = study_tree(configs, {})
    clm = configs["610m-clm-42k"]
    curve, decay, newest = {1000, 2000, 5000, 10000, 20000, 40000}, {40000}, {41000, 42000}
    starts = {3000, 5000, 6000, 9000, 10000, 11000, 17000, 20000, 21000, 32000, 40000}
    assert set(retained_batches(clm, tree["610m-clm-42k"])) == curve | decay | starts | newest
    # Nothing before its own first batch; the switch is the parent's.
    assert retained_batches(configs["610m-clm-21k-mlm40-42k"], tree["610m-clm-21k-mlm40-42k"]) == [40000, 41000, 42000]
    all_kept = clm.model_copy(update={"checkpoint": clm.checkpoint.model_copy(update={"keep": -1})})
    assert retained_batches(all_kept, StudyRun("x", 42_000)) == list(range(1000, 42_001, 1000))
    [run] = [run for run in plan.runs if run.name == "610m-clm-42k"]
    assert run.bytes == run.checkpoints * 12 * 755_625_600
    assert plan.bytes == sum(run.bytes or 0 for run in plan.runs)


def test_a_resolved_run_keeps_what_others_start_from(study: StudyConfig, configs: dict[str, PretrainConfig]) -> None:
    tree = study_tree(configs, {})
    config = resolved(study, tree["1b-clm-42k"], configs["1b-clm-42k"], None)
    assert [str(time) for time in config.checkpoint.keep_at] == [
        "1000ba",
        "2000ba",
        "5000ba",
        "10000ba",
        "20000ba",
        "40000ba",
    ]
    config = resolved(study, tree["610m-clm-42k"], configs["610m-clm-42k"], None)
    assert {int(time.value) for time in config.checkpoint.keep_at} >= {3000, 32000}


def test_a_history_is_made_once_for_each_model(configs: dict[str, PretrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of the pairs."""
    made = []
    monkeypatch.setattr(tree, "history_of", lambda config: made.append(config.run_name) or history_of(config))
    study_tree(configs, {})
    assert made == list(configs) and len(made) == 38


def test_the_plan_is_fast_and_needs_neither_torch_nor_a_network() -> None:
    code = (
        "import socket, sys; sys.path.insert(0, 'src')\nimport main\n"
        "def refuse(*_): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        f"assert main.main(['{PAPER}', '--plan', '--json']) == 0\n"
        "assert not {'torch', 'composer', 'streaming', 'transformers', 'matplotlib', 'boto3'} & set(sys.modules)\n"
    )
    run, seconds = run_measured([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["runs"]) == 38
    assert seconds < 5


def test_a_resolved_yaml_is_the_run_itself(configs: dict[str, PretrainConfig], tmp_path: Path) -> None:
    """What a machine without the study's folder gets, for a bucket with new data places, of which one has a space."""
    study = study_of(ROOT / PAPER, "folder=s3://bucket/paper", 'base={"data.folder": s3://bucket/my data}')
    resolved_file = tmp_path / "run.yaml"
    for name in ("610m-clm-42k", "610m-clm-40k-mlm20-42k", "610m-clm-dec42k-mlm40-54k"):
        config = expand(study)[name]
        assert config.checkpoint_destination == f"s3://bucket/paper/{name}"
        resolved_file.write_text(dump(config))
        assert load(resolved_file) == config


def test_merged_models_are_in_the_plan() -> None:
    """Their checkpoints are kept by the runs that train these batches, and they train nothing."""
    merge = "{merge_of: {610m-clm-10k-mlm40-42k: [5000, 30000], 610m-clm-42k: [42000]}, weights: linear}"
    with_merge = study_of(ROOT / PAPER, f"merges={{mean: {merge}, pair: {{merge_of: {{1b-clm-42k: [1, 2]}}}}}}")
    before, plan = plan_study(study_of(ROOT / PAPER)), plan_study(with_merge)
    text = "linear mean of 610m-clm-10k-mlm40-42k at 5,000, 30,000; 610m-clm-42k at 42,000"
    assert plan.merges == {"mean": text, "pair": "mean of 1b-clm-42k at 1, 2"}
    assert f"  {text}\n" in describe_plan(plan, None) and "40 models" in describe_plan(plan, None)
    assert (plan.shared, plan.alone) == (before.shared, before.alone)
    more = {r.name: r.checkpoints - b.checkpoints for r, b in zip(plan.runs, before.runs, strict=True)}
    assert {name: count for name, count in more.items() if count} == {"610m-clm-10k-mlm40-42k": 1, "1b-clm-42k": 2}
    with pytest.raises(UserError, match=r"merges.x.merge_of.1b-clm-42k: expected batches below 42,000"):
        plan_study(study_of(ROOT / PAPER, "merges={x: {merge_of: {1b-clm-42k: [1, 42001]}}}"))


def test_a_problem_of_several_models_names_each(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text((ROOT / PAPER).read_text())
    with pytest.raises(ConfigError) as caught:
        study_of(path, "models.1b-clm-42k.sede=3", "models.1b-mlm20-42k.optimizer.lr=fast")
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {"models.1b-clm-42k.sede", "models.1b-mlm20-42k.optimizer.lr"}
    assert {problem.where for problem in problems.values()} == {"command line"}


def test_options_belong_to_studies() -> None:
    for arguments, message in (
        (
            ["yamls/quickstart.yaml", "--stage", "export"],
            "--stage is for job: study; yamls/quickstart.yaml is job: pretrain",
        ),
        ([PAPER, "--retry-failed"], "--retry-failed is for --stage finetune"),
        ([PAPER, "--stage", "evaluate"], "no model of the study is exported yet"),
    ):
        run = subprocess.run([sys.executable, "src/main.py", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 2 and message in run.stderr, run.stderr
