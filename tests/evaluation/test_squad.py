"""Exact match, token F1 and the no-answer threshold against other implementations, examples and corner cases."""

import math
import re
import string
from collections import Counter

import numpy as np
import pytest
from torchmetrics.text import SQuAD

from biphasic.evaluation.squad import (
    best_no_answer_threshold,
    character_f1,
    exact_match,
    normalize_answer,
    squad_scores,
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


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("an apple, a  pear\tand\nthe nut.", "apple pear and nut"),
        ("Theatre", "theatre"),  # an article within a word stays
        ("a.", ""),  # punctuation is removed before articles
        ("A-team", "ateam"),
        ("the-end", "theend"),
        ("here—the—there", "here— —there"),  # an article leaves a space
        ("U.S.", "us"),
        ("$1,000", "1000"),
        ("— « café »", "— « café »"),  # only ASCII punctuation is removed
        ("ÉCOLE Normale", "école normale"),
        ("İstanbul", "i̇stanbul"),
        ("  ", ""),
        ("", ""),
    ],
)
def test_normalize_answer(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_exact_match_and_token_f1_by_hand() -> None:
    golds = ["Denver Broncos", "The Denver Broncos", "Denver Broncos football team"]
    assert exact_match("the denver broncos!", golds) == 1
    assert exact_match("Broncos", golds) == 0
    assert token_f1("Broncos", golds) == pytest.approx(2 / 3)  # the best of several
    assert token_f1("Denver Denver", ["Denver Broncos"]) == 0.5  # repetitions count
    assert token_f1("Carolina", golds) == 0
    # Without an answer only an empty prediction is right.
    for nothing in ([], [""], ["the"], ["..."]):
        assert (exact_match("", nothing), token_f1("", nothing)) == (1, 1)
        assert (exact_match("Denver", nothing), token_f1("Denver", nothing)) == (0, 0)
        assert (exact_match("the", nothing), token_f1("the", nothing)) == (1, 1)
    assert (exact_match("", golds), token_f1("", golds)) == (0, 0)
    # An answer that normalizes to nothing is ignored beside others.
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


def squad_v2_script(
    golds: list[list[str]], predictions: list[str], no_answer: list[float] | None, threshold: float = 1.0
) -> dict[str, float]:
    """An independent implementation of SQuAD v2.0's script, from 0 to 1."""

    def words(text: str) -> list[str]:
        kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    def overlap(answer: list[str], prediction: list[str]) -> float:
        shared = (Counter(answer) & Counter(prediction)).total()
        if not shared:
            return float(answer == prediction == [])
        precision, recall = shared / len(prediction), shared / len(answer)
        return 2 * precision * recall / (precision + recall)

    def characters(text: str) -> list[str]:  # as JGLUE changes the script for JSQuAD
        return [*re.sub(r"\s+", " ", re.sub("。+$", "", text.lower())).strip()]

    exact, f1_scores, by_characters = [], [], []
    for answers, text in zip(golds, predictions, strict=True):
        known = [characters(answer) for answer in answers if characters(answer)] or [[]]
        by_characters.append(max(overlap(answer, characters(text)) for answer in known))
        kept = [words(answer) for answer in answers if words(answer)] or [[]]
        exact.append(float(words(text) in kept))
        f1_scores.append(max(overlap(answer, words(text)) for answer in kept))
    scores = [0.0] * len(golds) if no_answer is None else no_answer

    def mean(values: list[float], which: list[int]) -> float:
        decided = [float(not golds[i]) if scores[i] > threshold else values[i] for i in which]
        return sum(decided) / len(decided) if decided else math.nan

    questions = list(range(len(golds)))
    reference = {"exact": mean(exact, questions), "f1": mean(f1_scores, questions)}
    reference["character_f1"] = mean(by_characters, questions)
    reference["HasAns_f1"] = mean(f1_scores, [i for i in questions if golds[i]])
    reference["NoAns_f1"] = mean(f1_scores, [i for i in questions if not golds[i]])
    total = best = sum(not answers for answers in golds)
    reference["best_f1_thresh"] = 0.0
    for i in sorted(questions, key=scores.__getitem__):
        total += f1_scores[i] if golds[i] else -float(predictions[i] != "")
        if total > best:
            best, reference["best_f1_thresh"] = total, scores[i]
    return {**reference, "best_f1": best / len(golds)}


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_squad_v2(seed: int) -> None:
    golds, predictions, no_answer = random_questions(seed, 300, least=0)
    names = {"exact_match": "exact", "f1": "f1", "has_answer_f1": "HasAns_f1", "no_answer_f1": "NoAns_f1"}
    names["character_f1"] = "character_f1"
    for scores, threshold in ((None, 1.0), *((no_answer, threshold) for threshold in (-9.0, 0.0, no_answer[5], 9.0))):
        reference = squad_v2_script(golds, predictions, scores, threshold)
        computed = squad_scores(golds, predictions, scores, threshold)
        assert computed == pytest.approx({ours: reference[name] for ours, name in names.items()}, abs=1e-9)
    assert 0 < computed["exact_match"] < computed["f1"] < 1


def test_scores_equal_squad_v1() -> None:
    golds, predictions, _ = random_questions(7, 300, least=1)
    # v1.1 keeps answers that normalize to nothing; SQuAD has none.
    golds = [[text for text in texts if normalize_answer(text)] or ["Paris"] for texts in golds]
    metric = SQuAD()
    metric.update(
        [{"id": str(number), "prediction_text": text} for number, text in enumerate(predictions)],
        [{"id": str(number), "answers": {"text": texts, "answer_start": [0]}} for number, texts in enumerate(golds)],
    )
    reference = {name: float(value) / 100 for name, value in metric.compute().items()}
    scores = squad_scores(golds, predictions)
    assert {name: scores[name] for name in reference} == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize(
    ("prediction", "gold", "words", "characters"),
    [
        ("東京都の", "東京都", 0, 6 / 7),
        ("東京都", "東京都。", 0, 1),
        ("「東京」", "東京", 0, 2 / 3),
        ("กรุงเทพมหานครใน", "กรุงเทพมหานคร", 0, 26 / 28),
        ("नई दिल्ली में", "नई दिल्ली", 4 / 5, 18 / 22),
        (" Tokyo　Tower", "tokyo tower", 1, 1),  # with an ideographic space
        ("the", "a", 1, 0),
        ("。", "東京", 0, 0),
    ],
)
def test_f1_of_words_and_of_characters(prediction: str, gold: str, words: float, characters: float) -> None:
    assert (token_f1(prediction, [gold]), character_f1(prediction, [gold])) == pytest.approx((words, characters))
    assert character_f1(prediction, ["名古屋港水族館", gold]) == pytest.approx(characters)
    assert squad_scores([[gold]], [prediction])["character_f1"] == pytest.approx(characters)
    assert (character_f1("", ["。"]), character_f1("", ["。", gold])) == (1, 0)  # ignored beside another answer


def test_which_scores_are_returned() -> None:
    both = squad_scores([["x y"], []], ["x", ""])
    names = ("exact_match", "f1", "character_f1", "has_answer_f1", "no_answer_f1")
    assert both == pytest.approx(dict(zip(names, (0.5, 5 / 6, 3 / 4, 2 / 3, 1.0), strict=True)))
    right, wrong = dict.fromkeys(names[:3], 1), dict.fromkeys(names[:3], 0)
    assert squad_scores([[]], ["x"]) == {**wrong, "no_answer_f1": 0}
    assert squad_scores([["x"]], ["X"], [0.5], 0.5) == right  # not above the threshold
    assert squad_scores([["x"]], ["X"], [0.5], 0.4) == wrong
    # ReCoRD: the query's entity under any of its names.
    assert squad_scores([["Barack Obama", "Obama"]], ["obama"])["exact_match"] == 1
    # Giving no answer is wrong for a question with answers, even if they normalize to nothing.
    assert squad_scores([["the"]], ["the"], [1.0], 0.0) == wrong
    for golds, predictions, no_answer in (([], [], None), ([["x"]], ["x", "y"], None), ([["x"]], ["x"], [0.0, 1.0])):
        with pytest.raises(ValueError):
            squad_scores(golds, predictions, no_answer, 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_threshold_is_the_best_of_all(seed: int) -> None:
    golds, predictions, no_answer = random_questions(seed, [1, 2, 5, 120][seed % 4], least=0)
    threshold = best_no_answer_threshold(golds, predictions, no_answer)

    def f1_at(value: float) -> float:
        return squad_scores(golds, predictions, no_answer, value)["f1"]

    best = f1_at(threshold)
    assert best == pytest.approx(max(map(f1_at, [min(no_answer) - 1, *no_answer])), abs=1e-9)
    # It is the lowest of equally good ones.
    assert all(f1_at(value) < best - 1e-9 for value in no_answer if value < threshold)
    assert threshold in no_answer or threshold < min(no_answer)


@pytest.mark.parametrize("seed", range(8))
def test_threshold_equals_squad_v2(seed: int) -> None:
    """Scores are positive and all differ, and no prediction normalizes to nothing without being empty."""
    golds, predictions, _ = random_questions(seed, 200, least=0)
    golds = [[text for text in texts if normalize_answer(text)] for texts in golds]
    predictions = [text if normalize_answer(text) else "" for text in predictions]
    generator = np.random.default_rng(seed)
    no_answer = [float(generator.random() * (0.5 if gold else 1.0)) for gold in golds]
    reference = squad_v2_script(golds, predictions, no_answer)
    threshold = best_no_answer_threshold(golds, predictions, no_answer)
    assert threshold == reference["best_f1_thresh"]
    scores = squad_scores(golds, predictions, no_answer, threshold)
    assert scores["f1"] == pytest.approx(reference["best_f1"])


def test_threshold_corner_cases() -> None:
    # Leaving all questions unanswered is best: just below the lowest score, also where that is negative.
    for lowest in (-3.0, 0.0, 4.0):
        threshold = best_no_answer_threshold([[], []], ["x", "y"], [lowest, 5.0])
        assert lowest - 1e-9 < threshold < lowest
    # Questions with equal scores are decided together.
    assert best_no_answer_threshold([["x"], []], ["x", "y"], [1.0, 1.0]) < 1
    assert best_no_answer_threshold([["x"], ["x"], []], ["x", "x", "y"], [1.0, 1.0, 1.0]) == 1
    # The second question is answered wrongly so that the third is answered.
    assert best_no_answer_threshold([["x"], [], ["x"], ["x"], []], ["x"] * 5, [-2.0, -1.0, 0.0, 1.0, 2.0]) == 1
    assert best_no_answer_threshold([["x"], []], ["x", ""], [0.0, math.inf]) == 0
    for golds, no_answer in (([], []), ([["x"]], [1.0, 2.0])):
        with pytest.raises(ValueError):
            best_no_answer_threshold(golds, ["x"] * len(golds), no_answer)
