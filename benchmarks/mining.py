"""Mining hard negatives: `biphasic mine` against sentence-transformers' `mine_hard_negatives`, the same model and texts.

Both take the best documents below 95% of the positive's score. Each round is a whole call, then one that reads the
embeddings of the first from its cache: the search alone, with reading and writing. Biphasic keeps queries with fewer
negatives, sentence-transformers leaves them out; the share of equal negatives is of the queries that both have.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from workload import parse_options, report, say

import finetuning

GOAL = 1.0
SIDES = ("Biphasic", "sentence-transformers")
PARTS = ("whole", "search")
Negatives = dict[str, set[str]]
"""Negatives by query."""


@dataclass(frozen=True)
class Shape:
    """The set, the model and the negatives."""

    pairs: int = 2000
    corpus: int = 8000
    """Documents besides the positives."""
    count: int = 7
    depth: int = 100
    rounds: int = 3
    width: int = 384
    layers: int = 6
    words: int = 2000
    median: int = 40
    """Median tokens of a document; lengths are log-normal with `spread`."""
    spread: float = 0.8
    longest: int = 512
    threads: int = 2

    def describe(self) -> str:
        return (
            f"{self.pairs:,} pairs, {self.pairs + self.corpus:,} documents of about {self.median} tokens, queries of 8; "
            f"{self.count} negatives of the {self.depth} best; a model in EuroBERT's format, {self.layers} layers of width "
            f"{self.width}, fp32, {self.threads} threads; the median of {self.rounds} rounds, in turn. `whole` embeds, "
            "searches, reads and writes, with a loaded model; `search` reads the embeddings from the library's cache. "
            "Biphasic searches in fp64."
        )


def write_set(folder: Path, shape: Shape, models: Any) -> tuple[list[dict[str, str]], list[str]]:
    """Write a set as `biphasic tasks` does; return its pairs, whose queries are words of the documents, and the corpus."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from biphasic.downstream.writer import SCHEMAS

    documents = list(dict.fromkeys(finetuning.texts(models, shape.pairs + shape.corpus, seed=5)[0]))
    pairs = [
        {"query": " ".join(text.split()[::3][:8]), "positive": text, "negatives": []}
        for text in documents[: shape.pairs]
    ]
    corpus = [{"_id": str(at), "title": "", "text": text} for at, text in enumerate(documents[shape.pairs :])]
    folder.mkdir()
    for table, schema, rows in (("train", "pairs", pairs), ("corpus", "corpus", corpus)):
        pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[schema]), folder / f"{table}.parquet")
    record = {"task": "benchmark", "kind": "retrieval", "rows": {"train": len(pairs), "corpus": len(corpus)}}
    (folder / "task.json").write_text(json.dumps(record), encoding="utf-8")
    return pairs, [row["text"] for row in corpus]


def sides(
    model: str, work: Path, shape: Shape, pairs: Any, corpus: list[str]
) -> dict[str, Callable[[str, str], Negatives]]:
    """A function of each library from a cache and an output, two names, to the negatives."""
    import pyarrow.parquet as pq
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    from biphasic.finetuning import mining

    embedder = mining._load(model, work)
    other = SentenceTransformer(model, device="cpu")
    dataset = Dataset.from_list([{name: pair[name] for name in ("query", "positive")} for pair in pairs])

    def biphasic(cache: str, out: str) -> Negatives:
        with mock.patch.object(mining, "_load", return_value=embedder):
            folders = (str(work / name) for name in ("set", out, cache))
            mining.mine(model, *folders, shape.count, shape.depth)
        columns = pq.read_table(work / out / "train.parquet").to_pydict()
        return {query: set(texts) for query, texts in zip(columns["query"], columns["negatives"], strict=True)}

    def sentence_transformers(cache: str, out: str) -> Negatives:
        result = mine_hard_negatives(
            dataset, other, corpus=corpus, num_negatives=shape.count, range_max=shape.depth, relative_margin=0.05,
            output_format="n-tuple", output_scores=True, verbose=False, cache_folder=str(work / f"{cache}-other"),
        )  # fmt: skip
        result.to_parquet(work / f"{out}-other.parquet")
        return {row["query"]: {row[f"negative_{at + 1}"] for at in range(shape.count)} for row in result.to_list()}

    return dict(zip(SIDES, (biphasic, sentence_transformers), strict=True))


def measure(shape: Shape) -> dict[str, Any]:
    import torch

    torch.set_num_threads(shape.threads)
    models = finetuning.Shape(steps=1, width=shape.width, layers=shape.layers, words=shape.words, longest=shape.longest,
                              median=shape.median, spread=shape.spread)  # fmt: skip
    seconds: dict[str, dict[str, list[float]]] = {side: {part: [] for part in PARTS} for side in SIDES}
    negatives: dict[str, Negatives] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        finetuning.prepare(work / "models", models, 32, 32)
        pairs, corpus = write_set(work / "set", shape, models)
        for number in range(shape.rounds):
            say(f"round {number + 1} of {shape.rounds}")
            for side, mined in sides(str(work / "models/llama"), work, shape, pairs, corpus).items():
                for part in PARTS:
                    start = time.monotonic()
                    negatives[side] = mined(f"cache{number}", f"{part}{number}")
                    seconds[side][part].append(time.monotonic() - start)
    ours, other = (negatives[side] for side in SIDES)
    common = ours.keys() & other.keys()
    agree = sum(len(ours[query] & other[query]) for query in common) / max(
        sum(len(other[query]) for query in common), 1
    )
    about = {"shape": asdict(shape), "queries": {side: len(negatives[side]) for side in SIDES}}
    return {**about, "seconds": seconds, "agree": agree}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows, compared = [], f" of {min(results['queries'].values()):,} queries"
    for part in PARTS:
        ours, other = (statistics.median(results["seconds"][side][part]) for side in SIDES)
        rates = [f"{results['shape']['pairs'] / seconds:,.0f}" for seconds in (ours, other)]
        rows.append([part, *rates, f"{other / ours:.2f}", f"≥ {GOAL:g}", f"{results['agree']:.2%}{compared}"])
    return ["", *(f"{side}, queries/s" for side in SIDES), "Biphasic over it", "goal", "equal negatives"], rows


def main() -> None:
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    report(
        "mining", "Mining hard negatives over sentence-transformers", *table(results), results, note=shape.describe()
    )


if __name__ == "__main__":
    main()
