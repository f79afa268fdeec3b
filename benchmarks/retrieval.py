"""Retrieval against sentence-transformers: training pairs a second, over its CachedMultipleNegativesRankingLoss.

The same texts, weights, batch, number of steps, optimizer and schedule, with gradient caching on
both sides. The result is also what the trained models score on held-out queries, by one function.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from workload import ROOT, launch, parse_options, report, say

import finetuning

GOAL = 1.5
SIDES = ("Biphasic", "sentence-transformers")


@dataclass(frozen=True)
class Shape:
    """The pairs, the model and the training."""

    steps: int = 40
    dropped: int = 2
    """Steps at the start that are not timed."""
    batch: int = 128
    """Pairs in a step."""
    tokens: int = 4096
    """Tokens in our forward passes."""
    texts: int = 32
    """Texts in sentence-transformers' forward passes: its default."""
    seeds: int = 3
    held_out: int = 500
    """Queries, and documents to search."""
    width: int = 192
    layers: int = 3
    words: int = 400
    median: int = 40
    """Median tokens of a document; lengths are log-normal with `spread`."""
    spread: float = 1.0
    longest: int = 512
    threads: int = 2

    def describe(self) -> str:
        return (
            f"{self.steps} steps of {self.batch} pairs, the first {self.dropped} not timed; queries of 4 to 12 words, "
            f"documents lognormal around {self.median} (sigma {self.spread}, at most {self.longest}); "
            f"{self.tokens:,} tokens in our forward passes, {self.texts} texts in its; "
            f"{self.layers} layers of width {self.width}, fp32, "
            f"{self.threads} threads, {self.seeds} seeds"
        )


def pairs(shape: Shape, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Queries and their documents: word i of a query stands for word i + half in its document, among random others."""
    generator, half = np.random.default_rng([11, seed]), shape.words // 2
    queries, documents = [], []
    lengths = np.clip(generator.lognormal(np.log(shape.median), shape.spread, count), 8, shape.longest - 4).astype(int)
    for length in lengths:
        query = generator.integers(0, half, int(generator.integers(4, 13)))
        document = generator.integers(half, shape.words, length)
        # Half of a document's words, so that they still show in its mean.
        chosen = generator.random(length) < 0.5
        document[chosen] = generator.choice(query, int(chosen.sum())) + half
        queries.append(" ".join(f"w{word}" for word in query))
        documents.append(" ".join(f"w{word}" for word in document))
    return queries, documents


def prepare(folder: Path, shape: Shape) -> None:
    """Write the model's initial weights and the set, with the tables that `biphasic tasks` writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from biphasic.downstream.writer import SCHEMAS

    models = finetuning.Shape(steps=1, width=shape.width, layers=shape.layers, words=shape.words, longest=shape.longest)
    finetuning.prepare(folder, models, 32, 32)
    (folder / "pairs" / "qrels").mkdir(parents=True)
    count = shape.steps * shape.batch
    queries, documents = pairs(shape, count, 0)
    held_queries, held_documents = pairs(shape, shape.held_out, 1)
    ids, empty = [str(index) for index in range(shape.held_out)], [""] * shape.held_out
    tables: dict[str, tuple[str, dict[str, Any]]] = {
        "train": ("pairs", {"query": queries, "positive": documents, "negatives": [[]] * count}),
        "queries": ("queries", {"_id": ids, "text": held_queries}),
        "corpus": ("corpus", {"_id": ids, "title": empty, "text": held_documents}),
        "qrels/test": ("qrels", {"query-id": ids, "corpus-id": ids, "score": [1] * shape.held_out}),
    }
    for name, (schema, columns) in tables.items():
        pq.write_table(pa.table(columns, SCHEMAS[schema]), folder / "pairs" / f"{name}.parquet")
    record = {"kind": "retrieval", "rows": {name: len(next(iter(rows.values()))) for name, (_, rows) in tables.items()}}
    (folder / "pairs" / "task.json").write_text(json.dumps(record))
    (folder / "shape.json").write_text(json.dumps(asdict(shape)))


def train_biphasic(folder: Path, seed: int, shape: Shape) -> dict[str, Any]:
    """Train and score with `src/main.py`: seconds of each step after the first, NDCG@10, last loss."""
    import yaml

    from biphasic.training.metrics_file import read_metrics

    content = {
        "job": "finetune", "run_name": f"retrieval-{seed}", "output": str(folder / "runs"),
        "cache": str(folder / "cache"), "seed": seed, "model": {"path": str(folder / "llama")},
        "task": {"kind": "retrieval", "name": "pairs", "data": str(folder / "pairs"), "max_length": shape.longest,
                 "query_prompt": "", "document_prompt": ""},
        "batch_size": shape.batch, "microbatch_tokens": shape.tokens, "optimizer": {"lr": 1e-3}, "save_model": False,
        "logging": {"tensorboard": False, "progress_bar": False},
    }  # fmt: skip
    path = folder / f"retrieval-{seed}.yaml"
    path.write_text(yaml.safe_dump(content))
    launch([str(ROOT / "src" / "main.py"), str(path)], 1, shape.threads)
    run = folder / "runs" / f"retrieval-{seed}"
    lines = read_metrics(run / "metrics.jsonl")
    [result] = json.loads((run / "record.json").read_text())["results"]
    seconds = np.diff([line["time"] for line in lines]).tolist()
    return {"seconds": seconds, "ndcg": result["test"], "loss": lines[-1]["loss/train/total"]}


def train_sentence_transformers(folder: Path, seed: int, shape: Shape) -> dict[str, Any]:
    """Train and score with sentence-transformers in its own process: as `train_biphasic`."""
    out = folder / f"sentence-transformers-{seed}.json"
    script = str(ROOT / "benchmarks" / "hugging_face.py")
    launch([script, "retrieval", str(folder), str(seed), str(out)], 1, shape.threads)
    return json.loads(out.read_text())


def measure_training(folder: Path, shape: Shape) -> dict[str, Any]:
    """Train on both sides in turn, and return all runs with the `rates`."""
    train = dict(zip(SIDES, (train_biphasic, train_sentence_transformers), strict=True))
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(shape.seeds):
        for side in SIDES:
            say(f"training, seed {seed}: {side}")
            runs[side].append(train[side](folder, seed, shape))
    return {"runs": runs, "rates": training_rates(runs, shape)}


def training_rates(runs: dict[str, list[dict[str, Any]]], shape: Shape) -> dict[str, dict[str, float]]:
    """Pairs a second over the timed steps of all seeds, and the mean and standard deviation of NDCG@10."""
    rates = {}
    for side, of_side in runs.items():
        timed = [seconds for run in of_side for seconds in run["seconds"][shape.dropped - 1 :]]
        scores = [run["ndcg"] for run in of_side]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        rate = shape.batch * len(timed) / sum(timed)
        rates[side] = {"pairs_per_second": rate, "ndcg": statistics.fmean(scores), "spread": spread}
    return rates


def training_rows(rates: dict[str, dict[str, float]]) -> list[list[str]]:
    """The table's rows about training."""
    ours, theirs = (rates[side] for side in SIDES)
    ratio = f"{ours['pairs_per_second'] / theirs['pairs_per_second']:.2f}"
    return [
        [
            f"training: {side}, pairs/s",
            f"{rate['pairs_per_second']:,.1f}",
            *(["", ""] if rate is ours else [ratio, f"≥ {GOAL}"]),
            f"NDCG@10 {rate['ndcg']:.4f} ± {rate['spread']:.4f}",
        ]
        for side, rate in zip(SIDES, (ours, theirs), strict=True)
    ]


def main() -> None:
    shape, _ = parse_options(Shape, __doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        prepare(folder, shape)
        training = measure_training(folder, shape)
    header = ["", "rate", "Biphasic over it", "goal", "quality on held-out queries"]
    numbers, rows = {"shape": asdict(shape), "training": training}, training_rows(training["rates"])
    report("retrieval", "Retrieval over sentence-transformers", header, rows, numbers, note=shape.describe())


if __name__ == "__main__":
    main()
