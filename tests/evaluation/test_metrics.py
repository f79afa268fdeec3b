"""Each metric against another implementation, published examples, and its corner cases."""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter

import numpy as np
import pytest
import pytrec_eval
from sklearn.metrics import accuracy_score, f1_score
from torchmetrics.text import SQuAD

from biphasic.evaluation.metrics import (
    accuracy,
    best_no_answer_threshold,
    entity_scores,
    exact_match,
    f1,
    mrr_at,
    ndcg_at,
    normalize_answer,
    question_answering_scores,
    recall_at,
    token_f1,
)

WORDS = [
    "the",
    "a",
    "An",
    "Paris",
    "paris,",
    "café",
    "CAFÉ",
    "ÉCOLE",
    "50%",
    "10",
    "U.S.",
    "—",
    "...",
    "Zürich",
    "city's",
]


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("positive", [0, 1])
def test_accuracy_and_f1_are_scikit_learn_s(labels: int, positive: int) -> None:
    generator = np.random.default_rng(labels)
    for count in (1, 2, 50, 999):
        gold, predicted = generator.integers(labels, size=(2, count)).tolist()
        assert accuracy(gold, predicted) == pytest.approx(accuracy_score(gold, predicted), abs=1e-12)
        theirs = f1_score(np.array(gold) == positive, np.array(predicted) == positive, zero_division=0)
        assert f1(gold, predicted, positive) == pytest.approx(theirs, abs=1e-12)


def test_classification_s_corners() -> None:
    assert accuracy([0, 1, 2, 2], [0, 1, 2, 0]) == 0.75
    assert f1([1, 1, 0, 0], [1, 0, 1, 0]) == 0.5
    assert f1([0, 0], [0, 0]) == 0.0  # neither given nor predicted
    assert f1([0, 0], [0, 0], positive=0) == 1.0
    for metric in (accuracy, f1):
        with pytest.raises(ValueError, match="no examples"):
            metric([], [])
        with pytest.raises(ValueError, match="2 examples, but 1"):
            metric([1, 0], [1])


def entities(labels: list[str]) -> set[tuple[str, int, int]]:
    """As conlleval counts them."""
    found, kind, start = set(), None, 0
    for place, label in enumerate([*labels, "O"]):
        prefix, _, of_kind = label.partition("-")
        if kind is not None and not (prefix == "I" and of_kind == kind):
            found.add((kind, start, place - 1))
            kind = None
        if kind is None and prefix != "O":
            kind, start = of_kind, place
    return found


def test_entity_scores_are_conlleval_s() -> None:
    generator = np.random.default_rng(0)
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-WORK_OF-ART", "I-WORK_OF-ART"]
    for shares in ([0.4] + [0.1] * 6, [0.94] + [0.01] * 6):
        gold, predicted = [], []
        for _ in range(200):
            # Neither is well-formed BIO: predictions seldom are.
            gold.append(generator.choice(names, size=int(generator.integers(1, 15)), p=shares).tolist())
            noise = generator.random(len(gold[-1])) < 0.2
            predicted.append(
                [str(generator.choice(names)) if new else old for old, new in zip(gold[-1], noise, strict=True)]
            )
        theirs, ours = ([entities(sentence) for sentence in sentences] for sentences in (gold, predicted))
        right = sum(len(a & b) for a, b in zip(theirs, ours, strict=True))
        given, said = sum(map(len, theirs)), sum(map(len, ours))
        assert 0 < right < min(given, said)
        expected = {"f1": 2 * right / (given + said), "precision": right / said, "recall": right / given}
        assert entity_scores(gold, predicted) == pytest.approx(expected, abs=1e-12)


def test_entity_examples() -> None:
    # seqeval's README.
    gold = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_scores(gold, predicted) == {"f1": 0.5, "precision": 0.5, "recall": 0.5}
    # An inside without a beginning begins an entity: after O, after another type, and at a sentence's start.
    assert entity_scores([["O", "B-PER", "I-PER"]], [["O", "I-PER", "I-PER"]])["f1"] == 1
    assert entity_scores([["B-LOC", "B-PER"]], [["B-LOC", "I-PER"]])["f1"] == 1
    assert entity_scores([["B-PER"], ["B-PER"]], [["B-PER"], ["I-PER"]])["f1"] == 1
    assert entity_scores([["B-PER", "B-PER"]], [["B-PER", "I-PER"]])["f1"] == 0
    # Other sequences than lists.
    assert entity_scores((("B-PER", "O"), ("O", "B-LOC")), (("B-PER", "O"), ("O", "O")))["recall"] == 0.5


def test_entities_that_are_missing_are_no_warning() -> None:
    none, some = [["O", "O"], ["O"]], [["B-PER", "O"], ["O"]]
    zero = {"f1": 0.0, "precision": 0.0, "recall": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert entity_scores(none, none) == zero
        assert entity_scores(some, none) == zero
        assert entity_scores(none, some) == zero
    with pytest.raises(ValueError, match="no sentences"):
        entity_scores([], [])
    with pytest.raises(ValueError, match="2 sentences, but 1"):
        entity_scores(none, none[:1])
    # One label too many here and one too few there.
    with pytest.raises(ValueError, match="sentence 0 has 2 labels, but 1"):
        entity_scores([["O", "O"], ["O"]], [["O"], ["O", "O"]])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("an apple, a  pear\tand\nthe nut.", "apple pear and nut"),
        ("Theatre", "theatre"),  # an article within a word stays
        ("a.", ""),  # punctuation goes first, then articles
        ("A-team", "ateam"),
        ("the-end", "theend"),
        ("here—the—there", "here— —there"),  # an article leaves a space
        ("U.S.", "us"),
        ("$1,000", "1000"),
        ("— « café »", "— « café »"),  # only ASCII's punctuation goes
        ("ÉCOLE Normale", "école normale"),
        ("İstanbul", "i̇stanbul"),
        ("  ", ""),
        ("", ""),
    ],
)
def test_normalizing(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_exact_match_and_token_f1_by_hand() -> None:
    golds = ["Denver Broncos", "The Denver Broncos", "Denver Broncos football team"]
    assert exact_match("the denver broncos!", golds) == 1
    assert exact_match("Broncos", golds) == 0
    assert token_f1("Broncos", golds) == pytest.approx(2 / 3)  # the best of several
    assert token_f1("Denver Denver", ["Denver Broncos"]) == 0.5  # a word counts as often as it is there
    assert token_f1("Carolina", golds) == 0
    # Without an answer only an empty prediction is right.
    for nothing in ([], [""], ["the"], ["..."]):
        assert (exact_match("", nothing), token_f1("", nothing)) == (1, 1)
        assert (exact_match("Denver", nothing), token_f1("Denver", nothing)) == (0, 0)
        assert (exact_match("the", nothing), token_f1("the", nothing)) == (1, 1)
    assert (exact_match("", golds), token_f1("", golds)) == (0, 0)
    # An answer that normalizes to nothing is none beside others.
    assert (exact_match("", ["Denver", "a"]), token_f1("", ["Denver", "a"])) == (0, 0)


def random_questions(seed: int, count: int, least: int) -> tuple[list[list[str]], list[str], list[float]]:
    generator = np.random.default_rng(seed)

    def text(shortest: int) -> str:
        return " ".join(generator.choice(WORDS, size=int(generator.integers(shortest, 5))))

    golds = [[text(1) for _ in range(int(generator.integers(least, 4)))] for _ in range(count)]
    predictions = [text(0) if generator.random() < 0.7 or not gold else gold[-1].upper() for gold in golds]
    # An unanswerable question has a higher score more often; some scores come several times, many are negative.
    no_answer = [round(float(generator.normal(2.0 * (not gold))), 1) for gold in golds]
    return golds, predictions, no_answer


def squad_2(
    golds: list[list[str]], predictions: list[str], no_answer: list[float] | None, threshold: float = 1.0
) -> dict[str, float]:
    """What SQuAD v2.0's script computes, from 0 to 1, written once more."""

    def words(text: str) -> list[str]:
        kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    def overlap(answer: list[str], prediction: list[str]) -> float:
        shared = (Counter(answer) & Counter(prediction)).total()
        if not shared:
            return float(answer == prediction == [])
        precision, recall = shared / len(prediction), shared / len(answer)
        return 2 * precision * recall / (precision + recall)

    exact, f1_scores = [], []
    for answers, text in zip(golds, predictions, strict=True):
        kept = [words(answer) for answer in answers if words(answer)] or [[]]
        exact.append(float(words(text) in kept))
        f1_scores.append(max(overlap(answer, words(text)) for answer in kept))
    scores = [0.0] * len(golds) if no_answer is None else no_answer

    def mean(values: list[float], which: list[int]) -> float:
        decided = [float(not golds[i]) if scores[i] > threshold else values[i] for i in which]
        return sum(decided) / len(decided) if decided else math.nan

    everything = list(range(len(golds)))
    found = {"exact": mean(exact, everything), "f1": mean(f1_scores, everything)}
    found["HasAns_f1"] = mean(f1_scores, [i for i in everything if golds[i]])
    found["NoAns_f1"] = mean(f1_scores, [i for i in everything if not golds[i]])
    total = best = sum(not answers for answers in golds)
    found["best_f1_thresh"] = 0.0
    for i in sorted(everything, key=scores.__getitem__):
        total += f1_scores[i] if golds[i] else -float(predictions[i] != "")
        if total > best:
            best, found["best_f1_thresh"] = total, scores[i]
    return {**found, "best_f1": best / len(golds)}


@pytest.mark.parametrize("seed", range(5))
def test_question_answering_is_squad_2_s(seed: int) -> None:
    golds, predictions, no_answer = random_questions(seed, 300, least=0)
    for scores, threshold in ((None, None), *((no_answer, threshold) for threshold in (-9.0, 0.0, no_answer[5], 9.0))):
        theirs = squad_2(golds, predictions, scores, 1.0 if threshold is None else threshold)
        names = {"exact_match": "exact", "f1": "f1", "has_answer_f1": "HasAns_f1", "no_answer_f1": "NoAns_f1"}
        found = question_answering_scores(golds, predictions, scores, threshold)
        assert found == pytest.approx({ours: theirs[name] for ours, name in names.items()}, abs=1e-9)
    assert 0 < found["exact_match"] < found["f1"] < 1


def test_question_answering_is_squad_1_s() -> None:
    golds, predictions, _ = random_questions(7, 300, least=1)
    # v1.1 keeps answers that normalize to nothing; SQuAD has none.
    golds = [[text for text in texts if normalize_answer(text)] or ["Paris"] for texts in golds]
    metric = SQuAD()
    metric.update(
        [{"id": str(number), "prediction_text": text} for number, text in enumerate(predictions)],
        [{"id": str(number), "answers": {"text": texts, "answer_start": [0]}} for number, texts in enumerate(golds)],
    )
    theirs = {name: float(value) / 100 for name, value in metric.compute().items()}
    assert question_answering_scores(golds, predictions, None, None) == pytest.approx(theirs, abs=1e-6)


def test_which_question_answering_scores_there_are() -> None:
    both = question_answering_scores([["x y"], []], ["x", ""], None, None)
    assert both == pytest.approx({"exact_match": 0.5, "f1": 5 / 6, "has_answer_f1": 2 / 3, "no_answer_f1": 1.0})
    assert question_answering_scores([[]], ["x"], None, None) == {"exact_match": 0, "f1": 0, "no_answer_f1": 0}
    assert question_answering_scores([["x"]], ["X"], [0.5], 0.5) == {"exact_match": 1, "f1": 1}  # not above it
    assert question_answering_scores([["x"]], ["X"], [0.5], 0.4) == {"exact_match": 0, "f1": 0}
    # ReCoRD: the query's entity under any of its names.
    assert question_answering_scores([["Barack Obama", "Obama"]], ["obama"], None, None)["exact_match"] == 1
    # No answer is wrong where there are some, even if they normalize to nothing.
    assert question_answering_scores([["the"]], ["the"], [1.0], 0.0) == {"exact_match": 0, "f1": 0}
    for scores, threshold in (([0.5], None), (None, 0.5)):
        with pytest.raises(ValueError, match="go together"):
            question_answering_scores([["x"]], ["x"], scores, threshold)
    with pytest.raises(ValueError, match="no questions"):
        question_answering_scores([], [], None, None)
    with pytest.raises(ValueError, match="1 questions, but 2"):
        question_answering_scores([["x"]], ["x", "y"], None, None)
    with pytest.raises(ValueError, match="1 questions, but 2"):
        question_answering_scores([["x"]], ["x"], [0.0, 1.0], 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_the_best_of_all(seed: int) -> None:
    golds, predictions, no_answer = random_questions(seed, [1, 2, 5, 120][seed % 4], least=0)
    threshold = best_no_answer_threshold(golds, predictions, no_answer)

    def reached(value: float) -> float:
        return question_answering_scores(golds, predictions, no_answer, value)["f1"]

    best = reached(threshold)
    assert best == pytest.approx(max(map(reached, [min(no_answer) - 1, *no_answer])), abs=1e-9)
    # Of equally good ones the lowest.
    assert all(reached(value) < best - 1e-9 for value in no_answer if value < threshold)
    assert threshold in no_answer or threshold < min(no_answer)


@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_squad_2_s(seed: int) -> None:
    """Where scores are positive and all differ, and no prediction normalizes to nothing without being empty."""
    golds, predictions, _ = random_questions(seed, 200, least=0)
    golds = [[text for text in texts if normalize_answer(text)] for texts in golds]
    predictions = [text if normalize_answer(text) else "" for text in predictions]
    generator = np.random.default_rng(seed)
    no_answer = [float(generator.random() * (0.5 if gold else 1.0)) for gold in golds]
    theirs = squad_2(golds, predictions, no_answer)
    found = best_no_answer_threshold(golds, predictions, no_answer)
    assert found == theirs["best_f1_thresh"]
    assert question_answering_scores(golds, predictions, no_answer, found)["f1"] == pytest.approx(theirs["best_f1"])


def test_the_threshold_s_corners() -> None:
    # Nothing answered is best: just below the lowest, also where that is negative.
    for lowest in (-3.0, 0.0, 4.0):
        threshold = best_no_answer_threshold([[], []], ["x", "y"], [lowest, 5.0])
        assert lowest - 1e-9 < threshold < lowest
    # Two questions with one score can't be told apart.
    assert best_no_answer_threshold([["x"], []], ["x", "y"], [1.0, 1.0]) < 1
    assert best_no_answer_threshold([["x"], ["x"], []], ["x", "x", "y"], [1.0, 1.0, 1.0]) == 1
    # The second is answered for the third's sake.
    assert best_no_answer_threshold([["x"], [], ["x"], ["x"], []], ["x"] * 5, [-2.0, -1.0, 0.0, 1.0, 2.0]) == 1
    assert best_no_answer_threshold([["x"], []], ["x", ""], [0.0, math.inf]) == 0
    for wrong in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="NaN or -inf"):
            best_no_answer_threshold([["x"], []], ["x", "y"], [1.0, wrong])
    with pytest.raises(ValueError, match="no questions"):
        best_no_answer_threshold([], [], [])
    with pytest.raises(ValueError, match="1 questions, but 2"):
        best_no_answer_threshold([["x"]], ["x"], [1.0, 2.0])


@pytest.mark.parametrize("seed", range(4))
def test_retrieval_is_trec_eval_s(seed: int) -> None:
    generator = np.random.default_rng(seed)
    qrels: dict[str, dict[str, int]] = {}
    runs: dict[str, dict[str, float]] = {}
    for number in range(60):
        ids = [f"d{index}" for index in range(int(generator.integers(1, 40)))]
        grades = generator.choice([-1, 0, 1, 2, 3], size=len(ids)).tolist()
        # Some judged documents aren't found, and some that are found aren't judged.
        qrels[f"q{number}"] = {
            id: grade for id, grade in zip(ids, grades, strict=True) if generator.random() < 0.5
        } or {"d0": 0}
        order = generator.permutation(len(ids))
        runs[f"q{number}"] = {
            ids[place]: float(-rank) for rank, place in enumerate(order) if generator.random() < 0.9
        } or {"x": 1.0}
    measures = {"ndcg_cut.1,3,10", "recall.3,10,100", "recip_rank"}
    expected = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(runs)
    for query, run in runs.items():
        ranked, theirs = list(run), expected[query]
        for k in (1, 3, 10):
            assert ndcg_at(ranked, qrels[query], k) == pytest.approx(theirs[f"ndcg_cut_{k}"], abs=1e-9)
        for k in (3, 10, 100):
            assert recall_at(ranked, qrels[query], k) == pytest.approx(theirs[f"recall_{k}"], abs=1e-9)
        assert mrr_at(ranked, qrels[query], 100) == pytest.approx(theirs["recip_rank"], abs=1e-9)
        cut = theirs["recip_rank"] if theirs["recip_rank"] >= 1 / 3 - 1e-9 else 0
        assert mrr_at(ranked, qrels[query], 3) == pytest.approx(cut, abs=1e-9)


def test_retrieval_examples() -> None:
    # Wikipedia's, "Discounted cumulative gain": the third to last is not found.
    grades = {"1": 3, "2": 2, "3": 3, "4": 0, "5": 1, "6": 2, "7": 3, "8": 2}
    assert ndcg_at(list("123456"), grades, 6) == pytest.approx(0.785, abs=5e-4)
    # Nothing relevant among the first k, or at all; fewer documents than k.
    assert (ndcg_at(["a", "b"], {"b": 1}, 1), mrr_at(["a", "b"], {"b": 1}, 1), recall_at(["a", "b"], {"b": 1}, 1)) == (
        0,
        0,
        0,
    )
    assert (ndcg_at(["a"], {"a": 0}), mrr_at(["a"], {"a": 0}), recall_at(["a"], {"a": 0})) == (0, 0, 0)
    assert (ndcg_at(["a"], {}), mrr_at(["a"], {}), recall_at(["a"], {})) == (0, 0, 0)
    assert (ndcg_at([], {"a": 1}), mrr_at([], {"a": 1}), recall_at([], {"a": 1})) == (0, 0, 0)
    assert (ndcg_at(["a"], {"a": 2}), mrr_at(["a"], {"a": 2}), recall_at(["a"], {"a": 2})) == (1, 1, 1)
    assert recall_at(["a"], {"a": 1, "b": 3}) == 0.5
    assert mrr_at(["x", "a", "b"], {"a": 1, "b": 3}) == 0.5
