"""Base classes for families of downstream tasks, and the fine-tuned model that they are scored with."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from biphasic.downstream.array_cache import Ragged, cached
from biphasic.downstream.task_folder import TaskFolder
from biphasic.finetuning.records import DownstreamResult
from biphasic.finetuning.truncation import CutTexts
from biphasic.grouping import full_groups, length_batches
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import TextTokenizer
from biphasic.ranks import is_first_rank
from biphasic.storage import parquet_bytes

if TYPE_CHECKING:
    from biphasic.model.encoder import Encoder


@dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned encoder and its head, with the settings for scoring."""

    encoder: Encoder
    head: nn.Module
    tokens_per_pass: int
    bf16: bool

    def predict(
        self, texts: Ragged, predict_pass: Callable[[Tensor, Segments, list[int]], Sequence[Any]], title: str
    ) -> list[Any]:
        """Return the predictions for all texts (token ids), in the order of the texts, on every rank.

        `predict_pass` maps hidden states [tokens, width], segments and text indices to the predictions for these texts.
        """
        from composer.utils import dist

        local: list[tuple[int, Any]] = []
        for indices, hidden, segments in self._forward_passes(texts, title):
            local += zip(indices, predict_pass(hidden, segments, indices), strict=True)
        predictions = dict(pair for rank in dist.all_gather_object(local) for pair in rank)
        return [predictions[index] for index in range(len(texts))]

    def embed(self, texts: Ragged, title: str) -> Tensor:
        """Return mean-pooled embeddings, fp32 [texts, width] on the model's device, on every rank."""
        from composer.utils import dist

        embeddings = torch.zeros((len(texts), self.encoder.width), device=self.encoder.device)
        for indices, hidden, segments in self._forward_passes(texts, title):
            embeddings[indices] = mean_pool(hidden, segments)
        dist.all_reduce(embeddings, reduce_operation="SUM")
        return embeddings

    def _forward_passes(self, texts: Ragged, title: str) -> Iterator[tuple[list[int], Tensor, Segments]]:
        """Yield text indices, hidden states and segments of each of this rank's forward passes."""
        # Imported here because Composer takes seconds to import and naming a trial doesn't need it.
        from composer.utils import dist

        rank, ranks, device = dist.get_global_rank(), dist.get_world_size(), self.encoder.device
        bar = tqdm(total=len(texts), desc=title, unit="text", delay=10, leave=False, disable=not is_first_rank())
        self.encoder.backbone.eval()
        self.head.eval()
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=self.bf16), bar:
            for number, indices in enumerate(length_batches(texts.lengths.tolist(), self.tokens_per_pass)):
                if number % ranks == rank:
                    tokens, lengths = texts.concatenate(indices)
                    segments = Segments.of(lengths, device)
                    on_device = torch.from_numpy(tokens).long().to(device, non_blocking=True)
                    yield indices, self.encoder.hidden(on_device, segments), segments
                bar.update(len(indices))


RESULT_FORMAT = 4
"""Version of tokenization and training. Increase it with every change that alters scores for the same settings."""
_TOKENIZATION_KEYS = {"text", "stride", "query_prompt", "document_prompt", "labelled", "end_of_text"}
"""Keys of a `task:` section that affect the tokens, besides `max_length`."""

Examples = dict[str, Ragged]
"""Tokenized examples by column: `texts` has the token ids of each example, `labels` its targets."""
TaskBatch = dict[str, Any]
"""A microbatch: concatenated `tokens`, the texts' `lengths` on the host, and other inputs of the task's loss."""
Columns = dict[str, list[Any]]
"""Rows of a table, by column."""
Scored = tuple[list[DownstreamResult], dict[str, Callable[[], bytes]]]
"""The scores of a model, and the contents of files with its predictions, by name."""


class FinetuneTask(ABC):
    """A family of tasks, for one dataset and one tokenizer. Trainer, data order, cache and records are shared.

    `config` is the YAML's `task:` section, and `cache` the folder for tokenized data. `record` is the content of the
    dataset's record if only new text is predicted; by default, it is read. Raises a UserError if the data is missing or
    belongs to another family.
    """

    family: str
    """The kind of its dataset."""
    inputs = ["text"]
    """Required columns of new text. `id` and, for classifiers of pairs, `text_pair` are optional."""
    prompts: dict[str, str] = {}
    """Text to prepend to inputs by role (`query`, `document`), saved with the fine-tuned encoder."""
    problem_type: str | None = None
    """transformers' name of the task of a text classifier, if its pipeline needs it."""
    threshold: float | None = None
    """The threshold that is chosen on the validation split and applied to predictions: of no answer, or of labels."""

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str, record: dict[str, Any] | None = None):
        self.config, self.cache = config, cache
        self.text_tokenizer = text_tokenizer.with_end_of_text() if config.end_of_text else text_tokenizer
        self.scored_tokenizer = self.text_tokenizer
        self.max_length = resolve_max_length(config.max_length, text_tokenizer.max_length)
        self.scored_length = self.max_length
        """Number of tokens at which texts are cut in scoring, and by the saved model."""
        self.data = TaskFolder(config.data, cache, self.family, record)
        self.cut: dict[str, CutTexts] = {}
        """What was cut of the texts that were tokenized, by table."""

    @property
    def label_names(self) -> list[str] | None:
        """Names of the head's outputs for texts or tokens, in order; None if it has others."""
        return self.data.record.get("label_names")

    @abstractmethod
    def build_head(self, width: int) -> nn.Module:
        """Return the module to train on top of an encoder with hidden states of dimension `width`."""

    def check_data(self) -> list[str]:
        """Return warnings about data and settings; a UserError if they don't fit each other. No text is tokenized."""
        return []

    @abstractmethod
    def training_examples(self) -> Examples:
        """Return all training examples."""

    def outputs(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return what the loss needs of a forward pass. Default: its hidden states [tokens, width]."""
        return hidden

    @abstractmethod
    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """Return the sum of a microbatch's loss terms, fp32, from the `outputs` of its forward passes, concatenated."""

    @abstractmethod
    def evaluate(self, model: TrainedModel) -> Scored:
        """Return a model's validation and test scores and its predictions, the same on every rank."""

    @abstractmethod
    def tables(self) -> list[tuple[TaskFolder, str]]:
        """Return every table that affects the result."""

    def collate(self, examples: Examples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """Return a microbatch of the chosen examples. Default: their tokens and labels."""
        tokens, lengths = examples["texts"].concatenate(indices)
        labels = torch.from_numpy(examples["labels"].concatenate(indices)[0])
        return {"tokens": torch.from_numpy(tokens).long(), "lengths": lengths, "labels": labels}

    def count_targets(self, examples: Examples, indices: Sequence[int]) -> int:
        """Return the number of loss terms of the chosen examples. Default: one per example."""
        return len(indices)

    def split_batch(self, examples: Examples, indices: Sequence[int], tokens: int) -> Sequence[Sequence[int]]:
        """Divide a rank's examples into full microbatches of at most `tokens` tokens, or of one longer example."""
        return full_groups(tokens, indices, lambda index: len(examples["texts"][index]))

    def tokenize_once(
        self, folder: TaskFolder, table: str, make: Callable[[], Examples], settings: Mapping[str, Any] | None = None
    ) -> Examples:
        """Return the examples of a folder's table from the cache, or from `make` if they are not cached.

        `settings` are those of the `task:` section that differ for this table.
        """
        key = {
            "format": RESULT_FORMAT,
            "kind": self.config.kind,
            "table": [table, folder.content_hash(table)],
            "tokenizer": self.text_tokenizer.fingerprint,
            "longest": self.max_length,
            "settings": {**self.config.model_dump(include=_TOKENIZATION_KEYS), **(settings or {})},
        }
        examples = cached(self.cache, key, make)
        name = table if folder is self.data else f"{folder.path} {table}"
        self.cut[name] = CutTexts.of(examples, int((settings or {}).get("scored_length", self.max_length)))
        return examples

    def results(
        self, task: str, name: str, metrics: dict[str, dict[str, float]], data: str, file: str
    ) -> list[DownstreamResult]:
        """Return a test set's result by each metric of the YAML from its metrics by split (`validation`, `test`)."""
        validation, test = metrics.get("validation", {}), metrics.get("test", {})
        scores = {metric: (validation.get(metric), test.get(metric)) for metric in self.config.metrics}
        return [
            DownstreamResult(task, shown, self.family, metric, *scores[metric], metrics, data, file)
            for shown, metric in self.config.shown(name)
        ]


class PredictionTask(FinetuneTask):
    """A task that is scored by its predictions for the examples in splits of its own dataset."""

    @abstractmethod
    def tokenize(self, columns: Columns, title: str) -> Examples:
        """Return the examples made from rows of a table; `title` is the label of the progress bar."""

    @abstractmethod
    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        """Return a prediction for each of the chosen examples from their hidden states."""

    @abstractmethod
    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        """Return each row's `predicted`, its `score` and further columns, from the predictions for all examples."""

    @abstractmethod
    def gold(self, columns: Columns) -> list[Any]:
        """Return the correct value of `predicted` for each row of a table."""

    @abstractmethod
    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        """Return the metrics of `answers`, given the correct values and the rows' examples."""

    def scored_splits(self) -> list[str]:
        return [split for split in dict.fromkeys([self.config.validation, *self.config.scored.values()]) if split]

    def tables(self) -> list[tuple[TaskFolder, str]]:
        return [(self.data, split) for split in dict.fromkeys(["train", *self.scored_splits()])]

    def training_examples(self) -> Examples:
        return self.examples("train")

    def examples(self, split: str) -> Examples:
        title = f"reading {self.config.name} {split}"
        return self.tokenize_once(self.data, split, lambda: self.tokenize(self.data.read(split, self.family), title))

    def evaluate(self, model: TrainedModel) -> Scored:
        """Return the scores, and a Parquet file for each split: `id`, `gold`, and the columns of `answers`."""
        metrics, files = {}, {}
        self.threshold = None
        for split in self.scored_splits():
            columns = self.data.read(split, self.family)
            answers = self.run(model, columns, self.examples(split), f"{self.config.name} {split}")
            gold = self.gold(columns)
            metrics[split] = self.metrics(gold, answers, self.examples(split))
            kept = {"id": columns["id"], "gold": gold, **answers}
            files[f"{split}.parquet"] = functools.partial(parquet_bytes, kept)
        results, validation = list[DownstreamResult](), self.config.validation
        of_validation = {} if validation is None else {"validation": metrics[validation]}
        for name, split in self.config.scored.items():
            of_set = {**of_validation, "test": metrics[split]}
            results += self.results(self.config.name, name, of_set, self.config.data, f"{split}.parquet")
        return results, files

    def run(self, model: TrainedModel, columns: Columns, examples: Examples, title: str) -> Columns:
        """Return a model's `answers` for rows of a table and their examples, the same on every rank."""
        predict_pass = functools.partial(self.predict, model.head, examples)
        return self.answers(columns, examples, model.predict(examples["texts"], predict_pass, title))


def resolve_max_length(max_length: int | float, model_maximum: int) -> int:
    """Return the maximum length in tokens, given as a number or a share of the model's maximum, its upper limit."""
    if isinstance(max_length, float):
        max_length = max(round(max_length * model_maximum), 1)
    return min(max_length, model_maximum)
