"""Score the quickstart's encoders that were fine-tuned on retrieval, and BM25, with mteb. Writes FOLDER/scores.json.

Each query is the first line of a docstring of a test package, and its relevant document is the rest of that docstring. The
queries search the documents of the test and validation packages.

    python recipes/quickstart/score.py runs/quickstart
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from biphasic.errors import UserError
from biphasic.storage import json_bytes, open_store

PAIRS = Path("runs/quickstart/text/pairs")
SYSTEMS = {
    "CLM, then MLM": "clm-mlm-finetuned",
    "MLM": "mlm-finetuned",
    "CLM": "clm-finetuned",
    "untrained": "untrained-finetuned",
    "BM25": None,
}
"""The runs of the encoders, by the names in tables."""


def score_systems(folder: Path, pairs: Path) -> dict[str, Any]:
    """Score all systems.

    Args:
        folder: that of the fine-tuned runs.
        pairs: a retrieval set with the split `test`.

    Returns:
        `queries`, `documents`, and `scores` by system: `ndcg_at_10`, and its 95% `interval`, a bootstrap over the queries.

    Raises:
        UserError: a model or the set is missing or can't be read.
    """
    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.evaluation.retriever import Retriever
    from biphasic.evaluation.scoring import bm25, bootstrap_interval, score
    from biphasic.evaluation.sets import read_set
    from biphasic.model.encoder import load_encoder

    task = read_set(str(pairs), "Docstrings", "eng-Latn", only=["test"])
    content: dict[str, Any] = {"scores": {}}
    for name, run in tqdm(SYSTEMS.items(), desc="systems scored", unit="system"):
        if run is None:
            system = bm25()
        else:
            # An encoder reads as much of a text as in fine-tuning; BM25 reads all of it.
            system = Retriever(EncoderEmbedder(load_encoder(str(folder / run / "model")), f"biphasic/{run}", run))
        [[result], _] = score(system, task)
        interval = bootstrap_interval(list(result.by_query.values()))
        content["scores"][name] = {"ndcg_at_10": result.ndcg_at_10, "interval": interval}
        content |= {"queries": len(result.by_query), "documents": result.documents}
    return content


def main(arguments: list[str] | None = None) -> int:
    """Score all systems. Exit status 2 when a model or the set is missing."""
    parser = argparse.ArgumentParser(description="Score the quickstart's encoders beside BM25.")
    parser.add_argument("folder", type=Path, help="of the fine-tuned runs")
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    options = parser.parse_args(arguments)
    try:
        content = score_systems(options.folder, options.pairs)
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    open_store(str(options.folder)).write("scores.json", json_bytes(content))
    for name, values in content["scores"].items():
        print(f"{name}: NDCG@10 {values['ndcg_at_10']:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
