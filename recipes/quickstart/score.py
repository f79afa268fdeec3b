"""Score the quickstart's encoders on the held-out pairs: a docstring's first line should find the rest of it.

Writes into runs/quickstart/scores/: scores.json (last), and summary.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from biphasic.config.errors import UserError
from biphasic.storage import as_bytes, store

RUN = Path("runs/quickstart")
SYSTEMS = {
    "BM25": None,
    "untrained": RUN / "untrained",
    "pretrained": RUN / "encoder",
    "untrained, fine-tuned": RUN / "untrained-finetuned" / "model",
    "pretrained, fine-tuned": RUN / "encoder-finetuned" / "model",
}


def main() -> int:
    """Score all systems. Exit status 2 when something isn't there."""
    from biphasic.evaluation.bootstrap import bootstrap_interval
    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.evaluation.retriever import Retriever
    from biphasic.evaluation.scoring import Scores, bm25, score
    from biphasic.evaluation.sets import retrieval_from_pairs
    from biphasic.model.encoder import load_encoder

    folder = RUN / "scores"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Scores] = {}
    try:
        longest = load_encoder(str(SYSTEMS["pretrained, fine-tuned"])).max_length
        task = retrieval_from_pairs("Docstrings", [str(RUN / "text" / "pairs" / "test.parquet")])
        for name, path in tqdm(SYSTEMS.items(), desc="systems scored", unit="system"):
            revision = name.replace(", ", "-")
            if path is None:
                system = bm25()
            else:
                # All encoders see as much of a text as fine-tuning showed; BM25 sees the whole.
                encoder = load_encoder(str(path))
                encoder.max_length = min(encoder.max_length, longest)
                system = Retriever(EncoderEmbedder(encoder, f"biphasic/{path.name}", revision))
            [found[name]], _ = score(system, task)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    queries = list(found["BM25"].by_query)
    scores = {
        name: {
            "ndcg_at_10": scores.ndcg_at_10,
            "interval": bootstrap_interval([scores.by_query[query] for query in queries]),
            "mrr_at_10": scores.mrr_at_10,
            "recall_at_100": scores.recall_at_100,
        }
        for name, scores in found.items()
    }
    trained, untrained = found["pretrained, fine-tuned"].by_query, found["untrained, fine-tuned"].by_query
    differences = [trained[query] - untrained[query] for query in queries]
    gain = {"mean": sum(differences) / len(differences), "interval": bootstrap_interval(differences)}
    documents = found["BM25"].documents
    content = {"queries": len(queries), "documents": documents, "scores": scores, "gain_of_pretraining": gain}
    lines = [f"NDCG@10 of {len(queries):,} held-out queries over {documents:,} documents (95% bootstrap intervals):"]
    for name, values in scores.items():
        low, high = values["interval"]
        lines.append(f"  {name:24} {values['ndcg_at_10']:.4f}  [{low:.4f}, {high:.4f}]")
    low, high = gain["interval"]
    lines.append(f"  {'gain of pretraining':24} {gain['mean']:+.4f}  [{low:+.4f}, {high:+.4f}], both fine-tuned")
    (folder / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    store(str(folder)).write("scores.json", as_bytes(content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
