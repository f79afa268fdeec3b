"""Entity scores against conlleval's counting, and examples."""

import warnings

import numpy as np
import pytest

from biphasic.finetuning.classification import entity_scores


def entities(labels: list[str]) -> set[tuple[str, int, int]]:
    """Count entities as conlleval does: type, first and last word."""
    spans, kind, start = set(), None, 0
    for place, label in enumerate([*labels, "O"]):
        prefix, _, label_kind = label.partition("-")
        if kind is not None and not (prefix == "I" and label_kind == kind):
            spans.add((kind, start, place - 1))
            kind = None
        if kind is None and prefix != "O":
            kind, start = label_kind, place
    return spans


@pytest.mark.parametrize("shares", [[0.4] + [0.1] * 6, [0.94] + [0.01] * 6])
def test_scores_equal_conlleval(shares: list[float]) -> None:
    generator = np.random.default_rng(0)
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-WORK_OF-ART", "I-WORK_OF-ART"]
    gold, predicted = [], []
    for _ in range(200):
        # Neither is well-formed BIO: predictions seldom are.
        gold.append(generator.choice(names, size=int(generator.integers(1, 15)), p=shares).tolist())
        noise = generator.random(len(gold[-1])) < 0.2
        predicted.append([str(generator.choice(names)) if new else old for old, new in zip(gold[-1], noise, strict=True)])
    gold_spans, predicted_spans = ([entities(sentence) for sentence in sentences] for sentences in (gold, predicted))
    right = sum(len(a & b) for a, b in zip(gold_spans, predicted_spans, strict=True))
    in_gold, in_predicted = sum(map(len, gold_spans)), sum(map(len, predicted_spans))
    assert 0 < right < min(in_gold, in_predicted)
    f1 = 2 * right / (in_gold + in_predicted)
    expected = {"f1": f1, "precision": right / in_predicted, "recall": right / in_gold}
    assert entity_scores(gold, predicted) == pytest.approx(expected, abs=1e-12)


def test_examples() -> None:
    # seqeval's README.
    gold = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert entity_scores(gold, predicted) == {"f1": 0.5, "precision": 0.5, "recall": 0.5}
    # An inside label without a beginning begins an entity: after O, after another type, and at a sentence's start.
    assert entity_scores([["O", "B-PER", "I-PER"]], [["O", "I-PER", "I-PER"]])["f1"] == 1
    assert entity_scores([["B-LOC", "B-PER"]], [["B-LOC", "I-PER"]])["f1"] == 1
    assert entity_scores([["B-PER"], ["B-PER"]], [["B-PER"], ["I-PER"]])["f1"] == 1
    assert entity_scores([["B-PER", "B-PER"]], [["B-PER", "I-PER"]])["f1"] == 0


def test_sentences_without_entities_score_zero_without_warnings() -> None:
    none, some = [["O", "O"], ["O"]], [["B-PER", "O"], ["O"]]
    zero = {"f1": 0.0, "precision": 0.0, "recall": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gold, predicted in ((none, none), (some, none), (none, some)):
            assert entity_scores(gold, predicted) == zero
