"""One system on one task by mteb's rules, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mteb
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.results import TaskResult

from biphasic.evaluation.bootstrap import bootstrap_interval
from biphasic.versions import require_form

BM25 = "mteb/baseline-bm25s"


@dataclass(frozen=True)
class Scores:
    """What a system reached on a split of a task: mteb's averages.

    `metric` and `value` are the task's main score. What follows is retrieval's: `interval` is NDCG@10's 95% bootstrap
    interval over queries, `by_query` NDCG@10 of each query by its id.
    """

    task: str
    subset: str
    split: str
    metric: str
    value: float
    ndcg_at_10: float | None = None
    mrr_at_10: float | None = None
    recall_at_100: float | None = None
    interval: tuple[float, float] | None = None
    queries: int | None = None
    documents: int | None = None
    by_query: dict[str, float] = field(default_factory=dict, repr=False)


def bm25() -> Any:
    """mteb's BM25 baseline (bm25s; stemmer and stop words of the task's language)."""
    return mteb.get_model(BM25)


def score(system: Any, task: Any) -> tuple[list[Scores], TaskResult]:
    """Score anything that mteb takes: a `Retriever`, `bm25()`, a SentenceTransformer.

    Args:
        system: what is scored.
        task: of mteb's.

    Returns:
        A `Scores` for each subset and split, and mteb's own result.
    """
    loaded = task.data_loaded
    if not loaded:
        task.load_data()
    with _by_query(task) as seen:
        found = mteb.evaluate(
            system, task, cache=None, co2_tracker=False, show_progress_bar=False, overwrite_strategy="always"
        )
    result = found.task_results[0]
    metric = task.metadata.main_score
    rows = []
    for split, subsets in result.scores.items():
        for values in subsets:
            more: dict[str, Any] = seen.get((split, values["hf_subset"]), {})
            if more:
                names = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
                more = {**more, **{name: float(values[name]) for name in names}}  # pyright: ignore[reportArgumentType]
                more["interval"] = bootstrap_interval(list(more["by_query"].values()))
            main = float(values["main_score"])  # pyright: ignore[reportArgumentType]
            rows.append(Scores(task.metadata.name, str(values["hf_subset"]), split, metric, main, **more))
    if not loaded:
        task.unload_data()
    return rows, result


@contextmanager
def _by_query(task: Any) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    """What a retrieval task says of each query, which mteb averages and forgets."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    if not isinstance(task, AbsTaskRetrieval):
        yield seen
        return

    def note(scores: Any, qrels: Any, results: Any, hf_split: str, hf_subset: str) -> dict[str, float]:
        seen[hf_split, hf_subset] = {
            "by_query": {query: values["ndcg_cut_10"] for query, values in scores.items()},
            "queries": len(scores),
            "documents": len(task.dataset[hf_subset][hf_split]["corpus"]),
        }
        return original(scores, qrels, results, hf_split, hf_subset)

    original = require_form("mteb", task, "task_specific_scores", note)
    task.task_specific_scores = note
    try:
        yield seen
    finally:
        del task.task_specific_scores
