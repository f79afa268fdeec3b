"""Score the quickstart's encoders on the held-out pairs: a docstring's first line should find the rest of it.

Writes into runs/quickstart/scores/: scores.json (last), and summary.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store

RUN = Path("runs/quickstart")
SYSTEMS = {
    "BM25": None,
    "untrained": RUN / "untrained",
    "pretrained": RUN / "encoder",
    "untrained, fine-tuned": RUN / "untrained-finetuned" / "model",
    "pretrained, fine-tuned": RUN / "encoder-finetuned" / "model",
}


def pairs_task(file: Path) -> Any:
    """Make a retrieval task of held-out pairs: the corpus is all documents, and each query has one right document."""
    import pyarrow.parquet as pq

    from biphasic.evaluation.sets import retrieval_task

    columns = pq.read_table(file, columns=["query", "positive"]).to_pydict()
    queries = {f"q{row}": text for row, text in enumerate(columns["query"])}
    corpus = {f"d{row}": text for row, text in enumerate(columns["positive"])}
    qrels = {f"q{row}": {f"d{row}": 1} for row in range(len(queries))}
    return retrieval_task("Docstrings", corpus, queries, {"test": qrels})


def main() -> int:
    """Score all systems. Exit status 2 when a model or the pairs are missing."""
    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.evaluation.retriever import Retriever
    from biphasic.evaluation.scoring import SplitScores, bm25, bootstrap_interval, score
    from biphasic.model.encoder import load_encoder

    folder = RUN / "scores"
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, SplitScores] = {}
    try:
        longest = load_encoder(str(SYSTEMS["pretrained, fine-tuned"])).max_length
        task = pairs_task(RUN / "text" / "pairs" / "test.parquet")
        for name, path in tqdm(SYSTEMS.items(), desc="systems scored", unit="system"):
            revision = name.replace(", ", "-")
            if path is None:
                system = bm25()
            else:
                # All encoders read as much of a text as fine-tuning did; BM25 reads all of it.
                encoder = load_encoder(str(path))
                encoder.max_length = min(encoder.max_length, longest)
                system = Retriever(EncoderEmbedder(encoder, f"biphasic/{path.name}", revision))
            [results[name]], _ = score(system, task)
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    queries = list(results["BM25"].by_query)
    scores = {
        name: {
            "ndcg_at_10": scores.ndcg_at_10,
            "interval": bootstrap_interval([scores.by_query[query] for query in queries]),
            "mrr_at_10": scores.mrr_at_10,
            "recall_at_100": scores.recall_at_100,
        }
        for name, scores in results.items()
    }
    trained, untrained = results["pretrained, fine-tuned"].by_query, results["untrained, fine-tuned"].by_query
    differences = [trained[query] - untrained[query] for query in queries]
    gain = {"mean": sum(differences) / len(differences), "interval": bootstrap_interval(differences)}
    documents = results["BM25"].documents
    content = {"queries": len(queries), "documents": documents, "scores": scores, "gain_of_pretraining": gain}
    lines = [f"NDCG@10 of {len(queries):,} held-out queries over {documents:,} documents (95% bootstrap intervals):"]
    for name, values in scores.items():
        low, high = values["interval"]
        lines.append(f"  {name:24} {values['ndcg_at_10']:.4f}  [{low:.4f}, {high:.4f}]")
    low, high = gain["interval"]
    lines.append(f"  {'gain of pretraining':24} {gain['mean']:+.4f}  [{low:+.4f}, {high:+.4f}], both fine-tuned")
    (folder / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    open_store(str(folder)).write("scores.json", json_bytes(content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
