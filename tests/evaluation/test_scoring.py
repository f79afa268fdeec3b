"""Scores of a system on a task, and bootstrap intervals."""

from typing import Any

import numpy as np
import pytest

from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import bm25, bootstrap_interval, score
from biphasic.evaluation.sets import retrieval_task
from helpers.random_embedder import RandomEmbedder


def test_scores_of_each_split_and_query() -> None:
    """Equal texts have equal random vectors, so that the first two queries find their document first."""
    documents, queries = {"d1": "a", "d2": "b", "d3": "c"}, {"q1": "a", "q2": "b", "q3": "x", "q4": "c"}
    qrels = {"test": {"q1": {"d1": 1}, "q2": {"d2": 1}, "q3": {"d3": 1}}, "dev": {"q4": {"d3": 1}}}
    task = retrieval_task("Small", documents, queries, qrels)
    scores, result = score(Retriever(RandomEmbedder()), task)
    assert not task.data_loaded
    assert "task_specific_scores" not in vars(task)
    assert result.task_name == "Small"
    dev, test = sorted(scores, key=lambda row: row.split)
    assert [(row.task, row.subset, row.split, row.metric) for row in (dev, test)] == [
        ("Small", "default", "dev", "ndcg_at_10"),
        ("Small", "default", "test", "ndcg_at_10"),
    ]
    assert [(row.queries, row.documents) for row in (dev, test)] == [(1, 3), (3, 3)]
    assert (dev.value, dev.ndcg_at_10, dev.mrr_at_10, dev.recall_at_100, dev.interval) == (1, 1, 1, 1, (1, 1))
    assert test.by_query.keys() == {"q1", "q2", "q3"}
    assert test.by_query["q1"] == test.by_query["q2"] == 1
    assert test.value == test.ndcg_at_10 == pytest.approx(np.mean(list(test.by_query.values())), abs=1e-5)
    assert test.interval == bootstrap_interval(list(test.by_query.values()))
    task.load_data()
    assert score(Retriever(RandomEmbedder()), task)[0] == scores
    assert task.data_loaded


def test_a_task_s_own_scores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    task = retrieval_task("Own", {"d1": "a", "d2": "b"}, {"q": "a"}, {"test": {"q": {"d1": 1}}})
    seen = []

    def own(self: Any, scores: Any, qrels: Any, results: Any, hf_split: str, hf_subset: str) -> dict[str, float]:
        seen.append((scores["q"]["ndcg_cut_10"], qrels["q"], list(results["q"]), hf_split, hf_subset))
        return {"own": 0.25}

    monkeypatch.setattr(type(task), "task_specific_scores", own)
    assert score(Retriever(RandomEmbedder()), task)[1].scores["test"][0]["own"] == 0.25
    assert seen == [(1, {"d1": 1}, ["d1", "d2"], "test", "default")]


def test_bm25_finds_a_document_by_its_rare_word() -> None:
    documents = {"d1": "the cat sat", "d2": "the dog barked", "d3": "the bird sang"}
    task = retrieval_task("Words", documents, {"q": "dog"}, {"test": {"q": {"d2": 1}}})
    [row] = score(bm25(), task)[0]
    assert row.ndcg_at_10 == 1


def test_interval_is_of_the_resampled_means() -> None:
    values = np.random.default_rng(2).random(37)
    resamples = values[np.random.default_rng(0).integers(37, size=(10_000, 37))]
    expected = np.percentile(resamples.mean(1), [2.5, 97.5])
    assert bootstrap_interval(values.tolist()) == pytest.approx(expected, abs=1e-12)


def test_interval_of_a_large_sample_is_close_to_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(0.4, 0.2, 2000)
    low, high = bootstrap_interval(values.tolist())
    half = 1.96 * values.std() / 2000**0.5
    assert abs(low - (values.mean() - half)) < 0.1 * half
    assert abs(high - (values.mean() + half)) < 0.1 * half


def test_equal_values_have_equal_intervals() -> None:
    values = np.random.default_rng(1).random(50).tolist()
    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_equal_values_have_an_empty_interval() -> None:
    assert np.allclose(bootstrap_interval([0.7] * 50), 0.7)
    assert bootstrap_interval([0.7]) == (0.7, 0.7)
    assert bootstrap_interval([0.0, 1.0]) == (0, 1)
