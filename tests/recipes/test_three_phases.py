"""Three phases with data of their own: the recipe's commands fit together, and its study runs small."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.config.history import first_difference, history_of
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.study.plan import plan_study
from biphasic.study.run import pretrain
from helpers import tiny
from helpers.studies import count_batches
from helpers.tiny import LENGTH, ROOT

RECIPE = ROOT / "recipes" / "three_phases"
sys.path.insert(0, str(RECIPE))

import steps  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MINI", str(tmp_path / "mini"))
    return tmp_path / "mini"


def study_of(*overrides: str) -> StudyConfig:
    study = load(RECIPE / "study.yaml", list(overrides))
    assert isinstance(study, StudyConfig)
    return study


def test_three_decays_cost_one_trunk(folder: Path) -> None:
    study = study_of()
    plan, configs = plan_study(study), expand(study)
    trunk, *decays = plan.runs
    decay = int(trunk.length - 160)
    assert [(run.parent, run.start) for run in decays] == [(trunk.name, decay)] * 2
    for run in decays:
        difference = first_difference(history_of(configs[trunk.name]), history_of(configs[run.name]))
        assert difference is not None
        assert difference.batch == decay and difference.key.startswith("objective.phases.2.data.")
    tokens = {each.shape.size for config in configs.values() for each in config.inputs}
    assert tokens == {16 * 256}  # in all phases
    assert plan.shared.batches == trunk.length + 2 * 160


def test_the_commands_fit_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "biphasic"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%q " {name} "$@" >>{tmp_path}/log; echo >>{tmp_path}/log\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
    run = subprocess.run([RECIPE / "run.sh", str(folder)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows: dict[str, ConvertConfig] = {}
    for call in [shlex.split(line) for line in (tmp_path / "log").read_text().splitlines()]:
        assert call[0] == "biphasic" or (ROOT / call[1]).is_file()
        if call[:2] == ["biphasic", "convert"]:
            config = load(ROOT / call[2], call[3:])
            assert isinstance(config, ConvertConfig)
            rows[f"{config.output}/train"] = config
    assert len(rows) == 4 and len({config.tokenizer for config in rows.values()}) == 1
    for config in expand(study_of()).values():
        streams = {stream.local: each.data.sequence_length for each in config.inputs for stream in each.streams.values()}
        assert {rows[local].sequence_length == length for local, length in streams.items()} == {True}
        assert config.data.validation is not None
        validation = rows[config.data.validation.local]
        assert validation.sequence_length == config.data.sequence_length
        assert [each.any_of for each in validation.filters] == [["validation"]]
        trained = {value for local in streams for each in rows[local].filters for value in each.any_of or []}
        assert trained == ({"train"} if any("docstrings" in local for local in streams) else set())


def test_the_study_runs_small(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The study's own YAMLs on rows of 32 and 64 tokens: the trunk is trained once, and the decays differ."""
    for seed, (place, length) in enumerate(
        [("data", LENGTH), ("three_phases/validation", LENGTH), ("three_phases/long", 2 * LENGTH),
         ("three_phases/docstrings", 2 * LENGTH)]
    ):  # fmt: skip
        tiny.write_rows(folder / place / "train", 400, seed=seed, length=length)
    tiny.write_tokenizer(folder / "data" / "tokenizer")
    lengths = {"data.sequence_length": LENGTH, "objective.phases.1.data.sequence_length": 2 * LENGTH}
    shorter = {
        "max_duration": "12ba", "objective.phases.0.until": "5ba", "objective.phases.1.until": "8ba",
        "schedule.warmup": "1ba", "schedule.decay": "4ba", "evaluation.interval": "12ba", "data.num_workers": 0,
        "model.vocab_size": tiny.WORDS, "data.shuffle_block_size": 64, "checkpoint.interval": "4ba",
    }  # fmt: skip
    study = study_of(f"base={json.dumps({'defaults': 'recipes/three_phases/pretrain.yaml', **lengths, **shorter})}")
    started: list[str] = []

    def train(file: Path) -> int:
        config = load(file)
        assert isinstance(config, PretrainConfig)
        tiny.train(config)
        started.append(config.run_name)
        return 0

    assert pretrain(study, train=train) == 0
    batches = sum(count_batches(Path(study.local_folder, name, "metrics.jsonl")) for name in started)
    assert started == list(study.models) and batches == 12 + 4 + 4
    capsys.readouterr()
    assert steps.main([str(folder / "three_phases" / "study")]) == 0
    printed = capsys.readouterr().out
    assert "| half | 0 | 4 |" in printed and "| half | 2 | 4 |" in printed and "| files | 2 | 3 |" in printed
    assert "| half | 5 |" in printed and "| half | 8 |" in printed
    table = printed.rpartition("validation loss")[2]
    values = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith(tuple(f"| {n}" for n in started))]
    assert len(set(values)) == 3


def test_the_longest_step_near_a_boundary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In medians of the phase in which it is; batches are counted from 0."""
    lines = []
    for batch in range(1, 41):
        seconds = 0.2 if batch > 20 else 0.1
        seconds *= {5: 9, 12: 1.5, 24: 2.5}.get(batch, 1)  # the first one is farther away
        entry = {"batch": batch, "time": 0.0, "tokens": 0, "loss/train/total": 1.0, "objective/phase": int(batch > 20)}
        lines.append({**entry, "time/step_seconds": seconds})
    lines[-1]["metrics/mlm/loss"] = 2.0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| run | 0 | 20 | 0.100 | 0.900 |" in printed
    assert "| run | 20 | 23 | 2.50 |" in printed
    assert "| run | 2.0000 |" in printed
