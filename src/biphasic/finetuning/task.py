"""What a task brings to fine-tuning: what an example is, the head, the loss, the scores. Everything else is shared."""

from __future__ import annotations

import contextlib
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphasic.config.durations import Duration
from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.data.array_cache import Arrays, Ragged, cached, pack
from biphasic.data.task_folder import TaskFolder
from biphasic.model.encoder import Encoder, Reader
from biphasic.model.segments import Segments

Batch = dict[str, Any]
FORMAT = 1
"""Of tokenized data and of what a run computes: a change that makes other scores of the same settings counts it up."""


@dataclass(frozen=True)
class Score:
    """A task's result on one test set, as shares of 1; `biphasic.sweep.records.Result` without the task's name."""

    name: str
    metric: str
    validation: float | None
    test: float | None
    more: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Examples:
    """Tokenized examples: `texts` are token ids, `arrays` what else a kind of task keeps of each."""

    texts: Ragged
    arrays: Arrays

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Trained:
    """A model while it is scored.

    `tokens_at_once` is a forward pass's size; `half` says whether it computes in bf16.
    """

    encoder: Encoder
    head: nn.Module
    tokens_at_once: int
    half: bool

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.encoder.backbone.parameters()).device

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """No gradients, no dropout, the run's precision."""
        self.encoder.backbone.eval()
        self.head.eval()
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            yield


class Task(ABC):
    """A kind of task, for one encoder's way of reading.

    A new one has a section in `config/finetune.py` and a line in `biphasic.finetuning.families.FAMILIES`.

    Args:
        config: the YAML's `task:` section.
        reader: how the encoder's texts become tokens.
        cache: folder for tokenized data.

    Raises:
        UserError: the data isn't there, or is no data for this kind of task.
    """

    family: str
    metric: str

    def __init__(self, config: Any, reader: Reader, cache: str):
        self.config, self.reader, self.cache = config, reader, cache
        self.longest = longest_of(config.max_length, reader.longest)
        self.data = TaskFolder(config.data, cache, self.family)

    @property
    def prompts(self) -> dict[str, str]:
        """What goes before texts, by role, for those who use the fine-tuned encoder."""
        return {}

    @abstractmethod
    def head(self, width: int) -> nn.Module:
        """What is trained on top of an encoder of that width."""

    @abstractmethod
    def training(self) -> Examples:
        """All training examples."""

    @abstractmethod
    def collate(self, examples: Examples, rows: Sequence[int], epoch: int, seed: int) -> Batch:
        """Examples, by number, as one microbatch: flat `tokens`, their `lengths` on the host, targets."""

    @abstractmethod
    def targets(self, examples: Examples, rows: Sequence[int]) -> int:
        """How many terms the loss of these examples has."""

    @abstractmethod
    def loss(self, encoder: Encoder, head: nn.Module, batch: Batch) -> Tensor:
        """The sum of a microbatch's terms, fp32."""

    @abstractmethod
    def scores(self, model: Trained) -> list[Score]:
        """Validation and test; the same on every rank."""

    @abstractmethod
    def tables(self) -> list[tuple[TaskFolder, str]]:
        """Every table that decides the result, for its name."""

    def split(self, rows: Sequence[int], examples: Examples, tokens: int) -> Iterator[Sequence[int]]:
        """Cut a rank's examples into microbatches of about so many tokens."""
        start, held = 0, 0
        for at, row in enumerate(rows):
            length = len(examples.texts[row])
            if at > start and held + length > tokens:
                yield rows[start:at]
                start, held = at, 0
            held += length
        yield rows[start:]

    def tokenized(
        self,
        what: str,
        table: str,
        make: Callable[[], dict[str, Ragged]],
        folder: TaskFolder | None = None,
        **settings: Any,
    ) -> Arrays:
        """Rows that `make` gives, made once on this machine for each table, tokenizer and settings.

        Args:
            what: is made.
            table: of which table.
            make: makes it.
            folder: of the table; default: the task's own.
            settings: what else decides it.
        """
        key = {
            "format": FORMAT,
            "what": what,
            "table": (folder or self.data).mark(table),
            "tokenizer": self.reader.tokenizer.sha256,
            "around": [self.reader.prefix, self.reader.suffix],
            "longest": self.longest,
            **settings,
        }
        return cached(self.cache, key, lambda: pack(**make()))


class SplitTask(Task):
    """A task that is scored on splits of its own set, by what the model says of each example."""

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """See `Task`."""
        return [(self.data, split) for split in dict.fromkeys(["train", *self.splits()])]

    def splits(self) -> list[str]:
        """Validation, if there is one, then the tests."""
        return [split for split in (self.config.validation, *self.config.scored.values()) if split is not None]

    def scores(self, model: Trained) -> list[Score]:
        """See `Task`."""
        # Here: Composer takes seconds to import, and who only asks for a trial's name needs none of it.
        from biphasic.finetuning.predicting import outputs

        validation = self.config.validation
        found: dict[str, dict[str, float]] = {}
        for split in dict.fromkeys(self.splits()):
            found[split] = self.measure(
                split, outputs(self, self.examples(split), model, f"{self.config.name} {split}")
            )
        return [
            Score(
                name,
                self.metric,
                None if validation is None else found[validation][self.metric],
                found[split][self.metric],
                {part: found[of] for part, of in (("validation", validation), ("test", split)) if of is not None},
            )
            for name, split in self.config.scored.items()
        ]

    def training(self) -> Examples:
        """See `Task`."""
        return self.examples("train")

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """A split's."""

    @abstractmethod
    def say(
        self, hidden: Tensor, segments: Segments, head: nn.Module, examples: Examples, rows: list[int]
    ) -> list[Any]:
        """What the model says of each of these examples."""

    @abstractmethod
    def measure(self, split: str, said: list[Any]) -> dict[str, float]:
        """Metrics over all examples of a split, in their order; validation comes before the tests."""


def flat(texts: Ragged, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Some texts as one run of tokens, int64, and their lengths."""
    chosen = [texts[row] for row in rows]
    return torch.from_numpy(np.concatenate(chosen).astype(np.int64)), [len(text) for text in chosen]


def longest_of(asked: int | float, longest: int) -> int:
    """Tokens of an example: so many, or that share of what the model takes, rounded; never more than it takes."""
    return min(asked if isinstance(asked, int) else max(round(asked * longest), 1), longest)


def order_of(examples: int, seed: int, epoch: int) -> list[int]:
    """The examples' order in an epoch."""
    order = list(range(examples))
    random.Random(f"finetune order {seed} {epoch}").shuffle(order)
    return order


def drawn(*what: Any) -> int:
    """A 63-bit seed for a draw, from what it is drawn for."""
    text = " ".join(map(str, what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def steps_of(config: FinetuneConfig, examples: int) -> int:
    """Batches of a run: so many epochs, or `max_duration` and at most one epoch. A rest below a batch is left out.

    Raises:
        UserError: there is no whole batch.
    """
    in_epoch = examples // config.batch_size
    if not in_epoch:
        raise UserError(f"{config.task.data}: {examples} training examples don't fill one batch of {config.batch_size}")
    if config.max_duration.unit == "ep":
        return in_epoch * int(config.max_duration.value)
    return max(min(in_epoch, batches_in(config, config.max_duration)), 1)


def batches_in(config: FinetuneConfig, duration: Duration) -> int:
    """Batches in a length in batches or rows."""
    return int(duration.value) if duration.unit == "ba" else int(duration.value) // config.batch_size
