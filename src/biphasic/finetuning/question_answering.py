"""Fine-tuning for extractive question answering: predict the span of a context that answers a question.

By its first and last token, or, as in the paper, by labelling each token as inside or outside the answer.
"""

import math
import warnings
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged
from biphasic.errors import UserError
from biphasic.evaluation.squad import best_no_answer_threshold, squad_scores
from biphasic.finetuning.classification import TokenClassification
from biphasic.finetuning.task import Columns, Examples, PredictionTask, TaskBatch
from biphasic.finetuning.truncation import windows
from biphasic.model.heads import TokenHead
from biphasic.model.segments import Segments

Span = tuple[float, int, int]
"""Score, negative first character and negative end of a span in the context, so that a larger tuple is a better span."""


class QuestionAnswering(PredictionTask):
    """Trains with cross-entropy on the answer's start and end among a window's tokens; scores exact match and token F1.

    A long context is split into overlapping windows, each with the complete question before it; each window is an example.
    If a window doesn't contain a complete answer, its first token is the target, as in Hugging Face's run_qa.
    """

    family = "question_answering"
    inputs = ["question", "context"]

    def build_head(self, width: int) -> nn.Module:
        return TokenHead(width, 2)

    def tokenize(self, columns: Columns, title: str) -> Examples:
        """Return a text for each window.

        `labels` has the positions of the answer's first and last token, or two zeros; `about` the question's row and
        the position of the context's first token; `offsets` each context token's characters, [first, end).
        """
        tokenizer = self.text_tokenizer
        examples = {name: list[Any]() for name in ("texts", "labels", "about", "offsets", "lost")}
        questions = self._questions(columns["question"])
        contexts = tokenizer.tokenize_with_offsets(columns["context"], title)
        for row, (question, (ids, offsets)) in enumerate(zip(questions, contexts, strict=True)):
            answer = first_answer(columns["answers"][row], offsets)
            length, question = len(question), question[: self.max_length // 2]
            begins, missed = len(tokenizer.prefix) + len(question), answer is not None
            if (size := self.max_length - begins - len(tokenizer.suffix)) < 1:
                problem = f"{self.max_length} tokens leave no room for the context after the question"
                raise UserError(f"task.max_length: {problem}")
            for first, last in windows(len(ids), size, self.config.stride):
                text = [*tokenizer.prefix, *question, *ids[first:last], *tokenizer.suffix]
                inside = answer is not None and first <= answer[0] and answer[1] < last
                missed = missed and not inside
                examples["texts"].append(np.array(text or [tokenizer.empty_text_token], np.int32))
                examples["labels"].append([begins + token - first for token in answer] if answer and inside else [0, 0])
                examples["about"].append([row, begins])
                examples["offsets"].append(np.array(offsets[first:last], np.int32).reshape(-1))
            examples["lost"].append([length - len(question), missed])
        return {name: Ragged.of(rows, np.int64 if name == "labels" else np.int32) for name, rows in examples.items()}

    def _questions(self, questions: list[str]) -> list[list[int]]:
        tokenizer = self.text_tokenizer.tokenizer
        before, separator, after = self.config.text.partition("{separator}")
        parts = [tokenizer.encode([part.format(question=text) for text in questions]) for part in (before, after)]
        between = [tokenizer.separator_id] if separator else []
        return [first + between + second for first, second in zip(*parts, strict=True)]

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        logits = head(hidden).float()
        # One padded row for each window, because the softmax is over the window's own tokens.
        padded = logits.new_full((len(segments.lengths), max(segments.lengths), 2), float("-inf"))
        padded[segments.segment_index.long(), segments.position_ids] = logits
        return F.cross_entropy(padded, batch["labels"].reshape(-1, 2), reduction="sum")

    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        windows = np.split(head(hidden).float().cpu().numpy(), np.cumsum(segments.lengths)[:-1])
        predictions = []
        for index, logits in zip(indices, windows, strict=True):
            begins, offsets = examples["about"][index][1], examples["offsets"][index].reshape(-1, 2)
            span = best_span(logits[begins : begins + len(offsets)], offsets, self.config.longest_answer)
            predictions.append((span, float(logits[0].sum())))
        return predictions

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        """Return the answers; `score` is the sum of the logits of the answer's start and end.

        With `unanswerable`, `no_answer` is the score to compare with the no-answer threshold; above it, `predicted` is
        empty. The threshold is chosen on the first scored split, which is the validation split.
        """
        by_row: list[list[Any]] = [[] for _ in columns["context"]]
        for index, prediction in enumerate(predictions):
            by_row[examples["about"][index][0]].append(prediction)
        answers = zip(*map(best_answer, columns["context"], by_row), strict=True)
        texts, scores, no_answer = (list(column) for column in answers)
        if not self.config.unanswerable:
            return {"predicted": texts, "score": scores}
        if self.threshold is None:
            self.threshold = best_no_answer_threshold(self.gold(columns), texts, no_answer)
        threshold = self.threshold
        predicted = ["" if score > threshold else text for text, score in zip(texts, no_answer, strict=True)]
        return {"predicted": predicted, "score": scores, "no_answer": no_answer}

    def gold(self, columns: Columns) -> list[Any]:
        return [list(answer["text"]) for answer in columns["answers"]]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        if self.threshold is None:
            if unanswered := sum(not texts for texts in gold):
                problem = f"{unanswered:,} of {len(gold):,} questions have no answer, but get one without task.unanswerable"
                warnings.warn(f"{self.config.name}: {problem}", stacklevel=2)
            return squad_scores(gold, answers["predicted"])
        scores = squad_scores(gold, answers["predicted"], answers["no_answer"], self.threshold)
        return {**scores, "no_answer_threshold": self.threshold}


def first_answer(answers: dict[str, Any], offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and last token of the first answer, or None if there is no answer."""
    if not answers["text"]:
        return None
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [at for at, (first, last) in enumerate(offsets) if last > start and first < end and first < last]
    return (inside[0], inside[-1]) if inside else None


def best_span(logits: np.ndarray, offsets: np.ndarray, longest_answer: int) -> Span:
    """Return the span with the highest sum of start and end logits in one window of a question's context.

    A span has at most `longest_answer` tokens and at least one character. The rules are those of Hugging Face's run_qa,
    except that all spans are compared, not only those of the twenty best starts and ends. Among spans with equal
    scores, the earliest start and then the shortest span is chosen. The score is -inf if there are no tokens.

    `logits`, float [tokens, 2], are the start and end logits of the context's tokens in this window, and `offsets`, int
    [tokens, 2], each token's characters in the context, [first, end), which never decrease. Raises a ValueError if a logit
    is not finite.
    """
    if not np.isfinite(logits).all():
        raise ValueError("a logit is not finite")
    if not len(logits):
        return -math.inf, 0, 0
    # Row i of a banded matrix [tokens, longest] holds the ends i, i + 1, ... Padding beyond the window has the end character
    # 0 and is masked out, because such a span has no characters. fp64 keeps the rounding error of the sums small.
    ends = sliding_window_view(np.pad(logits[:, 1].astype(np.float64), (0, longest_answer - 1)), longest_answer)
    characters = sliding_window_view(np.pad(offsets[:, 1], (0, longest_answer - 1)), longest_answer)
    scores = np.where(characters > offsets[:, :1], logits[:, :1] + ends, -np.inf)
    # argmax returns the first of equal maxima, which is the earliest start, then the shortest span.
    first, length = divmod(int(scores.argmax()), longest_answer)
    return float(scores[first, length]), -int(offsets[first, 0]), -int(offsets[first + length, 1])


def best_answer(context: str, windows: Sequence[tuple[Span, float]]) -> tuple[str, float, float]:
    """Return the best answer to a question: its text, its score and the no-answer score.

    `windows` has, in any order, each window's best span in `context` and its null score, the sum of the start and end
    logits at the window's first position. Without tokens, the text is empty and its score -inf. The no-answer score, to
    be compared with a threshold, is the lowest null score among the windows, as in run_qa, minus the answer's score.
    Raises a ValueError if a null score is not finite.
    """
    spans, nulls = zip(*windows, strict=True)
    if not all(map(math.isfinite, nulls)):
        raise ValueError("a logit is not finite")
    score, first, end = max((-math.inf, 0, 0), *spans)
    return context[-first:-end], score, min(nulls) - score


class AnswerTokens(TokenClassification):
    """Trains with cross-entropy at every token, also the question's; scores the overlap of token positions.

    The target is the first answer alone. Contexts are truncated, and a question whose answer isn't in the rest has none.
    """

    family = "question_answering"
    inputs = ["question", "context"]

    @property
    def label_names(self) -> list[str]:
        return ["outside", "inside"]

    def build_head(self, width: int) -> nn.Module:
        return TokenHead(width, 2)

    def tokenize(self, columns: Columns, title: str) -> Examples:
        """Return the texts, and for each token its label and its characters in the context (`offsets`, [first, end))."""
        tokenizer = self.text_tokenizer
        examples = {name: list[Any]() for name in ("texts", "labels", "offsets", "lost")}
        questions = tokenizer.tokenizer.encode([self.config.text.format(question=text) for text in columns["question"]])
        contexts = tokenizer.tokenize_with_offsets(columns["context"], title)
        for question, (ids, offsets), answers in zip(questions, contexts, columns["answers"], strict=True):
            before = [*tokenizer.prefix, *question][: self.max_length]
            room = max(self.max_length - len(before) - len(tokenizer.suffix), 0)
            text = [*before, *ids[:room], *tokenizer.suffix][: self.max_length] or [tokenizer.empty_text_token]
            labels, characters = np.zeros(len(text), np.int64), np.zeros((len(text), 2), np.int32)
            characters[len(before) : len(before) + len(ids[:room])] = np.array(offsets[:room]).reshape(-1, 2)
            answer = first_answer(answers, offsets)
            reached = answer is None or answer[1] < room
            if answer is not None and reached:
                labels[len(before) + answer[0] : len(before) + answer[1] + 1] = 1
            examples["texts"].append(np.array(text, np.int32))
            examples["labels"].append(labels)
            examples["offsets"].append(characters.reshape(-1))
            whole = len(tokenizer.prefix) + len(question) + len(ids) + len(tokenizer.suffix)
            examples["lost"].append([max(whole - len(text), 0), not reached])
        return {name: Ragged.of(rows, np.int64 if name == "labels" else np.int32) for name, rows in examples.items()}

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        """Return the text of the longest run of tokens inside (the first of equals), and `inside`, all their positions.

        `score` is the run's mean probability, or null without an answer.
        """
        predicted, scores, inside = [], [], []
        for row, (labels, probabilities) in enumerate(predictions):
            positions, offsets = np.flatnonzero(labels), examples["offsets"][row].reshape(-1, 2)
            runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
            run = max(runs, key=len)
            characters = offsets[run][offsets[run, 1] > 0]
            empty = not len(characters)
            predicted.append("" if empty else columns["context"][row][characters[0, 0] : characters[-1, 1]])
            scores.append(None if empty else float(probabilities[run].mean()))
            inside.append(positions.tolist())
        return {"predicted": predicted, "score": scores, "inside": inside}

    def gold(self, columns: Columns) -> list[Any]:
        return [list(answer["text"]) for answer in columns["answers"]]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        """Return `token_f1`, which is also added to `answers` by row, and SQuAD's scores of `predicted`."""
        correct = (np.flatnonzero(examples["labels"][row]).tolist() for row in range(len(gold)))
        overlaps = [position_f1(set(own), set(first)) for own, first in zip(answers["inside"], correct, strict=True)]
        answers["token_f1"] = overlaps
        return {"token_f1": fmean(overlaps), **squad_scores(gold, answers["predicted"])}


def position_f1(predicted: set[int], correct: set[int]) -> float:
    """Return the F1 of the positions of an answer's tokens; no position counts as position 0 (the paper's EncodEval)."""
    predicted, correct = predicted or {0}, correct or {0}
    return 2 * len(predicted & correct) / (len(predicted) + len(correct))
