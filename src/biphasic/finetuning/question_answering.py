"""Fine-tuning for extractive question answering: predict the span of a context that answers a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged, unpack
from biphasic.errors import UserError
from biphasic.evaluation.squad import best_no_answer_threshold, squad_scores
from biphasic.finetuning.examples import TaskBatch, TokenizedExamples, concatenate
from biphasic.finetuning.spans import ContextWindow, best_answer
from biphasic.finetuning.task import PredictionTask
from biphasic.model.heads import TokenHead
from biphasic.model.segments import Segments


class QuestionAnswering(PredictionTask):
    """Trains with cross-entropy on the answer's start and end among a window's tokens; scores exact match and token F1.

    A long context is split into overlapping windows, each with the complete question before it; each window is an example.
    If a window doesn't contain a complete answer, its first token is the target, as in Hugging Face's run_qa.
    """

    family = "question_answering"
    metric = "f1"

    def build_head(self, width: int) -> nn.Module:
        """See `FinetuneTask`."""
        return TokenHead(width, 2)

    def examples(self, split: str) -> TokenizedExamples:
        """See `PredictionTask`.

        `about` holds four numbers for each window: `question` (row of the table), `begins` (position of the context's first
        token), `start` and `end` (positions of the answer; 0 without one). `offsets` holds, for each context token, its
        first character and the one after its last.
        """

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "question_answering")
            questions = self._questions(columns["question"])
            contexts = self.text_tokenizer.tokenize_with_offsets(
                columns["context"], f"reading {self.config.name} {split}"
            )
            arrays: dict[str, list[Any]] = {name: [] for name in ("texts", "about", "from", "to")}
            for row, (question, (ids, offsets), answers) in enumerate(
                zip(questions, contexts, columns["answers"], strict=True)
            ):
                answer = _first_answer(answers, offsets)
                begins = len(self.text_tokenizer.prefix) + len(question)
                for first, last in self._windows(len(question), len(ids)):
                    text = [*self.text_tokenizer.prefix, *question, *ids[first:last], *self.text_tokenizer.suffix]
                    inside = answer is not None and first <= answer[0] and answer[1] < last
                    start, end = (begins + token - first for token in answer) if answer and inside else (0, 0)
                    characters = np.array(offsets[first:last], np.int32).reshape(-1, 2)
                    arrays["texts"].append(np.array(text or [self.text_tokenizer.empty_text_token], np.int32))
                    arrays["about"].append([row, begins, start, end])
                    arrays["from"].append(characters[:, 0])
                    arrays["to"].append(characters[:, 1])
            return {name: Ragged.of(rows) for name, rows in arrays.items()}

        config = self.config
        arrays = self.tokenize_once("question answering", split, make, text=config.text, stride=config.stride)
        characters = [unpack(arrays, name) for name in ("from", "to")]
        return TokenizedExamples(
            unpack(arrays, "texts"),
            {
                "about": unpack(arrays, "about").flat.reshape(-1, 4),
                "offsets": np.stack([part.flat for part in characters], axis=1),
                "offsets.ends": characters[0].ends,
            },
        )

    def _questions(self, questions: list[str]) -> list[list[int]]:
        """Return the tokens that precede each context; `{separator}` becomes one token."""
        before, separator, after = self.config.text.partition("{separator}")
        parts = [
            self.text_tokenizer.tokenizer.encode([part.format(question=question) for question in questions])
            for part in (before, after)
        ]
        between = [self.text_tokenizer.tokenizer.separator_id] if separator else []
        return [(first + between + second)[: self.max_length // 2] for first, second in zip(*parts, strict=True)]

    def _windows(self, question: int, context: int) -> list[tuple[int, int]]:
        """Return for each window the index of its first context token and the one after its last."""
        size = self.max_length - question - len(self.text_tokenizer.prefix) - len(self.text_tokenizer.suffix)
        if size < 1:
            raise UserError(
                f"task.max_length: {self.max_length} tokens leave no room for a context behind the question"
            )
        step = size - self.config.stride if self.config.stride < size else max(size // 2, 1)
        starts = range(0, max(context - size, 0) + step, step)
        return [(start, min(start + size, context)) for start in starts]

    def collate(self, examples: TokenizedExamples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """See `FinetuneTask`."""
        tokens, lengths = concatenate(examples.texts, indices)
        spans = torch.from_numpy(examples.arrays["about"][list(indices), 2:]).long()
        return {"tokens": tokens, "lengths": lengths, "spans": spans}

    def count_targets(self, examples: TokenizedExamples, indices: Sequence[int]) -> int:
        """See `FinetuneTask`. Each window has two targets: start and end."""
        return 2 * len(indices)

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """See `FinetuneTask`."""
        logits = head(hidden).float()
        # One padded row for each window, because the softmax is over the window's own tokens.
        padded = logits.new_full((len(segments.lengths), max(segments.lengths), 2), float("-inf"))
        padded[segments.segment_index.long(), segments.position_ids] = logits
        return F.cross_entropy(padded, batch["spans"], reduction="sum")

    def predict(
        self, head: nn.Module, examples: TokenizedExamples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        """Return, for each window, the start and end logits of its context and the sum of its first token's logits."""
        logits = np.split(head(hidden).float().cpu().numpy(), np.cumsum(segments.lengths)[:-1])
        ends = examples.arrays["offsets.ends"]
        predictions = []
        for index, window in zip(indices, logits, strict=True):
            begins = int(examples.arrays["about"][index, 1])
            context = window[begins : begins + int(ends[index + 1] - ends[index])].copy()
            predictions.append((context[:, 0], context[:, 1], float(window[0].sum())))
        return predictions

    def answers(self, split: str, predictions: list[Any]) -> dict[str, list[Any]]:
        """See `PredictionTask`. `score` is the sum of the logits of the answer's start and end.

        With `unanswerable`, `no_answer` is the score that is compared with the no-answer threshold, which is chosen on the
        validation split; `predicted` is empty above it.
        """
        columns, examples = self.data.read(split, "question_answering"), self.examples(split)
        windows: list[list[ContextWindow]] = [[] for _ in columns["context"]]
        offsets = Ragged(examples.arrays["offsets"], examples.arrays["offsets.ends"])
        for index, (start, end, null) in enumerate(predictions):
            question = examples.arrays["about"][index, 0]
            windows[question].append(ContextWindow(start, end, offsets[index], null))
        answers = [
            best_answer(context, of_context, self.config.longest_answer)
            for context, of_context in zip(columns["context"], windows, strict=True)
        ]
        texts, no_answer = [answer.text for answer in answers], [answer.no_answer for answer in answers]
        scores = [answer.score for answer in answers]
        if not self.config.unanswerable:
            return {"predicted": texts, "score": scores}
        if split == self.config.validation or self.no_answer_threshold is None:
            self.no_answer_threshold = best_no_answer_threshold(self.gold(split), texts, no_answer)
        threshold = self.no_answer_threshold
        predicted = ["" if score > threshold else text for text, score in zip(texts, no_answer, strict=True)]
        return {"predicted": predicted, "score": scores, "no_answer": no_answer}

    def gold(self, split: str) -> list[Any]:
        """See `PredictionTask`. All correct answers to each question; none if it has no answer."""
        return [list(answer["text"]) for answer in self.data.read(split, "question_answering")["answers"]]

    def metrics(self, gold: list[Any], answers: dict[str, list[Any]]) -> dict[str, float]:
        """See `PredictionTask`."""
        threshold = self.no_answer_threshold
        if threshold is None:
            return squad_scores(gold, answers["predicted"])
        scores = squad_scores(gold, answers["predicted"], answers["no_answer"], threshold)
        return {**scores, "no_answer_threshold": threshold}


def _first_answer(answers: dict[str, Any], offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and last token of the first answer, or None if there is no answer."""
    if not answers["text"]:
        return None
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [at for at, (first, last) in enumerate(offsets) if last > start and first < end and first < last]
    return (inside[0], inside[-1]) if inside else None
