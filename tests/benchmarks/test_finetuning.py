"""The fine-tuning benchmarks compare equal models and equal trainings, and their numbers are consistent."""

import importlib
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.finetuning.trial import run_trial
from biphasic.model.encoder import load_encoder
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from biphasic.sweep.grid import trial_configs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"steps": 6, "dropped": 1, "seeds": 1, "width": 32, "layers": 2, "words": 200, "longest": 64, "threads": 1}


def module(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Hugging Face's Trainer needs accelerate")
@pytest.mark.parametrize("model", ["llama", "bert"])
def test_both_sides_have_the_same_model_and_texts(model: str, tmp_path: Path) -> None:
    benchmark, hugging_face = module("finetuning"), module("hugging_face")
    shape = benchmark.Shape(**TINY)
    benchmark.prepare(tmp_path / "work", shape)
    (tmp_path / "work" / "shape.json").write_text(json.dumps(asdict(shape)))
    encoder = load_encoder(str(tmp_path / "work" / model))
    encoder.backbone.eval()
    classifier = hugging_face.Classifier(model, tmp_path / "work").eval()
    texts = pq.read_table(tmp_path / "work" / "set" / "test.parquet")["text"].to_pylist()[:8]
    tokenizer = hugging_face.AutoTokenizer.from_pretrained(tmp_path / "work" / model)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = encoder.tokenize(texts)
    assert [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)] == ids
    with torch.inference_mode():
        segments = Segments.of([len(one) for one in ids], torch.device("cpu"))
        expected = mean_pool(encoder.hidden(torch.tensor([id for one in ids for id in one]), segments), segments)
        pooled: list[torch.Tensor] = []
        classifier.dense.register_forward_pre_hook(lambda _, given: pooled.append(given[0]))
        classifier(batch["input_ids"], batch["attention_mask"], torch.zeros(8, dtype=torch.int64))
    torch.testing.assert_close(pooled[0], expected, atol=1e-5, rtol=1e-4)
    results = hugging_face.classify(tmp_path / "work", model, 0, "padded")
    assert len(results["seconds"]) == len(results["tokens"]) == shape.steps - 1
    assert 0 <= results["accuracy"] <= 1


def test_ratios() -> None:
    benchmark = module("finetuning")
    shape = benchmark.Shape(dropped=1)

    def run(seconds: list[float], accuracy: float) -> dict[str, Any]:
        return {"seconds": seconds, "tokens": [100] * len(seconds), "accuracy": accuracy, "loss": 0.0}

    ways = {
        "ours": [run([9, 1, 1], 0.9), run([9, 1, 1], 0.8)],
        "padded": [run([9, 2, 4], 0.9)],
        "grouped": [run([9, 1, 3], 0.9)],
    }
    results = {"rates": benchmark.rates({"llama": ways}, shape)}
    assert results["rates"]["llama"]["ours"]["tokens_per_second"] == 100
    assert results["rates"]["llama"]["padded"]["ratio"] == 3
    assert results["rates"]["llama"]["grouped"]["ratio"] == 2
    assert results["rates"]["llama"]["ours"]["accuracy"] == pytest.approx(0.85)
    header, rows = benchmark.table(results)
    assert all(len(row) == len(header) for row in rows)


def test_pairs_a_second() -> None:
    benchmark = module("retrieval")
    shape = benchmark.Shape(batch=10, dropped=1)
    ours, theirs = benchmark.SIDES

    def run(seconds: list[float], ndcg: float) -> dict[str, Any]:
        return {"seconds": seconds, "ndcg": ndcg, "loss": 0.0}

    rates = benchmark.training_rates({ours: [run([1, 2], 0.9), run([3, 2], 0.7)], theirs: [run([5, 3], 0.8)]}, shape)
    # The first step is in no list, so that dropping one drops nothing here.
    assert rates[ours]["pairs_per_second"] == 5 and rates[theirs]["pairs_per_second"] == 2.5
    assert rates[ours]["ndcg"] == pytest.approx(0.8)
    rows = benchmark.training_rows(rates)
    assert [row[2] for row in rows] == ["", "2.00"] and {len(row) for row in rows} == {5}


@pytest.mark.slow
def test_both_sides_of_retrieval_train_the_same_model(tmp_path: Path) -> None:
    """The losses of the first and only step are about the same: other orders of pairs, the same weights and batch size."""
    benchmark, peer = module("retrieval"), module("hugging_face")
    shape = benchmark.Shape(steps=1, batch=64, tokens=512, held_out=20, width=32, layers=2, words=200, longest=64, threads=1)
    benchmark.prepare(tmp_path / "work", shape)
    ours, theirs = benchmark.train_biphasic(tmp_path / "work", 0, shape), peer.retrieve(tmp_path / "work", 0)
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-4)
    assert theirs["ndcg"] == pytest.approx(ours["ndcg"], abs=1e-3)


def test_the_bare_loop_trains_what_a_trial_trains(tmp_path: Path) -> None:
    sweep = module("sweep")
    path = sweep.prepare(tmp_path / "work", sweep.Shape(seeds=1, steps=6, width=32, layers=1))
    sweep.run_bare_part(path, 1, 2, tmp_path / "out.json")
    [loop] = json.loads((tmp_path / "out.json").read_text())
    config = load(path)
    assert isinstance(config, SweepConfig)
    [cell] = list(trial_configs(config))[1::2]
    assert (loop["lr"], loop["seed"]) == (cell.lr, cell.seed)
    outcome = run_trial(trial_configs(config)[cell])
    assert abs(outcome.about["loss"] - loop["loss"]) < sweep.AGREE
    assert loop["seconds"] > 0
