"""Score extractive question answering, from 0 to 1, by the rules of SQuAD's evaluation scripts, and JSQuAD's.

`golds` are the correct answers to a question. Answers that normalize to an empty text are ignored; if none is left, the
empty prediction is correct (SQuAD v2.0's script).
"""

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercase, and remove ASCII punctuation, English articles and repeated whitespace (SQuAD's and ReCoRD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _characters(text: str) -> str:
    """Lowercase, and remove `。` at the end and repeated whitespace (JSQuAD's rule)."""
    return " ".join(text.lower().rstrip("。").split())


def _normalized(golds: Sequence[str], normalize: Callable[[str], str] = normalize_answer) -> list[str]:
    return [text for text in map(normalize, golds) if text] or [""]


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1 if the prediction (empty for no answer) equals a correct answer after `normalize_answer`, else 0."""
    return float(normalize_answer(prediction) in _normalized(golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return the best F1 between the words of the prediction and of an answer, counting repeated words.

    If either text is empty, the score is 1 if both are and 0 otherwise, as in SQuAD v2.0's script. The scripts of v1.1
    and ReCoRD differ only for answers that normalize to an empty text (`the`), for which every prediction is wrong.
    """
    return _best_f1(normalize_answer(prediction).split(), [text.split() for text in _normalized(golds)])


def character_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return the best F1 between the characters of the prediction and of an answer, counting repeated characters.

    This is JSQuAD's score (JGLUE's change of transformers' squad_metrics.py): in Japanese, Chinese or Thai, where no spaces
    divide words, `token_f1` gives an answer with one character too many 0. Punctuation and spaces within a text count.
    """
    return _best_f1(_characters(prediction), _normalized(golds, _characters))


def _best_f1(predicted: Sequence[str], golds: Sequence[Sequence[str]]) -> float:
    best = 0.0
    for gold in golds:
        shared = sum((Counter(predicted) & Counter(gold)).values())
        both = predicted and gold
        best = max(best, 2 * shared / (len(predicted) + len(gold)) if both else float(len(predicted) == len(gold)))
    return best


def best_no_answer_threshold(
    golds: Sequence[Sequence[str]], predictions: Sequence[str], no_answer: Sequence[float]
) -> float:
    """Return the threshold with the best mean F1 if questions with a higher no-answer score get no answer.

    This is the search of SQuAD v2.0's script with two differences. Questions with equal scores are treated together, as
    they are when the threshold is applied. Scores may be negative, so the threshold that leaves all questions
    unanswered is just below the lowest score instead of 0. Of equally good thresholds, the lowest is returned.
    `predictions` has the best answer to each question, regardless of its no-answer score, which may be +inf.
    """
    gains: defaultdict[float, float] = defaultdict(float)
    for answers, prediction, score in zip(golds, predictions, no_answer, strict=True):
        gains[float(score)] += token_f1(prediction, answers) - float(not answers)  # the gain over giving no answer
    total, best, threshold = 0.0, 0.0, math.nextafter(min(gains), -math.inf)
    for score in sorted(gains):
        total += gains[score]
        if total > best + 1e-9:  # smaller differences are rounding errors
            best, threshold = total, score
    return threshold


def squad_scores(
    golds: Sequence[Sequence[str]],
    predictions: Sequence[str],
    no_answer: Sequence[float] | None = None,
    threshold: float = math.inf,
) -> dict[str, float]:
    """Return `exact_match`, `f1` (SQuAD, SQuAD v2, ReCoRD) and `character_f1`, averaged over the questions.

    A question whose `no_answer` score is above the `threshold` gets no answer instead of its prediction. If some
    questions have no answer, `no_answer_f1` is also returned, and `has_answer_f1` if others have one.
    """
    measures = {"exact_match": exact_match, "f1": token_f1, "character_f1": character_f1}
    scores: dict[str, list[float]] = {name: [] for name in measures}
    rows = zip(golds, predictions, [-math.inf] * len(golds) if no_answer is None else no_answer, strict=True)
    for answers, prediction, score in rows:
        for name, measure in measures.items():
            # In v2.0's script, no answer is wrong for a question with answers even if all of them normalize to nothing.
            scores[name].append(float(not answers) if score > threshold else measure(prediction, answers))
    if not all(golds):
        pairs = list(zip(scores["f1"], golds, strict=True))
        scores["no_answer_f1"] = [f1 for f1, answers in pairs if not answers]
        if any(golds):
            scores["has_answer_f1"] = [f1 for f1, answers in pairs if answers]
    return {name: fmean(values) for name, values in scores.items()}
