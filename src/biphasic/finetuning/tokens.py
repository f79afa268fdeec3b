"""A label for each word of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.data.array_cache import Ragged, unpack
from biphasic.evaluation.metrics import entity_scores
from biphasic.finetuning.task import Batch, Examples, SplitTask, flat
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TokenHead
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments


class Tokens(SplitTask):
    """Cross-entropy at each word's first token; entity-level F1.

    Words are joined by spaces and tokenized as any text, so that a byte-level tokenizer sees the words it was trained on. A
    word beyond the longest text, or without a token of its own, is said to be no entity.
    """

    family = "tokens"
    metric = "f1"

    def head(self, width: int) -> nn.Module:
        """See `Task`."""
        return TokenHead(width, len(self.data.label_names))

    def examples(self, split: str) -> Examples:
        """See `SplitTask`. `words`: of each token, the number of the word whose first it is, or -1."""

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "tokens")
            texts: list[np.ndarray] = []
            words: list[np.ndarray] = []
            labels: list[np.ndarray] = []
            joined = [" ".join(one) for one in columns["tokens"]]
            encodings = self.reader.read_with_offsets(joined, f"reading {self.config.name} {split}")
            for sentence, numbers, (ids, offsets) in zip(columns["tokens"], columns["labels"], encodings, strict=True):
                first = first_tokens(sentence, offsets)
                text = self.reader.around(ids, self.longest)
                before, behind = len(self.reader.prefix), len(text) - len(self.reader.suffix)
                kept = first[: behind - before]
                firsts = [-1] * before + kept + [-1] * (len(text) - before - len(kept))
                texts.append(np.array(text, np.int32))
                words.append(np.array(firsts, np.int32))
                labels.append(np.array([IGNORE if word < 0 else numbers[word] for word in firsts], np.int32))
            return {"texts": Ragged.of(texts), "words": Ragged.of(words), "labels": Ragged.of(labels)}

        arrays = self.tokenized("tokens", split, make)
        extra = {name: unpack(arrays, name).flat for name in ("words", "labels")}
        return Examples(unpack(arrays, "texts"), extra)

    def collate(self, examples: Examples, rows: Sequence[int], epoch: int, seed: int) -> Batch:
        """See `Task`."""
        tokens, lengths = flat(examples.texts, rows)
        labels, _ = flat(Ragged(examples.arrays["labels"], examples.texts.ends), rows)
        return {"tokens": tokens, "lengths": lengths, "labels": labels}

    def targets(self, examples: Examples, rows: Sequence[int]) -> int:
        """See `Task`."""
        labels, _ = flat(Ragged(examples.arrays["labels"], examples.texts.ends), rows)
        return int((labels != IGNORE).sum())

    def loss(self, encoder: Encoder, head: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        segments = Segments.of(batch["lengths"], batch["tokens"].device)
        logits = head(encoder.hidden(batch["tokens"], segments))
        return F.cross_entropy(logits.float(), batch["labels"], ignore_index=IGNORE, reduction="sum")

    def say(
        self, hidden: Tensor, segments: Segments, head: nn.Module, examples: Examples, rows: list[int]
    ) -> list[Any]:
        """Of each text, its words that have a token, and the likeliest label of each."""
        likeliest = head(hidden).argmax(-1).cpu().numpy().astype(np.int32)
        found, at = [], 0
        words = Ragged(examples.arrays["words"], examples.texts.ends)
        for row, length in zip(rows, segments.lengths, strict=True):
            mine = np.asarray(words[row])
            found.append((mine[mine >= 0], likeliest[at : at + length][mine >= 0]))
            at += length
        return found

    def measure(self, split: str, said: list[Any]) -> dict[str, float]:
        """See `SplitTask`."""
        names = self.data.label_names
        if "O" not in names:
            raise UserError(f"{self.config.data}: its labels have no O ({', '.join(names)}): expected BIO")
        predicted, gold = [], []
        for numbers, (words, labels) in zip(self.data.read(split, "tokens")["labels"], said, strict=True):
            line = ["O"] * len(numbers)
            for word, label in zip(words, labels, strict=True):
                line[word] = names[label]
            predicted.append(line)
            gold.append([names[number] for number in numbers])
        return entity_scores(gold, predicted)


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """For each token of the words' text (joined by spaces), the number of the word whose first token it is, or -1.

    Args:
        words: of the text.
        offsets: each token's characters, from and up to; a space before a word may belong to its token.
    """
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    text = " ".join(words)
    found, seen = [], -1
    for start, end in offsets:
        while start < end and text[start].isspace():
            start += 1
        word = int(np.searchsorted(starts, start, side="right")) - 1
        # A token of spaces alone is no word's.
        new = start < end and word > seen and word < len(words)
        found.append(word if new else -1)
        seen = word if new else seen
    return found
