"""Score one system on one task by mteb's rules, with scores for each query, and show scores as a table."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mteb
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.results import TaskResult
from tabulate import tabulate

from biphasic.evaluation.search import Qrels, Run, best_documents
from biphasic.versions import require_form

_COLUMNS = ("task", "split", "documents", "queries", "system", "NDCG@10", "95% interval", "MRR@10", "Recall@100")


@dataclass(frozen=True)
class SplitScores:
    """mteb's scores for a system on one split of a task."""

    task: str
    subset: str
    split: str
    metric: str
    """The task's main metric; `value` is its score. Only tasks of retrieval and reranking have the other scores
    and counts."""
    value: float
    ndcg_at_10: float | None = None
    mrr_at_10: float | None = None
    recall_at_100: float | None = None
    interval: tuple[float, float] | None = None
    """95% bootstrap interval of NDCG@10 over the queries."""
    queries: int | None = None
    documents: int | None = None
    by_query: dict[str, float] = field(default_factory=dict, repr=False)
    """NDCG@10 of each query, by query id."""
    qrels: Qrels = field(default_factory=dict, repr=False)
    texts: dict[str, str] = field(default_factory=dict, repr=False)
    ranking: Run = field(default_factory=dict, repr=False)


def bm25() -> Any:
    """Return mteb's BM25 baseline (bm25s with the stemmer and stop words for the task's language)."""
    return mteb.get_model("mteb/baseline-bm25s")


def score(system: Any, task: Any) -> tuple[list[SplitScores], TaskResult]:
    """Return the scores of a system for each subset and split of a task, and mteb's `TaskResult`.

    Any system that mteb accepts can be scored, such as a `Retriever`, `bm25()` or a SentenceTransformer.
    """
    retrieval: dict[tuple[str, str], dict[str, Any]] = {}  # by split and subset

    def collect(scores: Any, qrels: Any, results: Any, hf_split: str, hf_subset: str) -> dict[str, float]:
        ndcg = {query: values["ndcg_cut_10"] for query, values in scores.items()}
        queries = task.dataset[hf_subset][hf_split]["queries"]
        retrieval[hf_split, hf_subset] = {
            "by_query": ndcg,
            "interval": bootstrap_interval(list(ndcg.values())),
            "qrels": {query: dict(qrels[query]) for query in ndcg},
            "texts": dict(zip(queries["id"][:], map(str, queries["text"][:]), strict=True)),
            "ranking": {query: best_documents(documents) for query, documents in results.items()},
            "queries": len(scores),
            "documents": len(task.dataset[hf_subset][hf_split]["corpus"]),
        }
        return original(scores, qrels, results, hf_split, hf_subset)

    options: dict[str, Any] = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
    with contextlib.ExitStack() as stack:
        if isinstance(task, AbsTaskRetrieval):  # mteb keeps only the averages over the queries
            original = require_form("mteb", task, "task_specific_scores", collect)
            task.task_specific_scores = collect
            stack.callback(delattr, task, "task_specific_scores")
        result = mteb.evaluate(system, task, overwrite_strategy="always", **options).task_results[0]
    rows = []
    for split, subsets in result.scores.items():
        for values in map(dict[str, Any], subsets):
            subset = str(values["hf_subset"])
            if extra := dict(retrieval.get((split, subset), {})):
                extra |= {name: float(values[name]) for name in ("ndcg_at_10", "mrr_at_10", "recall_at_100")}
            main = float(values["main_score"])
            rows.append(SplitScores(task.metadata.name, subset, split, task.metadata.main_score, main, **extra))
    return rows, result


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean over 10,000 resamples of the queries, always the same (Efron, 1979).

    `values` has a score for each query or, to compare two systems, a difference for each query (a paired bootstrap).
    """
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2:  # scipy's bootstrap needs at least two values
        return values[0], values[0]
    # Resampling in batches limits the memory for many queries.
    result = bootstrap((values,), np.mean, n_resamples=10_000, batch=500, method="percentile", rng=0)
    low, high = result.confidence_interval
    return float(low), float(high)


def score_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are also aligned in a terminal.

    Each record has a `system` and its `scores`, dictionaries of `SplitScores`. Main scores other than NDCG@10 are
    named.
    """
    rows = [_row(record["system"], scores) for record in records for scores in record["scores"]]
    align = ["left" if name in ("task", "split", "system") else "right" for name in _COLUMNS]
    return tabulate(rows, _COLUMNS, "pipe", disable_numparse=True, colalign=align if rows else None).splitlines()


def _row(system: str, scores: Mapping[str, Any]) -> tuple[str, ...]:
    split = scores["split"] if scores["subset"] == "default" else f"{scores['subset']}, {scores['split']}"
    counts = ("" if scores[name] is None else f"{scores[name]:,}" for name in ("documents", "queries"))
    is_retrieval = scores["ndcg_at_10"] is not None
    main = _format(scores["ndcg_at_10"]) if is_retrieval else f"{scores['metric']} {_format(scores['value'])}"
    interval = " to ".join(map(_format, scores["interval"] or ()))
    others = (_format(scores[name]) for name in ("mrr_at_10", "recall_at_100"))
    return (scores["task"], split, *counts, system, main, interval, *others)


def _format(score: float | None) -> str:
    return "" if score is None else f"{score:.4f}"
