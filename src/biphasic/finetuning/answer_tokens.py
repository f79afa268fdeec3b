"""Fine-tuning for question answering as in the paper: label each token as inside or outside the answer."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
from torch import nn

from biphasic.downstream.array_cache import Ragged
from biphasic.evaluation.squad import squad_scores
from biphasic.finetuning.classification import TokenClassification
from biphasic.finetuning.question_answering import first_answer
from biphasic.finetuning.task import Columns, Examples
from biphasic.model.heads import TokenHead


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
        tokenizer, examples = (
            self.text_tokenizer,
            {name: list[Any]() for name in ("texts", "labels", "offsets", "lost")},
        )
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
        correct = [np.flatnonzero(examples["labels"][row]) for row in range(len(gold))]
        overlaps = [
            position_f1(set(own), set(first.tolist())) for own, first in zip(answers["inside"], correct, strict=True)
        ]
        answers["token_f1"] = overlaps
        return {"token_f1": fmean(overlaps), **squad_scores(gold, answers["predicted"])}


def position_f1(predicted: set[int], correct: set[int]) -> float:
    """Return the F1 of the positions of an answer's tokens; no position counts as position 0 (the paper's EncodEval)."""
    predicted, correct = predicted or {0}, correct or {0}
    return 2 * len(predicted & correct) / (len(predicted) + len(correct))
