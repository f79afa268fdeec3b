"""A dense model's ranking, with which recipes that train other kinds of models compare theirs."""

from __future__ import annotations

import gzip
from pathlib import Path
from statistics import fmean
from typing import Any

from biphasic.errors import UserError
from biphasic.evaluation.scoring import SplitScores, bootstrap_interval
from biphasic.evaluation.search import Qrels, Run, scores_by_query


def read_trec_run(file: Path) -> Run:
    """Return the ranking in a file of TREC's run format, compressed by gzip. Raises OSError if it can't be read."""
    run: Run = {}
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, []).append((document, float(score)))
    return run


def compare(scores: SplitScores, ranking: Run, qrels: Qrels) -> dict[str, Any]:
    """Return NDCG@10 of a `system`, of another `ranking` of its queries, and their `difference`, each with its interval.

    They are printed too.

    Raises:
        UserError: the ranking has other queries.
    """
    if ranking.keys() != scores.by_query.keys():
        raise UserError(f"{scores.task}: the ranking to compare with has other queries than the split {scores.split}")
    other = scores_by_query(ranking, qrels, "ndcg_cut_10", 10)
    differences = [scores.by_query[query] - value for query, value in other.items()]
    columns = {"system": list(scores.by_query.values()), "ranking": list(other.values()), "difference": differences}
    result = {name: {"ndcg_at_10": fmean(x), "interval": bootstrap_interval(x)} for name, x in columns.items()}
    for name, values in result.items():
        print(f"{name}: {values['ndcg_at_10']:.3f} ({values['interval'][0]:.3f} to {values['interval'][1]:.3f})")
    return result
