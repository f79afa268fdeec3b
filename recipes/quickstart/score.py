"""Score the quickstart's fine-tuned encoders and BM25 on the held-out pairs.

A docstring's first line should find the rest of it. Writes into FOLDER/scores/: scores.json (last), and summary.txt.

    python recipes/quickstart/score.py runs/quickstart
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store

PAIRS = Path("runs/quickstart/text/pairs/test.parquet")
SYSTEMS = {
    "BM25": None,
    "CLM": "clm-finetuned",
    "CLM, then MLM": "clm-mlm-finetuned",
    "untrained": "untrained-finetuned",
    "MLM": "mlm-finetuned",
}
"""The runs of the encoders, by the names in tables."""
COMPARED = (
    ("CLM, then MLM", "MLM"),
    ("CLM, then MLM", "untrained"),
    ("CLM, then MLM", "CLM"),
    ("MLM", "untrained"),
)
"""Pairs of systems whose difference is shown, the first minus the second."""


def pairs_task(file: Path) -> Any:
    """Make a retrieval task of held-out pairs: the corpus is all documents, and each query has one right document."""
    import pyarrow.parquet as pq

    from biphasic.evaluation.sets import retrieval_task

    columns = pq.read_table(file, columns=["query", "positive"]).to_pydict()
    queries = {f"q{row}": text for row, text in enumerate(columns["query"])}
    corpus = {f"d{row}": text for row, text in enumerate(columns["positive"])}
    qrels = {f"q{row}": {f"d{row}": 1} for row in range(len(queries))}
    return retrieval_task("Docstrings", corpus, queries, {"test": qrels})


def score_systems(folder: Path, pairs: Path) -> dict[str, Any]:
    """Score all systems.

    Args:
        folder: that of the fine-tuned runs.
        pairs: Parquet with the columns `query` and `positive`.

    Returns:
        `queries`, `documents`, `scores` by system, and `differences`: each with `first`, `second`, `mean` (of NDCG@10, first
        minus second) and its 95% `interval`, a bootstrap over the queries that both answer.

    Raises:
        UserError: a model is missing or can't be read.
    """
    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.evaluation.retriever import Retriever
    from biphasic.evaluation.scoring import SplitScores, bm25, bootstrap_interval, score
    from biphasic.model.encoder import load_encoder

    results: dict[str, SplitScores] = {}
    task = pairs_task(pairs)
    for name, run in tqdm(SYSTEMS.items(), desc="systems scored", unit="system"):
        if run is None:
            system = bm25()
        else:
            # An encoder reads as much of a text as in fine-tuning; BM25 reads all of it.
            system = Retriever(EncoderEmbedder(load_encoder(str(folder / run / "model")), f"biphasic/{run}", run))
        [results[name]], _ = score(system, task)
    queries = list(results["BM25"].by_query)
    by_query = {name: [result.by_query[query] for query in queries] for name, result in results.items()}
    scores = {
        name: {
            "ndcg_at_10": result.ndcg_at_10,
            "interval": bootstrap_interval(by_query[name]),
            "mrr_at_10": result.mrr_at_10,
            "recall_at_100": result.recall_at_100,
        }
        for name, result in results.items()
    }
    differences = []
    for first, second in COMPARED:
        values = [a - b for a, b in zip(by_query[first], by_query[second], strict=True)]
        mean = sum(values) / len(values)
        differences.append({"first": first, "second": second, "mean": mean, "interval": bootstrap_interval(values)})
    documents = results["BM25"].documents
    return {"queries": len(queries), "documents": documents, "scores": scores, "differences": differences}


def summary(content: dict[str, Any]) -> str:
    """Return the scores and the differences as text."""
    lines = [
        f"NDCG@10 of {content['queries']:,} held-out queries over {content['documents']:,} documents, with 95% intervals; "
        "the encoders are fine-tuned alike:"
    ]
    for name, values in content["scores"].items():
        low, high = values["interval"]
        lines.append(f"  {name:28} {values['ndcg_at_10']:.3f}  [{low:.3f}, {high:.3f}]")
    lines.append("Differences, paired by query:")
    for difference in content["differences"]:
        low, high = difference["interval"]
        name, chance = (
            f"{difference['first']} over {difference['second']}",
            "  may be chance" if low <= 0 <= high else "",
        )
        lines.append(f"  {name:28} {difference['mean']:+.3f}  [{low:+.3f}, {high:+.3f}]{chance}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Score all systems. Exit status 2 when a model or the pairs are missing."""
    parser = argparse.ArgumentParser(description="Score the quickstart's encoders beside BM25.")
    parser.add_argument("folder", type=Path, help="of the fine-tuned runs")
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    options = parser.parse_args(arguments)
    try:
        content = score_systems(options.folder, options.pairs)
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    folder = options.folder / "scores"
    folder.mkdir(parents=True, exist_ok=True)
    text = summary(content)
    (folder / "summary.txt").write_text(text, encoding="utf-8")
    open_store(str(folder)).write("scores.json", json_bytes(content))
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
