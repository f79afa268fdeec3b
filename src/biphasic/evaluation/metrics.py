"""Scores of predictions, from plain lists; all are shares of 1."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(gold: Sequence[int], predicted: Sequence[int]) -> float:
    """The share of examples whose label is predicted (SST-2, MNLI, QQP).

    Args:
        gold: a label for each example.
        predicted: the same.

    Raises:
        ValueError: there are no examples, or the lists differ in length.
    """
    theirs, ours = _labels(gold, predicted)
    return float((theirs == ours).mean())


def f1(gold: Sequence[int], predicted: Sequence[int], positive: int = 1) -> float:
    """The F1 of one of the labels, as GLUE has it beside QQP's accuracy.

    Args:
        gold: a label for each example.
        predicted: the same.
        positive: the label that counts; all others are one.

    Returns:
        0 where the label is neither given nor predicted.

    Raises:
        ValueError: there are no examples, or the lists differ in length.
    """
    theirs, ours = (labels == positive for labels in _labels(gold, predicted))
    both = int(theirs.sum() + ours.sum())
    return 2 * int((theirs & ours).sum()) / both if both else 0.0


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities, over all types and sentences together (CoNLL-2003, OntoNotes 5, UNER).

    seqeval's default mode, which is conlleval's and run_ner's: an entity counts if type, first and last word are right, and
    an inside that follows no word of its own type (`I-PER` after `O` or `B-LOC`) begins an entity as `B-PER` does.

    Args:
        gold: the BIO labels of each sentence's words.
        predicted: the same.

    Returns:
        `f1`, `precision`, `recall`; each is 0 where it would divide by zero, so all are 0 for sentences without entities.

    Raises:
        ValueError: there are no sentences, or two lists differ in length.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    _require_same(gold, predicted, "sentences")
    for number, (theirs, ours) in enumerate(zip(gold, predicted, strict=True)):
        if len(theirs) != len(ours):
            raise ValueError(f"sentence {number} has {len(theirs)} labels, but {len(ours)} predicted ones")
    # Of other sequences than lists seqeval would take the whole for one sentence.
    given = [[list(sentence) for sentence in sentences] for sentences in (gold, predicted)]
    found = precision_recall_fscore_support(given[0], given[1], average="micro", zero_division=0)  # pyright: ignore[reportArgumentType]
    precision, recall, score = (float(value) for value in found[:3])  # pyright: ignore[reportArgumentType]
    return {"f1": score, "precision": precision, "recall": recall}


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and needless whitespace, in this order.

    The rule of SQuAD's evaluation scripts, v1.1 and v2.0, which ReCoRD's took over.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 if the prediction is one of the answers, after `normalize_answer`; else 0.

    Args:
        prediction: a text; empty: there is no answer.
        golds: the answers, any of which is right. Those that normalize to nothing are left out, and no answers are the empty
            one (SQuAD v2.0's script).
    """
    return float(normalize_answer(prediction) in _golds(golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """The best F1 of the prediction's words and an answer's, each with how often it occurs, after `normalize_answer`.

    SQuAD v2.0's script: if either is empty, 1 if both are and 0 otherwise. v1.1's and ReCoRD's differ only in answers that
    normalize to nothing (`the`), which they count as wrong even if they are predicted.

    Args:
        prediction: a text; empty: there is no answer.
        golds: as for `exact_match`.
    """
    words = normalize_answer(prediction).split()
    return max(_overlap(words, gold.split()) for gold in _golds(golds))


def best_no_answer_threshold(
    golds: Sequence[Sequence[str]], predictions: Sequence[str], no_answer: Sequence[float]
) -> float:
    """The threshold with the best mean F1: a question whose no-answer score is above it gets no answer.

    The search of SQuAD v2.0's script, over the scores that occur. Unlike it, questions with the same score stand or fall
    together, as they do when the threshold is used, and scores may be negative: the threshold without any answer is just
    below the lowest score, where the script says 0. Find it on validation, and use it on test.

    Args:
        golds: the answers of each question; an empty list: it has none.
        predictions: the best answer of each, whatever its no-answer score.
        no_answer: the higher, the surer that there is none; +inf is allowed.

    Returns:
        Of thresholds that are equally good, the lowest.

    Raises:
        ValueError: there are no questions, the lists differ in length, or a score is NaN or -inf.
    """
    _require_same(golds, predictions, "questions")
    _require_same(golds, no_answer, "questions")
    if any(math.isnan(score) or score == -math.inf for score in no_answer):
        raise ValueError("a no-answer score is NaN or -inf")
    gains: dict[float, float] = {}
    for answers, prediction, score in zip(golds, predictions, no_answer, strict=True):
        gain = token_f1(prediction, answers) - float(not answers)  # over giving no answer
        gains[float(score)] = gains.get(float(score), 0.0) + gain
    total, best, threshold = 0.0, 0.0, math.nextafter(min(gains), -math.inf)
    for score in sorted(gains):
        total += gains[score]
        if total > best + 1e-9:  # less is rounding
            best, threshold = total, score
    return threshold


def question_answering_scores(
    golds: Sequence[Sequence[str]],
    predictions: Sequence[str],
    no_answer: Sequence[float] | None,
    threshold: float | None,
) -> dict[str, float]:
    """Exact match and token F1, each a mean over questions (SQuAD, SQuAD v2, ReCoRD).

    Args:
        golds: the answers of each question, any of which is right; an empty list: it has none.
        predictions: an answer to each; empty: there is none.
        no_answer: the higher, the surer that there is none; only with `threshold`.
        threshold: a question whose no-answer score is above it gets no answer, which is right if it has none.

    Returns:
        `exact_match` and `f1`; where there are questions without answers also `no_answer_f1`, and `has_answer_f1` unless
        those are all.

    Raises:
        ValueError: there are no questions, the lists differ in length, or one of `no_answer` and `threshold` is missing.
    """
    _require_same(golds, predictions, "questions")
    if (no_answer is None) != (threshold is None):
        raise ValueError("no-answer scores and a threshold go together")
    silent = [False] * len(golds)
    if no_answer is not None and threshold is not None:
        _require_same(golds, no_answer, "questions")
        silent = [score > threshold for score in no_answer]
    exact: list[float] = []
    shared: list[float] = []
    for answers, prediction, none in zip(golds, predictions, silent, strict=True):
        # By v2.0's script, no answer is wrong for a question with answers even if all of them normalize to nothing.
        exact.append(float(not answers) if none else exact_match(prediction, answers))
        shared.append(float(not answers) if none else token_f1(prediction, answers))
    scores = {"exact_match": _mean(exact), "f1": _mean(shared)}
    without = [score for answers, score in zip(golds, shared, strict=True) if not answers]
    answerable = [score for answers, score in zip(golds, shared, strict=True) if answers]
    if without:
        scores["no_answer_f1"] = _mean(without)
        if answerable:
            scores["has_answer_f1"] = _mean(answerable)
    return scores


def ndcg_at(ranked: Sequence[str], grades: Mapping[str, int], k: int = 10) -> float:
    """Normalized discounted cumulative gain of the first k: trec_eval's `ndcg_cut`, which mteb reports.

    The gain is the grade itself, and the discount log2(1 + rank).

    Args:
        ranked: documents' ids, best first, each once. trec_eval puts documents of equal score in descending order of their
            ids, as `retrieval_scores` does.
        grades: the query's judged documents; those that are missing, or not above 0, are irrelevant.
        k: how many are looked at; there may be fewer.

    Returns:
        0 for a query without relevant documents.
    """
    best = _discounted(sorted((grade for grade in grades.values() if grade > 0), reverse=True)[:k])
    return _discounted(max(grades.get(document, 0), 0) for document in ranked[:k]) / best if best else 0.0


def mrr_at(ranked: Sequence[str], grades: Mapping[str, int], k: int = 10) -> float:
    """One over the rank of the first relevant document; 0 if it is not among the first k. Arguments as for `ndcg_at`."""
    for rank, document in enumerate(ranked[:k], 1):
        if grades.get(document, 0) > 0:
            return 1 / rank
    return 0.0


def recall_at(ranked: Sequence[str], grades: Mapping[str, int], k: int = 100) -> float:
    """The share of the relevant documents that are among the first k; 0 without any. Arguments as for `ndcg_at`."""
    relevant = sum(grade > 0 for grade in grades.values())
    return sum(grades.get(document, 0) > 0 for document in ranked[:k]) / relevant if relevant else 0.0


def _labels(gold: Sequence[int], predicted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    _require_same(gold, predicted, "examples")
    return np.asarray(gold), np.asarray(predicted)


def _require_same(gold: Sequence[object], predicted: Sequence[object], what: str) -> None:
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} {what}, but {len(predicted)} predicted ones")
    if not len(gold):  # an array has no truth of its own
        raise ValueError(f"no {what}")


def _golds(golds: Sequence[str]) -> list[str]:
    return [text for text in map(normalize_answer, golds) if text] or [""]


def _overlap(words: list[str], gold: list[str]) -> float:
    if not words or not gold:
        return float(words == gold)
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold))


def _discounted(gains: Iterable[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
