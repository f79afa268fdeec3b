"""The protocol of the mini study: its runs, its records, and its tests on scores that are known."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from biphasic.config.load import load
from biphasic.config.model import architecture_of
from biphasic.config.plan import training_flops
from biphasic.config.study import StudyConfig, expand
from biphasic.config.sweep import SweepConfig
from biphasic.errors import UserError
from biphasic.finetuning.records import DownstreamResult
from biphasic.report.formatting import markdown_page
from biphasic.storage import open_store
from biphasic.study.plan import plan_study
from biphasic.sweep.records import Cell, TrialRecord, write_record
from helpers.tiny import ROOT

MINI = ROOT / "recipes" / "mini"


@pytest.fixture(scope="module")
def protocol() -> ModuleType:
    sys.path.insert(0, str(MINI))
    import protocol

    return protocol


@pytest.fixture(scope="module")
def protocol_run(protocol: ModuleType) -> ModuleType:
    import protocol_run

    return protocol_run


@pytest.fixture(scope="module")
def seed_records(protocol: ModuleType) -> ModuleType:
    import seed_records

    return seed_records


@pytest.fixture(scope="module")
def followup(protocol: ModuleType) -> ModuleType:
    import followup

    return followup


@pytest.fixture
def write_records(seed_records: ModuleType) -> Callable[..., None]:
    """Returns a function that writes a record for each seed. `gains` has what a model's scores are above 0.5, by seed."""

    def write(runs: Any, folder: Path, gains: dict[str, np.ndarray], **changes: Any) -> None:
        folder.mkdir(exist_ok=True)
        for at, seed in enumerate(runs.seeds):
            trials = [
                seed_records.Trial(
                    model, task, 4e-3, number, 0.5, 0.5 + float(gains.get(model, np.zeros(12))[at]) + 0.01 * number, 0
                )
                for model, task, number in runs.cells()
            ]
            record = {"seed": seed, "data": {"rows": "a", "types": "b"}, "trials": trials}
            (folder / f"seed-{seed}.json").write_bytes(seed_records.record_bytes(record | changes, "trials"))

    return write


@pytest.fixture
def scores_of(write_records: Callable[..., None], seed_records: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that writes such records and reads their scores."""

    def scores(runs: Any, gains: dict[str, np.ndarray]) -> Any:
        write_records(runs, tmp_path / runs.name, gains)
        return seed_records.read_scores(runs, tmp_path / runs.name)

    return scores


@pytest.mark.parametrize(("study", "count"), [("protocol", 64), ("longer", 96), ("ratios", 8)])
def test_each_fine_tuning_is_in_one_sweep_that_loads(
    protocol_run: ModuleType, seed_records: ModuleType, study: str, count: int, tmp_path: Path
) -> None:
    found = []
    runs = protocol_run.STUDIES[study]
    for at, sweep in enumerate(protocol_run.sweeps(runs, tmp_path, [3, 4])):
        file = tmp_path / f"{at}.yaml"
        file.write_text(yaml.safe_dump(sweep))
        config = load(str(file))
        assert isinstance(config, SweepConfig)
        (rate,) = config.learning_rates
        found += [(*cell, rate) for cell in product(config.models, config.tasks, config.seeds)]
        assert all(load(task) for task in config.tasks.values())
    families = seed_records.PUBLIC
    expected = {
        (f"{model}-s{seed}", task, number, seed_records.RATES[runs.models[model]][families.get(task, task)])
        for (model, task, number), seed in product(runs.cells(), (3, 4))
    }
    assert len(expected) == 2 * count
    assert len(found) == len(set(found)) and set(found) == expected


def test_the_study_trains_the_models_at_equal_tokens_and_flops(protocol: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setenv("MINI_SEED", "7")
    config = load("recipes/mini/protocol.yaml")
    assert isinstance(config, StudyConfig)
    assert {*config.models, *config.merges} == {*protocol.MODELS, "clm-mlm-stable"}
    runs = {run.name: run for run in plan_study(config).runs}
    configs = expand(config)
    assert {keys.seed for keys in configs.values()} == {7}

    def flops_of(name: str) -> float:
        shape = architecture_of(configs[name].model)
        assert shape is not None
        return training_flops(configs[name], shape, 0, runs[name].length)

    for batches, switch, equal_flops in protocol.BUDGETS.values():
        both = runs[f"1m-clm-{switch}-mlm40-{batches}"]
        assert flops_of(both.name) == pytest.approx(flops_of(f"1m-mlm40-{equal_flops}"), rel=1e-3)
        assert both.length == runs[f"1m-mlm40-{batches}"].length == int(batches)


@pytest.mark.parametrize(("study", "stable"), [("longer", {"mlm-stable", "clm-mlm-stable"}), ("ratios", set())])
def test_the_follow_up_trains_its_models(protocol_run: ModuleType, monkeypatch: Any, study: str, stable: set[str]) -> None:
    monkeypatch.setenv("MINI_SEED", "7")
    config = load(f"recipes/mini/{study}.yaml")
    assert isinstance(config, StudyConfig)
    assert {*config.models, *config.merges} == {*protocol_run.STUDIES[study].models, *stable}
    configs = expand(config)
    assert {keys.seed for keys in configs.values()} == {7}
    assert config.folder.endswith(f"{study}/seed7")
    for run in plan_study(config).runs:
        batches = int(run.name.rpartition("-")[2]) if run.name[0] == "1" else 10240
        assert run.length + 10240 * ("-dec10240-" in run.name) == batches


def test_nothing_is_computed_before_all_seeds_are_there(
    protocol: ModuleType, seed_records: ModuleType, write_records: Callable[..., None], tmp_path: Path
) -> None:
    write_records(protocol.RUNS, tmp_path, {})
    seed_records.read_scores(protocol.RUNS, tmp_path)
    (tmp_path / "seed-9.json").unlink()
    with pytest.raises(UserError, match=r"missing: 9$"):
        seed_records.read_scores(protocol.RUNS, tmp_path)


def test_records_of_other_texts_or_with_missing_fine_tunings_are_refused(
    protocol: ModuleType, seed_records: ModuleType, write_records: Callable[..., None], tmp_path: Path
) -> None:
    write_records(protocol.RUNS, tmp_path, {})
    file = tmp_path / "seed-5.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"data": {"rows": "a", "types": "c"}}))
    with pytest.raises(UserError, match="seeds 3 and 5 differ in types"):
        seed_records.read_scores(protocol.RUNS, tmp_path)
    file.write_text(json.dumps(record | {"trials": record["trials"][1:]}))
    with pytest.raises(UserError, match="seed 5 has no fine-tuning"):
        seed_records.read_scores(protocol.RUNS, tmp_path)


def test_outcomes_are_those_of_scipy_and_corrected_within_their_family(
    protocol: ModuleType, scores_of: Callable[..., Any]
) -> None:
    generator = np.random.default_rng(0)
    clear, none, wide = (
        generator.normal(0.012, 0.005, 12),
        generator.normal(0, 0.002, 12),
        generator.normal(0, 0.05, 12),
    )
    gains = {"1m-clm-1280-mlm40-2560": clear, "1m-mlm40-3521": clear - none, "1m-clm-2560": clear - wide}
    scores = scores_of(protocol.RUNS, gains)
    tokens, flops = protocol.outcomes(scores, protocol.PRIMARY)
    raw = [stats.ttest_1samp(values, 0).pvalue for values in (clear, none)]
    assert tokens.interval.mean == pytest.approx(clear.mean()) and flops.interval.mean == pytest.approx(none.mean())
    assert tokens.p == pytest.approx(2 * raw[0]) and flops.p == pytest.approx(raw[1])
    assert (tokens.verdict, flops.verdict) == ("better", "equal within a point")
    within = max(stats.ttest_1samp(none, -0.01).pvalue, stats.ttest_1samp(none, 0.01).pvalue) / 2
    assert flops.p_equivalence == pytest.approx(2 * within)
    signs = np.array(list(product((1, -1), repeat=12)))
    assert tokens.sign_flip == pytest.approx((abs(signs @ clear) >= abs(clear.sum()) - 1e-9).mean())
    secondary = {
        (each.comparison.title, each.comparison.tokens, each.comparison.tasks): each
        for each in protocol.outcomes(scores, protocol.SECONDARY)
    }
    assert (len(protocol.SECONDARY), len(protocol.ON_PUBLIC_SETS)) == (30, 10)
    assert secondary["CLM→MLM minus CLM", "10.5 M", protocol.TASKS].verdict == "not decided"
    near = secondary["CLM→MLM minus MLM, equal FLOPs", "10.5 M", ("types",)]
    assert near.verdict == "equal within a point"
    small = secondary["CLM→MLM minus MLM, equal FLOPs", "10.5 M", ("retrieval",)]
    assert small.p_equivalence == near.p_equivalence and small.verdict == "not decided"
    lines = "\n".join(protocol.tables(scores))
    alone = 100 * (clear - wide - 0.005)  # MLM has a second fine-tuning seed, a point above the first
    half = stats.t.ppf(0.975, 11) * stats.sem(alone)
    unplanned = f"{alone.mean():+.2f} ± {half:.2f} | {(alone > 0).sum()} of 12 |"
    assert f"| CLM minus MLM | 10.5 M | mean of four | {unplanned}" in lines
    assert "| better |" in lines and protocol.draw(scores).startswith(b"\x89PNG")


def test_worse_is_said_as_plainly_as_better(protocol: ModuleType, scores_of: Callable[..., Any]) -> None:
    scores = scores_of(protocol.RUNS, {"1m-clm-1280-mlm40-2560": np.linspace(-0.03, -0.02, 12)})
    assert [each.verdict for each in protocol.outcomes(scores, protocol.PRIMARY)] == ["worse", "worse"]


def test_the_follow_up_compares_differences_of_models(
    protocol: ModuleType, followup: ModuleType, scores_of: Callable[..., Any]
) -> None:
    """Continued pretraining gains 3 points from CLM and 1 from MLM. The ratio changes MLM by -2 points, CLM→MLM by +0.5."""
    noise = np.linspace(-0.001, 0.001, 12)
    longer = scores_of(
        followup.LONGER,
        {"1m-clm-dec10240-mlm40-15604": 0.03 + noise, "1m-mlm40-dec10240-mlm40-15604": np.full(12, 0.01)},
    )
    table = followup.longer_tables(longer)
    assert len(followup.LONGER_COMPARISONS) == 10
    (steeper,) = (line for line in table if line.startswith("| gain from 29 to 52%"))
    assert f"| {2 + 100 * noise[:3].mean():+.2f} " in steeper
    protocol_scores = scores_of(protocol.RUNS, {"1m-mlm40-640": np.full(12, -0.02), "1m-clm-320-mlm40-640": 0.005 + noise})
    both = pd.concat([protocol_scores, scores_of(followup.RATIOS, {})])
    alone, after, absolute = followup.ratio_tables(both)[4:7]
    assert "-2.00" in alone and "+0.50" in after and "+1.50" in absolute


def write_trials(protocol_run: ModuleType, folder: Path, seeds: list[int]) -> None:
    """The trial records of the protocol's sweeps, and the files whose hashes a record holds."""
    for sweep in protocol_run.sweeps(protocol_run.RUNS, folder, seeds):
        for model, task, number in product(sweep["models"], sweep["tasks"], sweep["seeds"]):
            cell = Cell(model, task, sweep["learning_rates"][0], number)
            result = DownstreamResult(task, task, "classification", "accuracy", 0.5, 0.6)
            about = {"commit": "abc", "host": "h", "hardware": "c", "versions": {}, "tokens": 5}
            trial = TrialRecord(f"{model}.{task}.{number}", cell, "done", (result,), seconds={"total": 2.0}, about=about)
            write_record(open_store(sweep["output"]), trial)
    (folder / "data").mkdir(exist_ok=True)
    hashes = {
        "splits": {"train": {"index_sha256": "t"}, "validation": {"index_sha256": "v"}},
        "tokenizer": {"sha256": "w"},
    }
    (folder / "data" / "conversion.json").write_text(json.dumps(hashes))


def test_a_record_has_all_fine_tunings_of_its_seed_and_where_they_ran(protocol_run: ModuleType, tmp_path: Path) -> None:
    write_trials(protocol_run, tmp_path, [3, 4])
    write_trials(protocol_run, tmp_path, [5])
    record = protocol_run.record(protocol_run.RUNS, tmp_path, 4)
    assert {(*trial[:2], trial.seed) for trial in record["trials"]} == set(protocol_run.RUNS.cells())
    assert len(record["trials"]) == 64 and record["finetuning_seconds"] == 128
    assert record["sources"] == [{"commit": "abc", "host": "h", "hardware": "c", "versions": {}}]
    assert json.loads(protocol_run.record_bytes(record, "trials"))["trials"][0] == record["trials"][0]._asdict()
    first = next(Path(next(protocol_run.sweeps(protocol_run.RUNS, tmp_path, [4]))["output"], "trials").glob("*-s4.*.json"))
    first.unlink()
    with pytest.raises(UserError, match="63 fine-tunings, expected 64; missing"):
        protocol_run.record(protocol_run.RUNS, tmp_path, 4)
    assert len(protocol_run.record(protocol_run.RUNS, tmp_path, 5)["trials"]) == 64


def test_public_sets_are_divided_and_reformatted(tmp_path: Path) -> None:
    """SQuAD by article, without questions that have no answer; SciFact's sentences, pairs and judgments."""
    (tmp_path / "squad").mkdir()
    (tmp_path / "scifact").mkdir()
    questions = [{"id": "a", "is_impossible": False}, {"id": "b", "is_impossible": True}]
    articles = [{"title": str(at), "paragraphs": [{"context": "c", "qas": questions}]} for at in range(16)]
    (tmp_path / "squad" / "dev-v2.0.json").write_text(json.dumps({"data": articles}))
    scifact = tmp_path / "scifact"
    with zipfile.ZipFile(scifact / "scifact.zip", "w") as file:
        abstract = "\"['One.'\n 'Two.']\""
        file.writestr("corpus_train.csv", f"doc_id,title,abstract,structured\n7,Title,{abstract},False\n")
    (scifact / "queries.jsonl").write_text('{"_id": "1", "text": "claim"}\n{"_id": "2", "text": "other"}\n')
    (scifact / "train.tsv").write_text("query-id\tcorpus-id\tscore\n1\t7\t1\n")
    (scifact / "test.tsv").write_text("2\t 0 7\t1\n")
    command = [sys.executable, str(MINI / "public" / "prepare.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    for split, count in (("train", 12), ("test", 4)):
        data = json.loads((tmp_path / "squad" / f"{split}.json").read_text())["data"]
        assert [[each["id"] for each in article["paragraphs"][0]["qas"]] for article in data] == [["a"]] * count
    assert json.loads((scifact / "pairs.jsonl").read_text()) == {"query": "claim", "positive": "Title One. Two."}
    assert (scifact / "test_qrels.tsv").read_text() == "query-id\tcorpus-id\tscore\n2\t7\t1\n"


def test_the_script_says_what_it_needs_and_which_log_to_read(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "mini").mkdir(parents=True)
    script = shutil.copy(MINI / "protocol.sh", tmp_path / "recipes" / "mini")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho why\nexit 2\n")
    (tmp_path / "bin" / "python").chmod(0o755)

    def call(*arguments: str) -> tuple[int, str]:
        path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
        done = subprocess.run([script, *arguments], env=path, capture_output=True, text=True)
        return done.returncode, done.stderr

    usage = 2, "usage: protocol.sh protocol|longer|ratios FOLDER SEED...\n"
    assert call() == call("protocol", "runs/mini") == call("protocols", "runs/mini", "3") == usage
    assert call("protocol", "runs/mini", "3") == (2, "runs/mini: has no folder text; see recipes/mini/protocol.md\n")
    assert not (tmp_path / "runs").exists()
    for name in ("text", "data", "tasks", "public"):
        (tmp_path / "runs" / "mini" / name).mkdir(parents=True)
    says = "seed 3: pretrain failed, and runs/mini/protocol/seed3.log says why; the same command resumes\n"
    assert call("protocol", "runs/mini", "3") == (1, says)
    assert (tmp_path / "runs" / "mini" / "protocol" / "seed3.log").read_text() == "why\n"


@pytest.mark.parametrize("study", ["protocol", "ratios", "longer"])
def test_the_published_tables_are_those_of_the_published_records(
    protocol: ModuleType, followup: ModuleType, seed_records: ModuleType, study: str
) -> None:
    runs = {"protocol": protocol.RUNS, "ratios": followup.RATIOS, "longer": followup.LONGER}[study]
    scores = seed_records.read_scores(runs, runs.records)
    if study == "ratios":
        scores = pd.concat([seed_records.read_scores(protocol.RUNS, protocol.RUNS.records), scores])
    tables = {"protocol": protocol.tables, "ratios": followup.ratio_tables, "longer": followup.longer_tables}[study]
    assert (runs.records / "results.md").read_bytes() == markdown_page(tables(scores))


def test_the_page_has_the_published_differences() -> None:
    """Rows of docs/results.md are the studies' rows; a difference in a sentence is one of theirs, to a tenth of a point."""
    published = "\n".join((MINI / study / "results.md").read_text() for study in ("protocol", "ratios", "longer"))
    page = (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\|.*\| \d+ of \d+ \|.*", page, re.MULTILINE)
    assert len(rows) == 2 and not set(rows) - set(published.splitlines())
    pairs = [(float(mean), float(half)) for mean, half in re.findall(r"([+-]?\d+\.\d+) ± (\d+\.\d+)", published)]
    shown = [(float(mean), float(half)) for mean, half in re.findall(r"([+-]?\d+\.\d+) ± (\d+\.\d+)", page)]
    assert len(shown) > 20
    assert [each for each in shown if not any(each == pytest.approx(pair, abs=0.0501) for pair in pairs)] == []
