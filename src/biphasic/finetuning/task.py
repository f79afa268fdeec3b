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
from composer.utils import dist
from torch import Tensor, nn
from tqdm import tqdm

from biphasic.data.array_cache import Arrays, Ragged, cached, pack
from biphasic.data.task_folder import TaskFolder
from biphasic.model.encoder import Encoder, Reader, passes
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


def outputs(task: SplitTask, examples: Examples, model: Trained, title: str) -> list[Any]:
    """What the model says of all examples, in their order, on every rank; the ranks share the work."""
    chosen = list(passes(examples.texts.lengths.tolist(), model.tokens_at_once))
    mine: list[tuple[int, Any]] = []
    bar = tqdm(
        total=len(examples), desc=title, unit="example", delay=10, leave=False, disable=dist.get_global_rank() > 0
    )
    with model.scoring(), bar:
        for number, rows in enumerate(chosen):
            if number % dist.get_world_size() == dist.get_global_rank():
                tokens, lengths = flat(examples.texts, rows)
                segments = Segments.of(lengths, model.device)
                hidden = model.encoder.hidden(tokens.to(model.device, non_blocking=True), segments)
                mine += zip(rows, task.say(hidden, segments, model.head, examples, rows), strict=True)
            bar.update(len(rows))
    found: list[Any] = [None] * len(examples)
    for part in dist.all_gather_object(mine):
        for row, one in part:
            found[row] = one
    return found


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
