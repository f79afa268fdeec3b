"""The span of a context that answers a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.data.array_cache import Ragged, unpack
from biphasic.evaluation.metrics import best_no_answer_threshold, question_answering_scores
from biphasic.finetuning.spans import Window, best_answer
from biphasic.finetuning.task import Batch, Examples, SplitTask, flat
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TokenHead
from biphasic.model.segments import Segments


class QuestionAnswering(SplitTask):
    """Start and end of the answer by cross-entropy over a window's tokens; exact match and token F1.

    A long context is cut into windows that overlap, each behind the whole question, and each an example. Where a window
    doesn't hold the whole answer, or there is none, its first token is the target. As in Hugging Face's run_qa.
    """

    family = "question_answering"
    metric = "f1"
    _threshold: float | None = None

    def head(self, width: int) -> nn.Module:
        """See `Task`."""
        return TokenHead(width, 2)

    def examples(self, split: str) -> Examples:
        """See `SplitTask`.

        Of each window: `question` (row of the table), `begins` (where its context begins in its text), `start` and `end`
        (the answer's tokens in its text; 0 where there is none); of each token of its context `from` and `to` (characters).
        """

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "question_answering")
            questions = self._questions(columns["question"])
            contexts = self.reader.read_with_offsets(columns["context"], f"reading {self.config.name} {split}")
            found: dict[str, list[Any]] = {name: [] for name in ("texts", "about", "from", "to")}
            for row, (question, (ids, offsets), answers) in enumerate(
                zip(questions, contexts, columns["answers"], strict=True)
            ):
                answer = _first_answer(answers, offsets)
                for first, last in self._windows(len(question), len(ids)):
                    text = [*self.reader.prefix, *question, *ids[first:last], *self.reader.suffix]
                    begins = len(self.reader.prefix) + len(question)
                    inside = answer is not None and first <= answer[0] and answer[1] < last
                    start, end = (begins + at - first for at in answer) if answer and inside else (0, 0)
                    characters = np.array(offsets[first:last], np.int32).reshape(-1, 2)
                    found["texts"].append(np.array(text or [self.reader.nothing], np.int32))
                    found["about"].append([row, begins, start, end])
                    found["from"].append(characters[:, 0])
                    found["to"].append(characters[:, 1])
            return {name: Ragged.of(rows) for name, rows in found.items()}

        settings = {"text": self.config.text, "stride": self.config.stride}
        arrays = self.tokenized("question answering", split, make, **settings)
        offsets = unpack(arrays, "from"), unpack(arrays, "to")
        extra = {
            "about": unpack(arrays, "about").flat.reshape(-1, 4),
            "offsets": np.stack([one.flat for one in offsets], axis=1),
            "offsets.ends": offsets[0].ends,
        }
        return Examples(unpack(arrays, "texts"), extra)

    def _questions(self, questions: list[str]) -> list[list[int]]:
        """What comes before the context, in tokens; `{separator}` is a token of its own."""
        before, _, behind = self.config.text.partition("{separator}")
        parts = [
            self.reader.tokenizer.encode([part.format(question=q) for q in questions]) for part in (before, behind)
        ]
        separator = [self.reader.tokenizer.separator_id] if "{separator}" in self.config.text else []
        most = self.longest // 2
        return [(first + separator + second)[:most] for first, second in zip(*parts, strict=True)]

    def _windows(self, question: int, context: int) -> list[tuple[int, int]]:
        """Which tokens of the context each window has."""
        size = self.longest - question - len(self.reader.prefix) - len(self.reader.suffix)
        if size < 1:
            raise UserError(f"task.max_length: {self.longest} tokens leave no room for a context behind the question")
        step = size - self.config.stride if self.config.stride < size else max(size // 2, 1)
        found = [(0, min(size, context))]
        while found[-1][1] < context:
            first = found[-1][0] + step
            found.append((first, min(first + size, context)))
        return found

    def collate(self, examples: Examples, rows: Sequence[int], epoch: int, seed: int) -> Batch:
        """See `Task`."""
        tokens, lengths = flat(examples.texts, rows)
        spans = torch.from_numpy(examples.arrays["about"][list(rows), 2:]).long()
        return {"tokens": tokens, "lengths": lengths, "spans": spans}

    def targets(self, examples: Examples, rows: Sequence[int]) -> int:
        """See `Task`: start and end."""
        return 2 * len(rows)

    def loss(self, encoder: Encoder, head: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        segments = Segments.of(batch["lengths"], batch["tokens"].device)
        logits = head(encoder.hidden(batch["tokens"], segments)).float()
        # A row for each window, so that each is a distribution over its own tokens.
        rows = logits.new_full((len(segments.lengths), max(segments.lengths), 2), float("-inf"))
        rows[segments.owner.long(), segments.position_ids] = logits
        return F.cross_entropy(rows, batch["spans"], reduction="sum")

    def say(
        self, hidden: Tensor, segments: Segments, head: nn.Module, examples: Examples, rows: list[int]
    ) -> list[Any]:
        """Of each window, the logits of its context's tokens, and of its first token the sum."""
        logits = head(hidden).float().cpu().numpy()
        found, at = [], 0
        ends = examples.arrays["offsets.ends"]
        for row, length in zip(rows, segments.lengths, strict=True):
            begins = at + int(examples.arrays["about"][row, 1])
            context = slice(begins, begins + int(ends[row + 1] - ends[row]))
            found.append((logits[context, 0].copy(), logits[context, 1].copy(), float(logits[at].sum())))
            at += length
        return found

    def measure(self, split: str, said: list[Any]) -> dict[str, float]:
        """See `SplitTask`."""
        columns, examples = self.data.read(split, "question_answering"), self.examples(split)
        windows: list[list[Window]] = [[] for _ in columns["context"]]
        offsets = Ragged(examples.arrays["offsets"], examples.arrays["offsets.ends"])
        for number, (start, end, null) in enumerate(said):
            windows[examples.arrays["about"][number, 0]].append(Window(start, end, offsets[number], null))
        answers = [
            best_answer(context, mine, self.config.longest_answer)
            for context, mine in zip(columns["context"], windows, strict=True)
        ]
        golds = [list(one["text"]) for one in columns["answers"]]
        texts, doubts = [one.text for one in answers], [one.no_answer for one in answers]
        if not self.config.unanswerable:
            return question_answering_scores(golds, texts, None, None)
        if split == self.config.validation or self._threshold is None:
            self._threshold = best_no_answer_threshold(golds, texts, doubts)
        found = question_answering_scores(golds, texts, doubts, self._threshold)
        return {**found, "no_answer_threshold": self._threshold}


def _first_answer(answers: dict[str, Any], offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first answer's first and last token; None where there is none."""
    if not answers["text"]:
        return None
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [at for at, (first, last) in enumerate(offsets) if last > start and first < end and first < last]
    return (inside[0], inside[-1]) if inside else None
