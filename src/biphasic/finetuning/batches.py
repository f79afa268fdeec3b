"""Split training examples into global batches and per-rank microbatches, in an order that the seed determines."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset

from biphasic.config.finetune import FinetuneConfig
from biphasic.data.seeds import derive_seed
from biphasic.durations import Duration
from biphasic.errors import UserError
from biphasic.finetuning.task import Examples, FinetuneTask, TaskBatch


@dataclass(eq=False)
class GlobalBatches(IterableDataset[TaskBatch]):
    """Yields this rank's share of each global batch as microbatches (`parts`). The ranks don't affect the order."""

    task: FinetuneTask
    examples: Examples
    config: FinetuneConfig
    steps: int
    rank: int = 0
    ranks: int = 1

    @property
    def per_rank(self) -> int:
        return self.config.batch_size // self.ranks

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[TaskBatch]:
        size, seed = self.config.batch_size, self.config.seed
        order, count = [], len(self.examples["texts"])
        for step in range(self.steps):
            epoch, position = divmod(step, count // size)
            if position == 0:
                order = epoch_order(count, seed, epoch)
            batch = order[position * size : (position + 1) * size]
            local = batch[self.rank * self.per_rank :][: self.per_rank]
            targets = max(self.task.count_targets(self.examples, batch), 1)
            shared = {"rows_per_rank": self.per_rank, "mean_targets_per_rank": targets / self.ranks}
            parts = [
                {**self.task.collate(self.examples, indices, epoch, seed), "row_ids": torch.tensor(indices), **shared}
                for indices in self.task.split_batch(self.examples, local, self.config.microbatch_tokens)
            ]
            yield {"parts": parts, "row_ids": torch.tensor(local), "seed": derive_seed("dropout", seed, step, local[0])}


def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """Return the shuffled indices of the examples in an epoch."""
    order = list(range(examples))
    random.Random(f"finetune order {seed} {epoch}").shuffle(order)
    return order


def count_steps(config: FinetuneConfig, examples: int) -> int:
    """Return the number of batches; a partial last batch is dropped.

    A duration in batches or rows is limited to one epoch. Raises a UserError if the examples don't fill one batch.
    """
    if not (per_epoch := examples // config.batch_size):
        raise UserError(f"{config.task.data}: {examples} training examples don't fill one batch of {config.batch_size}")
    if config.max_duration.unit == "ep":
        return per_epoch * int(config.max_duration.value)
    return max(min(per_epoch, in_batches(config, config.max_duration)), 1)


def warmup_batches(config: FinetuneConfig, steps: int) -> int:
    """Return the number of warmup batches, fewer than the training's `steps`; a UserError if as many are asked for.

    A share, which is rounded up, leaves one batch: the only one of a warmup would be trained at the rate 0.
    """
    if config.warmup.unit in ("dur", "ep"):
        share = config.warmup.value / (config.max_duration.value if config.warmup.unit == "ep" else 1)
        return min(int(Duration(share, "dur").resolve(Duration(steps, "ba")).value), steps - 1)
    if (batches := in_batches(config, config.warmup)) >= steps:
        training = f"training of {steps:,} batches (one epoch, which max_duration={config.max_duration} can't exceed)"
        raise UserError(f"warmup: {config.warmup} is not shorter than the {training}: give a share, such as 0.1dur")
    return batches


def in_batches(config: FinetuneConfig, duration: Duration) -> int:
    """Convert a duration in batches or rows to batches."""
    return int(duration.value) if duration.unit == "ba" else int(duration.value) // config.batch_size
