"""`biphasic compare`: intervals and tests against own computations, refusals, and two evaluations from end to end."""

import itertools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import norm

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.evaluation.run import run
from biphasic.finetuning.classification import entity_scores
from biphasic.finetuning.records import DownstreamResult
from biphasic.report import statistics as module
from biphasic.report.compare import compare, describe
from biphasic.report.example_scores import entity_counts, read_scored_model
from biphasic.report.statistics import ExampleValues, mean_score, paired_test
from biphasic.storage import open_store
from biphasic.sweep.records import GridTask, TrialRecord, write_grid, write_record
from helpers.mteb_mirror import config_of, records_of, rows, write_model, write_own
from helpers.rankings import grades, read_run
from helpers.sweeps import MNLI, SST2, grid_of


def means(values: Any) -> ExampleValues:
    values = np.asarray(values, float)
    return ExampleValues(values[:, None], mean_score, values)


def test_the_interval_is_of_paired_resamples_and_p_of_exchanged_predictions() -> None:
    generator = np.random.default_rng(3)
    a = generator.random(40)
    b = a + generator.normal(0.05, 0.1, 40)
    tested = paired_test([means(a)], [means(b)])
    assert (tested["a"], tested["b"]) == pytest.approx((a.mean(), b.mean()), abs=1e-12)
    resamples = (b - a)[np.random.default_rng(0).integers(40, size=(10_000, 40))].mean(1)
    assert tested["interval"] == pytest.approx(tuple(np.percentile(resamples, [2.5, 97.5])), abs=1e-12)
    signs = np.random.default_rng(1).choice([-1, 1], size=(100_000, 40))
    p = np.mean(np.abs((signs * (b - a)).mean(1)) >= abs((b - a).mean()) - 1e-12)
    assert tested["p"] == pytest.approx(p, abs=4 * np.sqrt(p / 10_000))
    assert 2 * norm.sf((b - a).sum() / np.sqrt(((b - a) ** 2).sum())) == pytest.approx(p, abs=0.01)
    assert paired_test([means(b)], [means(a)])["difference"] == -tested["difference"]


def test_p_of_few_examples_is_exact() -> None:
    """Of the 32 ways to exchange predictions, two give a mean as far from 0 as +0.1, +0.2, +0.3, +0.4, +0.5 have."""
    a, differences = np.full(5, 0.2), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    assert paired_test([means(a)], [means(a + differences)])["p"] == pytest.approx(2 / 32)
    mixed = differences * [-1, 1, 1, 1, 1]
    means_of_all = [abs(np.dot(signs, mixed)) for signs in itertools.product([-1, 1], repeat=5)]
    expected = np.mean([mean >= abs(mixed.sum()) - 1e-9 for mean in means_of_all])
    assert paired_test([means(a)], [means(a + mixed)])["p"] == pytest.approx(expected)
    assert paired_test([means(a)], [means(a)])["p"] == 1
    assert paired_test([means([0.5])], [means([0.75])]) == {"a": 0.5, "b": 0.75, "difference": 0.25,
                                                            "interval": (0.25, 0.25), "p": 1.0}  # fmt: skip


def test_seeds_are_averaged_example_by_example() -> None:
    generator = np.random.default_rng(5)
    a, b = generator.random((3, 30)), generator.random((3, 30))
    tested = paired_test([*map(means, a)], [*map(means, b)])
    assert tested == paired_test([means(a.mean(0))], [means(b.mean(0))])


def test_entity_f1_is_scored_anew_on_resampled_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a ratio of sums, unlike a mean over the sentences."""
    generator = np.random.default_rng(7)
    labels = np.array(["O", "B-PER", "I-PER", "B-LOC"])
    gold, first, second = ([labels[generator.integers(4, size=n)].tolist() for n in range(1, 25)] for _ in range(3))
    monkeypatch.setattr(module, "RESAMPLES", 300)
    # Two seeds, whose scores are averaged.
    tested = paired_test([entity_counts(gold, first)] * 2, [entity_counts(gold, second), entity_counts(gold, gold)])

    def f1(predicted: list[Any], chosen: Any) -> float:
        return entity_scores([gold[at] for at in chosen], [predicted[at] for at in chosen])["f1"]

    every = range(24)
    assert tested["a"] == pytest.approx(f1(first, every)) and tested["b"] == pytest.approx((f1(second, every) + 1) / 2)
    chosen = np.random.default_rng(0).integers(24, size=(300, 24))
    expected = [(f1(second, resample) + f1(gold, resample)) / 2 - f1(first, resample) for resample in chosen]
    assert tested["interval"] == pytest.approx(tuple(np.percentile(expected, [2.5, 97.5])), abs=1e-12)
    np.testing.assert_array_equal(entity_counts([["B-PER", "I-PER", "O"]], [["B-PER", "O", "B-LOC"]]).values, [[0, 2, 1]])


GOLD = np.arange(8) % 2


def results_of(folder: Path, seed: int, right: int) -> list[DownstreamResult]:
    """Write predictions, of which the first `right` of 8 are right, and return the result."""
    predicted = np.where(np.arange(8) < right, GOLD, 1 - GOLD)
    folder.mkdir(parents=True)
    columns = {"id": [f"{at}" for at in range(8)], "gold": GOLD, "predicted": predicted, "accuracy": predicted == GOLD}
    pq.write_table(pa.table(columns), folder / "test.parquet")
    return [DownstreamResult("sst2", "sst2", "classification", "accuracy", 0.5, right / 8, file="test.parquet")]


def sweep_of(folder: Path, scores: dict[str, dict[int, int]], tasks: tuple[GridTask, ...] = (SST2,)) -> str:
    """Write a sweep's output from the right predictions by model and seed; without: a failed trial."""
    grid = grid_of(tuple(scores), tasks, rates=(1e-5,), seeds=tuple(next(iter(scores.values()))))
    for trial, cell in grid.trials.items():
        right = scores[cell.model][cell.seed] if cell.task == "sst2" else 0
        done = results_of(folder / "predictions" / trial, cell.seed, right) if right else ()
        write_record(open_store(str(folder)), TrialRecord(trial, cell, "done" if done else "failed", tuple(done)))
    write_grid(open_store(str(folder)), grid)
    return str(folder)


def finetuning_of(folder: Path, seed: int, right: int) -> str:
    results = [asdict(result) for result in results_of(folder / "predictions", seed, right)]
    record = {"results": results, "about": {"config": f"run_name: x\nseed: {seed}\n"}}
    (folder / "record.json").write_text(json.dumps(record))
    return str(folder)


def test_the_seeds_that_are_compared_are_those_of_both(tmp_path: Path) -> None:
    """Else the means over all seeds of each; what is left out is said. The shown predictions are of a compared seed."""
    sweep = sweep_of(tmp_path / "sweep", {"a": {0: 2, 1: 6}, "b": {0: 4, 1: 6}})
    other = sweep_of(tmp_path / "other", {"a": {2: 1, 3: 2, 4: 6}})
    same, another = finetuning_of(tmp_path / "same", 1, 6), finetuning_of(tmp_path / "another", 7, 8)
    for a, b, scores, counts, lines in (
        (f"{sweep}@a", same, (6, 6), "1", ["left out the seeds [0] of A: the other has none of them"]),
        (f"{sweep}@a", f"{sweep}@b", (4, 5), "2", []),
        (
            f"{sweep}@a",
            other,
            (4, 3),
            "2 and 3",
            ["no seed is in both: means over the seeds [0, 1] of A and [2, 3, 4] of B"],
        ),
        (same, another, (6, 8), "1", ["no seed is in both: means over the seeds [1] of A and [7] of B"]),
    ):
        report = compare(read_scored_model(a), read_scored_model(b))
        [row] = report["sets"]
        assert (row["a"], row["b"]) == pytest.approx((scores[0] / 8, scores[1] / 8)), (a, b)
        assert [line for line in describe(report).splitlines() if line.startswith("sst2 accuracy: ") and "seed" in line] == [
            f"sst2 accuracy: {line}" for line in lines
        ]
        assert f"|       8 | {counts:>7} |".replace(" ", "") in describe(report).replace(" ", "")
    [row] = compare(read_scored_model(f"{sweep}@a"), read_scored_model(finetuning_of(tmp_path / "last", 1, 8)))["sets"]
    assert [(each["id"], each["a"]) for each in row["by_example"] if "gold" in each] == [("6", 0), ("7", 0)]
    assert [each["a_predicted"] == each["gold"] for each in row["by_example"] if "gold" in each] == [False, False]


def test_unfinished_test_sets_of_a_sweep_are_left_out_and_the_others_compared(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "sweep", {"a": {0: 2, 1: 6}, "b": {0: 4, 1: 6}}, (SST2, MNLI))
    report = compare(read_scored_model(f"{sweep}@a"), read_scored_model(f"{sweep}@b"))
    assert [row["set"] for row in report["sets"]] == ["sst2"]
    unfinished = "unfinished: run the sweep again, with --retry-failed if trials failed"
    assert f"without all predictions in {sweep}@a: mnli-m ({unfinished}), mnli-mm ({unfinished})" in describe(report)
    (tmp_path / "sweep/trials/a.sst2.1e-05.1.json").unlink()
    with pytest.raises(UserError, match=r"no test set .*in common: .*unfinished\) of .*'sst2 \(unfinished: run the "):
        compare(read_scored_model(f"{sweep}@a"), read_scored_model(f"{sweep}@b"))


def test_a_fine_tuning_whose_record_has_no_seed(tmp_path: Path) -> None:
    place = finetuning_of(tmp_path / "run", 1, 8)
    for config in ("run_name: x", "- ["):
        record = json.loads((tmp_path / "run/record.json").read_text())
        (tmp_path / "run/record.json").write_text(json.dumps({**record, "about": {"config": config}}))
        with pytest.raises(UserError, match=r"record\.json: is not a run's result"):
            read_scored_model(place)


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of two evaluations on two sets; the second model has no prompts. One set is in one alone."""
    folder = tmp_path_factory.mktemp("compared")
    sets = [str(write_own(folder / name, count)) for name, count in (("first-set", 150), ("second-set", 60))]
    other = write_model(folder / "other" / "encoder")
    runs = [run(config_of(path, folder / name, run_name=name, sets=own, documents=["full", "judged"][: 3 - len(own)]))
            for name, path, own in (("a", model, sets), ("b", other, sets[:1]))]  # fmt: skip
    return runs[0], runs[1]


def test_two_evaluations(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "out.json")]) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    [row] = report["sets"]
    assert (row["set"], row["metric"], row["examples"], row["p"]) == ("first-set test", "ndcg_at_10", 30, row["holm_p"])
    assert list(report["only_in"]) == [f"{runs[0]}@biphasic/a", f"{runs[1]}@biphasic/b"]
    assert [*report["only_in"].values()] == [["second-set test ndcg_at_10"], ["first-set-judged test ndcg_at_10"]]
    # trec_eval's NDCG@10 of the two rankings, query by query.
    from pytrec_eval import RelevanceEvaluator

    _, queries, judgments = rows(9, "d", ["test"], 150)
    qrels, by_query, best = grades(each.values() for each in judgments["test"]), [], []
    for folder in runs:
        own = [record for record in records_of(folder) if record["about"]["settings"]]
        [file] = [row["ranking"] for record in own for row in record["scores"] if row["task"] == "first-set"]
        ranked = read_run(folder / file)
        values = RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(ranked)
        by_query.append({query: value["ndcg_cut_10"] for query, value in values.items()})
        best.append({query: list(found)[:10] for query, found in ranked.items()})
    assert {each["id"]: (each["a"], each["b"]) for each in row["by_example"]} == {
        query: pytest.approx((by_query[0][query], by_query[1][query]), abs=1e-9) for query in qrels
    }
    changes = [abs(each["b"] - each["a"]) for each in row["by_example"]]
    assert changes == sorted(changes, reverse=True) and changes[0] > 0.1
    texts = {each["_id"]: each["text"] for each in queries}
    changed = [each for each in row["by_example"] if "gold" in each]
    assert len(changed) == 10 and changed == row["by_example"][:10]
    for each in changed:
        assert each["text"] == texts[each["id"]] and {one["id"]: one["grade"] for one in each["gold"]} == qrels[each["id"]]
        assert [each["a_predicted"], each["b_predicted"]] == [found[each["id"]] for found in best]
    first = changed[0]["id"]
    assert f"{first}: {by_query[0][first]:.4f} to {by_query[1][first]:.4f}  {texts[first]}" in printed
    assert f"| {row['difference']:+.4f} |" in printed


def test_a_baseline_of_the_same_run(runs: tuple[Path, Path]) -> None:
    report = compare(read_scored_model(str(runs[0])), read_scored_model(f"{runs[0]}@BM25"))
    assert [row["set"] for row in report["sets"]] == ["first-set test", "second-set test"]
    p = [row["p"] for row in report["sets"]]
    low, high = sorted(p)
    assert sorted(row["holm_p"] for row in report["sets"]) == [min(2 * low, 1), max(min(2 * low, 1), high)]
    assert "only in" not in describe(report)


def test_what_cannot_be_compared_is_refused(runs: tuple[Path, Path], model: Path, tmp_path: Path) -> None:
    a, b = map(str, runs)
    for first, second, message in (
        (a, a, "is compared with itself"),
        (a, f"{a}/../a", "is compared with itself"),
        (a, str(tmp_path), "has no scores.json .*has ended"),
        (a, f"{b}@nothing", "has no model nothing: expected FOLDER@MODEL with one of biphasic/b, BM25$"),
    ):
        with pytest.raises(UserError, match=message):
            compare(read_scored_model(first), read_scored_model(second))
    with pytest.raises(UserError, match=f"{a}@biphasic/a is of job: evaluate, .* of job: finetune: expected two"):
        compare(read_scored_model(a), read_scored_model(b)._replace(kind="finetune"))
    with pytest.raises(UserError, match=r"no test set with stored predictions in common: .*first-set test ndcg_at_10"):
        compare(read_scored_model(a), read_scored_model(b)._replace(sets={}))
    # The same names with other data: another judgment, another query.
    own = tmp_path / "first-set"
    shutil.copytree(runs[0].parents[2] / "first-set", own)
    with (own / "qrels/test.tsv").open("a") as file:
        file.write("q3\td9\t1\n")
    changed = run(config_of(model, tmp_path, sets=[str(own)], baselines=[]))
    with pytest.raises(UserError, match=r"first-set test: .* have other gold answers for 1 .*: expected the same data"):
        compare(read_scored_model(a), read_scored_model(str(changed)))
    ours, theirs = read_scored_model(a), read_scored_model(str(changed))
    key = ("first-set test", "ndcg_at_10")
    same = theirs._replace(sets={key: theirs.sets[key]._replace(predictions=ours.sets[key].predictions)})
    with pytest.raises(UserError, match=r"first-set test: .* have other data \(\w+ and \w+\)"):
        compare(ours, same)
    same = theirs._replace(sets={key: theirs.sets[key]._replace(data=ours.sets[key].data)})
    with pytest.raises(UserError, match=r"have other gold answers for 1 examples, e\.g\. \['q3'\]"):
        compare(ours, same)
    same.sets[key].predictions[0]["id"][0] = "another"
    with pytest.raises(UserError, match=r"have 2 different ids, e\.g\. \['another'\]"):
        compare(ours, same)
    damaged = json.loads((changed / "scores.json").read_text())
    damaged["records"][0]["scores"][0]["ndcg_at_10"] += 0.1
    (changed / "scores.json").write_text(json.dumps(damaged))
    with pytest.raises(UserError, match=r"parquet: its ndcg_at_10 is 0\.\d+, but 0\.\d+ is recorded"):
        read_scored_model(str(changed))
    del damaged["records"][0]["scores"][0]["by_query"]
    (changed / "scores.json").write_text(json.dumps(damaged))
    assert read_scored_model(str(changed)).left_out == ["first-set test"]
    (changed / "scores.json").write_text("{}")
    with pytest.raises(UserError, match=r"scores\.json: is not a run's result"):
        read_scored_model(str(changed))
