"""Base classes for families of downstream tasks, which define examples, head, loss and metrics."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from biphasic.downstream.array_cache import Arrays, Ragged, cached, pack
from biphasic.downstream.task_folder import TaskFolder
from biphasic.finetuning.examples import TaskBatch, TokenizedExamples
from biphasic.finetuning.inference import TrainedModel
from biphasic.finetuning.records import DownstreamResult
from biphasic.grouping import full_groups
from biphasic.model.encoder import TextTokenizer
from biphasic.model.segments import Segments
from biphasic.storage import parquet_bytes

RESULT_FORMAT = 1
"""Version of tokenization and training. Increase it with any change that gives other scores for the same settings."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model, and the files to keep of what it predicted: their content by name."""

    results: list[DownstreamResult]
    files: dict[str, Callable[[], bytes]]


class FinetuneTask(ABC):
    """A family of tasks, for one dataset and one tokenizer. Trainer, data order, cache and records are shared.

    A new family needs a section in `config/finetune.py` and a line in `biphasic.finetuning.families`.

    Args:
        config: the YAML's `task:` section.
        text_tokenizer: turns texts into the encoder's tokens.
        cache: the folder for tokenized data.

    Raises:
        UserError: the data is missing or belongs to another family.
    """

    family: str
    metric: str
    """The main metric."""
    splits_batches = True
    """Whether a rank's examples may be divided into microbatches."""
    prompts: dict[str, str] = {}
    """Text to prepend to inputs by role (`query`, `document`), saved with the fine-tuned encoder."""
    no_answer_threshold: float | None = None
    """What question answering chooses while it is scored, and needs to predict."""

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str):
        self.config, self.text_tokenizer, self.cache = config, text_tokenizer, cache
        self.max_length = resolve_max_length(config.max_length, text_tokenizer.max_length)
        self.data = TaskFolder(config.data, cache, self.family)

    @abstractmethod
    def build_head(self, width: int) -> nn.Module:
        """Return the module to train on top of an encoder with hidden states of dimension `width`."""

    @abstractmethod
    def training_examples(self) -> TokenizedExamples:
        """Return all training examples."""

    @abstractmethod
    def collate(self, examples: TokenizedExamples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """Return a microbatch of the chosen examples."""

    @abstractmethod
    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """Return the sum of a microbatch's loss terms, fp32, from its hidden states [tokens, width]."""

    @abstractmethod
    def evaluate(self, model: TrainedModel) -> Evaluation:
        """Return a model's validation and test scores and what it predicted, the same on every rank."""

    @abstractmethod
    def tables(self) -> list[tuple[TaskFolder, str]]:
        """Return every table that affects the result."""

    def count_targets(self, examples: TokenizedExamples, indices: Sequence[int]) -> int:
        """Return the number of loss terms of the chosen examples. Default: one per example."""
        return len(indices)

    def split_batch(self, examples: TokenizedExamples, indices: Sequence[int], tokens: int) -> Sequence[Sequence[int]]:
        """Return a rank's examples in full microbatches of at most `tokens` tokens; a longer example has its own.

        Where a batch may not be divided, return the complete one.
        """
        if not self.splits_batches:
            return [indices]
        return full_groups(tokens, indices, lambda index: len(examples.texts[index]))

    def tokenize_once(
        self,
        what: str,
        table: str,
        make: Callable[[], dict[str, Ragged]],
        folder: TaskFolder | None = None,
        **settings: Any,
    ) -> Arrays:
        """Return arrays made from a table, or read them from the cache.

        Args:
            what: name for this kind of arrays.
            table: a table of `folder`.
            make: makes the arrays.
            folder: the table's folder. Default: the task's own.
            settings: everything else that affects the arrays, besides the table, tokenizer and maximum length.
        """
        key = {
            "format": RESULT_FORMAT,
            "what": what,
            "table": (folder or self.data).content_hash(table),
            "tokenizer": self.text_tokenizer.fingerprint,
            "longest": self.max_length,
            **settings,
        }
        return cached(self.cache, key, lambda: pack(**make()))

    def result(self, task: str, name: str, metrics: dict[str, dict[str, float]]) -> DownstreamResult:
        """Return the result for one test set from its metrics by split (`validation`, `test`)."""
        main = {split: values[self.metric] for split, values in metrics.items()}
        return DownstreamResult(task, name, self.family, self.metric, main.get("validation"), main.get("test"), metrics)


class PredictionTask(FinetuneTask):
    """A task that is scored by a prediction for each example in splits of its own dataset."""

    @abstractmethod
    def examples(self, split: str) -> TokenizedExamples:
        """Return the examples of a split."""

    @abstractmethod
    def predict(
        self, head: nn.Module, examples: TokenizedExamples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        """Return a prediction for each of the chosen examples from their hidden states."""

    @abstractmethod
    def answers(self, split: str, predictions: list[Any]) -> dict[str, list[Any]]:
        """Return what a split's predictions say about each row of its table.

        Args:
            split: the split. Validation comes before the test splits.
            predictions: those of `predict`, in the order of the examples.

        Returns:
            Columns: `predicted`, its `score`, and others to keep.
        """

    @abstractmethod
    def gold(self, split: str) -> list[Any]:
        """Return the correct `predicted` of each row of a split's table."""

    @abstractmethod
    def metrics(self, gold: list[Any], answers: dict[str, list[Any]]) -> dict[str, float]:
        """Return the metrics for `answers` from what is correct."""

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """See `FinetuneTask`."""
        return [(self.data, split) for split in dict.fromkeys(["train", *self._scored_splits()])]

    def training_examples(self) -> TokenizedExamples:
        """See `FinetuneTask`."""
        return self.examples("train")

    def evaluate(self, model: TrainedModel) -> Evaluation:
        """See `FinetuneTask`. Keeps a Parquet file of each split: `id`, `gold`, and the columns of `answers`."""
        metrics: dict[str, dict[str, float]] = {}
        files: dict[str, Callable[[], bytes]] = {}
        for split in dict.fromkeys(self._scored_splits()):
            gold, answers = self.gold(split), self.run(model, split)
            metrics[split] = self.metrics(gold, answers)
            columns = {"id": self.data.read(split, self.family)["id"], "gold": gold, **answers}
            files[f"{split}.parquet"] = functools.partial(parquet_bytes, columns)
        validation = self.config.validation
        by_split = {} if validation is None else {"validation": metrics[validation]}
        results = [
            self.result(self.config.name, name, {**by_split, "test": metrics[split]})
            for name, split in self.config.scored.items()
        ]
        return Evaluation(results, files)

    def run(self, model: TrainedModel, split: str) -> dict[str, list[Any]]:
        """Return a model's `answers` for a split, the same on every rank."""
        examples = self.examples(split)
        predict_pass = functools.partial(self.predict, model.head, examples)
        return self.answers(split, model.predict(examples.texts, predict_pass, f"{self.config.name} {split}"))

    def _scored_splits(self) -> list[str]:
        """Return the validation split, if there is one, then the test splits."""
        return [split for split in (self.config.validation, *self.config.scored.values()) if split is not None]


def resolve_max_length(max_length: int | float, model_maximum: int) -> int:
    """Return an example's maximum tokens, given as a number or a share of the model's maximum, which limits it."""
    if isinstance(max_length, float):
        max_length = max(round(max_length * model_maximum), 1)
    return min(max_length, model_maximum)
