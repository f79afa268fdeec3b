"""Read rankings and judge them with trec_eval."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pytrec_eval import RelevanceEvaluator


def read_run(file: Path) -> dict[str, dict[str, float]]:
    """Return the scores of each query's documents in a file of TREC's run format."""
    ranked: dict[str, dict[str, float]] = {}
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        query, q0, document, rank, score, tag = line.split()
        assert (q0, tag) == ("Q0", "biphasic")
        ranked.setdefault(query, {})[document] = float(score)
        assert len(ranked[query]) == int(rank)
    return ranked


def grades(judgments: Iterable[Iterable[Any]]) -> dict[str, dict[str, int]]:
    """Return each query's grades by document, from rows of query, document and grade."""
    qrels: dict[str, dict[str, int]] = {}
    for query, document, grade in judgments:
        qrels.setdefault(query, {})[document] = grade
    return qrels


def mean_ndcg(qrels: dict[str, dict[str, int]], ranked: dict[str, dict[str, float]]) -> float:
    """Return trec_eval's NDCG@10. Every judged query has a ranking."""
    values = RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(ranked)
    assert values.keys() == qrels.keys()
    return float(np.mean([value["ndcg_cut_10"] for value in values.values()]))
