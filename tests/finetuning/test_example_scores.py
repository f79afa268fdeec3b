"""`biphasic compare` of fine-tunings: the predictions of each family give its recorded scores by each metric."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from biphasic.errors import UserError
from biphasic.finetuning.records import DownstreamResult
from biphasic.finetuning.run import run
from biphasic.report.compare import compare, describe
from biphasic.report.example_scores import example_values, read_scored_model
from helpers.toy_sets import config_of

FAMILIES: dict[str, dict[str, Any]] = {
    "sst2": {"task__metrics": ["accuracy", "f1", "matthews"]},
    "stsb": {"task__metrics": ["spearman", "pearson"]},
    "conll2003": {"task__metrics": ["f1", "sentence_f1"]},
    "squad_v2": {"task__metrics": ["f1", "exact_match"], "max_duration": "20ba"},
    "squad": {"task__kind": "answer_tokens", "task__metrics": ["token_f1", "f1", "exact_match"]},
    "msmarco": {"task__metrics": ["ndcg_at_10", "ndcg_of_ten"]},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_scores_are_those_of_the_predictions(name: str, toy: Path, tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        changes = {"max_duration": "40ba", "seed": seed, "run_name": f"run-{seed}", **FAMILIES[name]}
        folders.append(run(config_of(name, toy / "tasks", toy / "start", tmp_path, **changes)))
    models = [read_scored_model(str(folder)) for folder in folders]
    report = compare(*models)
    recorded = [json.loads((folder / "record.json").read_text())["results"] for folder in folders]
    metrics = FAMILIES[name]["task__metrics"]
    assert [(row["set"], row["metric"]) for row in report["sets"]] == [(name, metric) for metric in metrics]
    for row, first, second in zip(report["sets"], *recorded, strict=True):
        assert (row["a"], row["b"]) == pytest.approx((first["test"], second["test"]), abs=1e-9)
        assert row["interval"][0] <= row["difference"] <= row["interval"][1] and 0 < row["p"] <= row["holm_p"] <= 1
        changed = [example for example in row["by_example"] if "gold" in example]
        different = sum(example["a"] != example["b"] for example in row["by_example"])
        assert len(changed) == min(different, 10)
        assert all(f"  {example['id']}: " in describe(report) for example in changed)
    copied = shutil.copytree(folders[0], tmp_path / "copied")
    assert "changed most" not in describe(compare(models[0], read_scored_model(str(copied))))
    # A run without its files of predictions.
    for file in (folders[0] / "predictions").glob("*.parquet"):
        file.unlink()
    assert read_scored_model(str(folders[0])).left_out == [result["name"] for result in recorded[0]]
    (folders[0] / "record.json").unlink()
    with pytest.raises(UserError, match=r"has no scores\.json .*, record\.json \(job: finetune\).* that has ended"):
        read_scored_model(str(folders[0]))


def test_metrics_of_resamples_are_those_of_the_libraries(tmp_path: Path) -> None:
    """Also of several resamples at once, with ties, and where only one label is left."""
    generator = np.random.default_rng(2)
    rows, names = generator.integers(50, size=(6, 50)), ["a", "b", "c"]
    rows[0] = 0
    (tmp_path / "task.json").write_text(json.dumps({"kind": "classification", "label_names": names}))
    numbers = generator.integers(0, 6, size=(2, 50)).astype(float)
    labels = np.array(names)[generator.integers(3, size=(2, 50))]
    pairs = np.array(names)[generator.integers(2, size=(2, 50))]
    for family, metric, (gold, predicted), function in (
        ("regression", "pearson", numbers, lambda x, y: pearsonr(x, y).statistic),
        ("regression", "spearman", numbers, lambda x, y: spearmanr(x, y).statistic),
        ("classification", "matthews", labels, matthews_corrcoef),
        ("classification", "f1", pairs, lambda x, y: f1_score(x, y, pos_label="b", zero_division=0)),
    ):
        result = DownstreamResult("t", "t", family, metric, None, None, data=str(tmp_path))
        examples = example_values(result, {"gold": gold.tolist(), "predicted": predicted.tolist()})
        scores = examples.score(examples.values[rows])
        expected = [function(gold[row], predicted[row]) for row in rows[1:]]
        assert scores[1:] == pytest.approx(expected, abs=1e-12), metric
        assert scores[0] == (1.0 if metric == "f1" and gold[0] == predicted[0] == "b" else 0.0)
