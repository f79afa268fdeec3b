"""Fine-tuning for token classification: predict the label of each word in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged, unpack
from biphasic.errors import UserError
from biphasic.finetuning.examples import TaskBatch, TokenizedExamples, concatenate
from biphasic.finetuning.task import PredictionTask
from biphasic.model.heads import TokenHead
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments


class TokenClassification(PredictionTask):
    """Trains with cross-entropy at the first token of each word; scores F1 of entities (BIO labels).

    Words are joined by spaces and tokenized like any other text, as in pretraining. A word beyond the maximum length, or
    without a token of its own, is predicted as O.
    """

    family = "tokens"
    metric = "f1"

    def build_head(self, width: int) -> nn.Module:
        """See `FinetuneTask`."""
        return TokenHead(width, len(self.data.label_names))

    def examples(self, split: str) -> TokenizedExamples:
        """See `PredictionTask`. `words` holds, for each token, the index of the word that the token begins, or -1."""

        def make() -> dict[str, Ragged]:
            columns = self.data.read(split, "tokens")
            texts: list[np.ndarray] = []
            words: list[np.ndarray] = []
            labels: list[np.ndarray] = []
            joined = [" ".join(sentence) for sentence in columns["tokens"]]
            encodings = self.text_tokenizer.tokenize_with_offsets(joined, f"reading {self.config.name} {split}")
            for sentence, numbers, (ids, offsets) in zip(columns["tokens"], columns["labels"], encodings, strict=True):
                text = self.text_tokenizer.with_special_tokens(ids, self.max_length)
                before, after = [-1] * len(self.text_tokenizer.prefix), [-1] * len(self.text_tokenizer.suffix)
                kept = max(len(text) - len(before) - len(after), 0)
                begun = [*before, *word_of_each_token(sentence, offsets)[:kept], *after][: len(text)]
                texts.append(np.array(text, np.int32))
                words.append(np.array(begun, np.int32))
                labels.append(np.array([IGNORE if word < 0 else numbers[word] for word in begun], np.int32))
            return {"texts": Ragged.of(texts), "words": Ragged.of(words), "labels": Ragged.of(labels)}

        arrays = self.tokenize_once("tokens", split, make)
        per_token = {name: unpack(arrays, name).flat for name in ("words", "labels")}
        return TokenizedExamples(unpack(arrays, "texts"), per_token)

    def collate(self, examples: TokenizedExamples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """See `FinetuneTask`."""
        tokens, lengths = concatenate(examples.texts, indices)
        return {"tokens": tokens, "lengths": lengths, "labels": self._labels(examples, indices)}

    def count_targets(self, examples: TokenizedExamples, indices: Sequence[int]) -> int:
        """See `FinetuneTask`."""
        return int((self._labels(examples, indices) != IGNORE).sum())

    def _labels(self, examples: TokenizedExamples, indices: Sequence[int]) -> Tensor:
        return concatenate(Ragged(examples.arrays["labels"], examples.texts.ends), indices)[0]

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """See `FinetuneTask`."""
        return F.cross_entropy(head(hidden).float(), batch["labels"], ignore_index=IGNORE, reduction="sum")

    def predict(
        self, head: nn.Module, examples: TokenizedExamples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        """Return, for each text, the indices of words that have a token, and the most likely labels and probabilities."""
        best = head(hidden).float().softmax(-1).max(-1)
        columns = (best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy())
        labels, scores = (np.split(column, np.cumsum(segments.lengths)[:-1]) for column in columns)
        words = Ragged(examples.arrays["words"], examples.texts.ends)
        begun = [np.asarray(words[index]) for index in indices]
        return [
            (word[word >= 0], label[word >= 0], score[word >= 0])
            for word, label, score in zip(begun, labels, scores, strict=True)
        ]

    def answers(self, split: str, predictions: list[Any]) -> dict[str, list[Any]]:
        """See `PredictionTask`. `score` is the probability of each word's label, null for a word without a token."""
        names = self.data.label_names
        if "O" not in names:
            raise UserError(f"{self.config.data}: its labels have no O ({', '.join(names)}): expected BIO")
        predicted, scores = [], []
        for sentence, (words, labels, probabilities) in zip(
            self.data.read(split, "tokens")["tokens"], predictions, strict=True
        ):
            chosen, of_words = ["O"] * len(sentence), [None] * len(sentence)
            for word, label, probability in zip(words, labels, probabilities.tolist(), strict=True):
                chosen[word], of_words[word] = names[label], probability
            predicted.append(chosen)
            scores.append(of_words)
        return {"predicted": predicted, "score": scores}

    def gold(self, split: str) -> list[Any]:
        """See `PredictionTask`."""
        names = self.data.label_names
        return [[names[number] for number in numbers] for numbers in self.data.read(split, "tokens")["labels"]]

    def metrics(self, gold: list[Any], answers: dict[str, list[Any]]) -> dict[str, float]:
        """See `PredictionTask`."""
        return entity_scores(gold, answers["predicted"])


def entity_scores(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Return micro-averaged F1, precision and recall of entities over all types and sentences; 0 if there are no entities.

    This is seqeval's default mode, as in conlleval and run_ner: an entity is correct if its type, first and last word are
    correct, and an inside label that follows no word of its own type begins an entity.

    Args:
        gold: the BIO labels of each sentence's words.
        predicted: the predicted labels, with the same lengths.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    scores = precision_recall_fscore_support(gold, predicted, average="micro", zero_division=0)  # pyright: ignore[reportArgumentType]
    precision, recall, f1 = (float(score) for score in scores[:3])  # pyright: ignore[reportArgumentType]
    return {"f1": f1, "precision": precision, "recall": recall}


def word_of_each_token(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each token of the words joined by spaces, the index of the word that the token begins, or -1.

    Args:
        words: the words of a text.
        offsets: each token's first character and the one after its last; a token may include the space before a word.
    """
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    text = " ".join(words)
    begun, last = [], -1
    for start, end in offsets:
        while start < end and text[start].isspace():
            start += 1
        word = int(np.searchsorted(starts, start, side="right")) - 1
        # A token that consists of spaces begins no word.
        is_first = start < end and last < word < len(words)
        begun.append(word if is_first else -1)
        last = word if is_first else last
    return begun
