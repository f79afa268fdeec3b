"""Several labels of a text: training, scores, prediction, transformers' pipeline, ONNX and compare."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import AutoTokenizer, pipeline

from biphasic.__main__ import main
from biphasic.config.finetune import FinetuneConfig
from biphasic.downstream.prepare import prepare_task
from biphasic.export.onnx import export_onnx
from biphasic.finetuning.classification import MultiLabel, best_threshold
from biphasic.finetuning.records import DownstreamResult
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import build_task, run_trial, scored_sets
from biphasic.model.heads import TextHead
from biphasic.model.segments import Segments
from biphasic.report.example_scores import example_values
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.toy_sets import config_of

NAMES = ["first", "second", "third"]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts in which w1, w2 and w3 are the labels."""
    generator, made = np.random.default_rng(seed), []
    for _ in range(count):
        labels = np.flatnonzero(generator.random(3) < [0.5, 0.4, 0.15])
        words = [f"w{word}" for word in generator.integers(20, 60, int(generator.integers(2, 20)))]
        for label in labels:
            words.insert(int(generator.integers(len(words) + 1)), f"w{label + 1}")
        made.append({"text": " ".join(words), "labels": [NAMES[label] for label in labels]})
    return made


@pytest.fixture(scope="module")
def tuned(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FinetuneConfig, Path]:
    """A saved run on a set of 800 texts; the folder of the run."""
    folder = tmp_path_factory.mktemp("multi")
    files = {
        split: [jsonl(folder / f"{split}.jsonl", rows(count, seed))]
        for seed, (split, count) in enumerate((("train", 800), ("validation", 100), ("test", 100)))
    }
    task = {"kind": "multi_label", "text_column": "text", "source": {"files": files}}
    record = prepare_task("it", one_task(folder, {**task, "splits": {split: split for split in files}}))
    assert record["label_names"] == NAMES
    section = {"kind": "multi_label", "name": "it", "data": str(folder / "out" / "it")}
    section["metrics"] = ["micro_f1", "macro_f1", "average_precision"]
    changes: dict[str, Any] = {"task": section, "run_name": "multi", "save_model": True, "max_duration": "6ep"}
    config = config_of("sst2", toy / "tasks", toy / "start", folder, **changes)
    run(config)
    return config, folder / "runs" / "multi"


def test_scores_are_those_of_scikit_learn(tuned: tuple[FinetuneConfig, Path]) -> None:
    config, folder = tuned
    record = json.loads((folder / "record.json").read_text())
    results = {result["metric"]: result for result in record["results"]}
    predictions = rows_of(folder / "predictions", "test")
    binarizer: Any = MultiLabelBinarizer(classes=NAMES)
    gold, predicted = (binarizer.fit_transform([row[column] for row in predictions]) for column in ("gold", "predicted"))
    probabilities = np.array([row["score"] for row in predictions])
    expected = {
        "micro_f1": f1_score(gold, predicted, average="micro"),
        "macro_f1": f1_score(gold, predicted, average="macro"),
        "average_precision": average_precision_score(gold, probabilities),
    }
    for metric, value in expected.items():
        assert results[metric]["test"] == pytest.approx(value)
    assert results["micro_f1"]["test"] > 0.9
    threshold = results["micro_f1"]["more"]["validation"]["threshold"]
    assert results["micro_f1"]["more"]["test"]["threshold"] == threshold
    assert (predicted == (probabilities >= threshold)).all()
    assert [metric for _, _, metric in scored_sets(config)] == list(expected)
    assert run_trial(config).results[0].test == results["micro_f1"]["test"]  # as a sweep runs it


def test_the_pipeline_and_predict_give_the_trainer_s_scores(tuned: tuple[FinetuneConfig, Path]) -> None:
    _, folder = tuned
    texts = rows(20, 9)
    assert json.loads((folder / "model" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    classify: Any = pipeline("text-classification", model=str(folder / "model"), trust_remote_code=True)
    scores = [
        {score["label"]: score["score"] for score in classify(row["text"], truncation=True, top_k=None)} for row in texts
    ]
    file = jsonl(folder.parent / "new.jsonl", [{"id": 7 + at, "text": row["text"]} for at, row in enumerate(texts)])
    out = folder.parent / "new-predictions.jsonl"
    assert main(["predict", str(folder / "model"), file, "--out", str(out)]) == 0
    predictions = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in predictions] == [str(7 + at) for at in range(20)]
    for row, expected in zip(predictions, scores, strict=True):
        assert row["score"] == pytest.approx([expected[name] for name in NAMES], abs=2e-5)
    assert "top_k=None" in (folder / "model" / "README.md").read_text()


def test_the_onnx_graph_has_the_logits(tuned: tuple[FinetuneConfig, Path]) -> None:
    import onnxruntime

    _, folder = tuned
    graph = export_onnx(folder / "model")
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    texts = [row["text"] for row in rows(8, 9)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(texts, padding=True, return_tensors="np")
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(None, {name: inputs[name] for name in ("input_ids", "attention_mask")})
    logits = torch.from_numpy(dict(zip(names, outputs, strict=True))["logits"])
    classify: Any = pipeline("text-classification", model=str(folder / "model"), trust_remote_code=True)
    for row, text in zip(logits.sigmoid(), texts, strict=True):
        scores = {score["label"]: score["score"] for score in classify(text, top_k=None)}
        assert row.tolist() == pytest.approx([scores[name] for name in NAMES], abs=1e-4)


def test_the_loss_is_transformers_s(tuned: tuple[FinetuneConfig, Path]) -> None:
    """Times the number of texts, whose mean the trainer takes."""
    config, _ = tuned
    task: Any = build_task(config.model, config.task, config.cache)
    assert isinstance(task, MultiLabel)
    torch.manual_seed(0)
    hidden, segments, head = torch.randn(7, 32), Segments.of([3, 4], torch.device("cpu")), TextHead(32, 3)
    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    means = torch.stack([hidden[:3].mean(0), hidden[3:].mean(0)])
    expected = torch.nn.BCEWithLogitsLoss()(head(means), targets)
    loss = task.loss(head, hidden, segments, {"labels": targets.reshape(-1)})
    assert float(loss) / 2 == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("correct", "predicted", "micro", "macro"),
    [
        ([[1], [0], [1], [0], [1]], [[1], [1], [0], [0], [1]], 4 / 6, 4 / 6),
        ([[1], *[[0]] * 9], [[0]] * 10, 0, 0),
        ([[0]] * 3, [[0]] * 3, 0, 0),
        ([[1, 0], [0, 1], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 1], [0, 0]], 2 / 5, 1 / 3),
        ([[1, 0, 0], [1, 1, 0], [0, 0, 0]], [[1, 1, 0], [1, 0, 1], [0, 0, 0]], 4 / 7, 1 / 3),
    ],
)  # fmt: skip
def test_f1_by_hand(tuned: tuple[FinetuneConfig, Path], correct: Any, predicted: Any, micro: float, macro: float) -> None:
    """Of one label it is that label's alone, and `compare` computes the same."""
    config, _ = tuned
    task: Any = build_task(config.model, config.task, config.cache)
    task.data.record = {**task.data.record, "label_names": NAMES[: len(correct[0])]}
    task.threshold = 0.5
    gold, chosen = ([task._names(np.flatnonzero(row)) for row in rows] for rows in (correct, predicted))
    scores = task.metrics(gold, {"predicted": chosen, "score": predicted}, {})
    assert (scores["micro_f1"], scores["macro_f1"]) == pytest.approx((micro, macro))
    result = DownstreamResult("it", "it", "multi_label", "micro_f1", None, micro)
    examples = example_values(result, {"id": [], "gold": gold, "predicted": chosen})
    assert float(examples.score(examples.values)) == pytest.approx(micro)


def test_the_best_threshold() -> None:
    correct = np.array([[1, 0], [1, 1], [0, 0]])
    assert best_threshold(correct, np.array([[0.9, 0.2], [0.8, 0.31], [0.3, 0.1]])) == 0.31
    assert best_threshold(correct, np.array([[0.9, 0.2], [0.8, 0.7], [0.3, 0.1]])) == 0.5
    assert best_threshold(np.zeros((2, 2)), np.full((2, 2), 0.2)) == 0.5


def test_compare_has_its_micro_f1(tuned: tuple[FinetuneConfig, Path], capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = tuned
    other = config.model_copy(update={"run_name": "other", "seed": 1, "max_duration": config.warmup.__class__(1, "ep")})
    run(other)
    assert main(["compare", str(folder), str(folder.parent / "other")]) == 0
    printed = capsys.readouterr().out
    assert "micro_f1" in printed
