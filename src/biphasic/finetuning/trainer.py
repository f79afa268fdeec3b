"""The one Composer trainer of all tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from composer import Trainer
from composer.callbacks import LRMonitor
from composer.core import Algorithm, DataSpec, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist, reproducibility
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from biphasic.config.durations import Duration
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.places import folder_of
from biphasic.config.schema import ScheduleConfig
from biphasic.finetuning.task import Batch, Examples, Task, batches_in, drawn, order_of, steps_of
from biphasic.model.encoder import Encoder
from biphasic.training.gradients import Gradients
from biphasic.training.loggers import loggers
from biphasic.training.optimizer import adamw
from biphasic.training.wsd import WarmupStableDecay


class FinetuneModel(ComposerModel):
    """An encoder and a task's head, trained by the task's loss."""

    def __init__(self, encoder: Encoder, head: nn.Module, task: Task):
        super().__init__()
        self.backbone, self.head = encoder.backbone, head
        self.encoder, self.task = encoder, task

    def forward(self, batch: Batch) -> Tensor:
        """The summed loss of a microbatch; computed here, where wrapped parameters exist."""
        return self.task.loss(self.encoder, self.head, batch)

    def loss(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:  # pyright: ignore
        """The microbatch's part of the mean over the whole batch.

        Composer multiplies it by the microbatch's share of the rank's examples and averages over ranks; neither is a share
        of the loss's terms, so both are undone.
        """
        share = len(batch["rows"]) / batch["rows_of_rank"]
        return {"total": outputs * dist.get_world_size() / batch["targets"] / share}


class Batches(IterableDataset[Batch]):
    """A rank's share of each global batch; the order is a function of the seed and the epoch, not of the ranks.

    Args:
        task: makes batches.
        examples: all of them.
        config: of the run.
        steps: batches.
    """

    def __init__(self, task: Task, examples: Examples, config: FinetuneConfig, steps: int):
        self.task, self.examples, self.config, self.steps = task, examples, config, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        size, seed = self.config.batch_size, self.config.seed
        in_epoch, share = len(self.examples) // size, size // dist.get_world_size()
        first = dist.get_global_rank() * share
        order: list[int] = []
        for step in range(self.steps):
            epoch, at = divmod(step, in_epoch)
            if not at:
                order = order_of(len(self.examples), seed, epoch)
            batch = order[at * size : (at + 1) * size]
            mine = batch[first : first + share]
            targets = self.task.targets(self.examples, batch)
            parts = []
            for rows in self.task.split(mine, self.examples, self.config.microbatch_tokens):
                part = self.task.collate(self.examples, rows, epoch, seed)
                parts.append({**part, "rows": torch.tensor(rows), "rows_of_rank": share, "targets": max(targets, 1)})
            yield {"parts": parts, "rows": torch.tensor(mine), "seed": drawn("dropout", seed, step, mine[0])}


class _Dropout(Algorithm):
    """Dropout is drawn for the batch and the example that the rank's share begins with, not for what was drawn before."""

    def match(self, event: Event, state: State) -> bool:
        """Before each batch."""
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Seed."""
        torch.manual_seed(state.batch["seed"])  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]


@dataclass(frozen=True)
class Fitted:
    """What training left: batches, tokens of all ranks, the last batch's loss."""

    steps: int
    tokens: int
    loss: float | None


def fit(config: FinetuneConfig, encoder: Encoder, head: nn.Module, task: Task) -> Fitted:
    """Train encoder and head in place.

    Raises:
        UserError: the data can't be used, or the loss is not a finite number.
    """
    reproducibility.seed_all(config.seed)
    examples = task.training()
    steps = steps_of(config, len(examples))
    trainer = _trainer(config, encoder, head, task, Batches(task, examples, config, steps))
    try:
        trainer.fit()
        trainer.close()
    except BaseException:
        # Not `trainer.close()`: it waits for the other ranks, and they wait for this one's batch.
        trainer.engine.close()
        raise
    losses: dict[str, float] = trainer.state.total_loss_dict or {}
    return Fitted(steps, trainer.state.timestamp.token.value, losses.get("loss/train/total"))


def _trainer(config: FinetuneConfig, encoder: Encoder, head: nn.Module, task: Task, batches: Batches) -> Trainer:
    whole = Duration(len(batches), "ba")
    if config.warmup.unit in ("dur", "ep"):
        share = config.warmup.value / (config.max_duration.value if config.warmup.unit == "ep" else 1)
        warmup = Duration(share, "dur").of(whole)
    else:
        warmup = Duration(batches_in(config, config.warmup), "ba")
    schedule = ScheduleConfig(warmup=warmup, decay=Duration(max(whole.value - warmup.value, 0), "ba"))
    model = FinetuneModel(encoder, head, task)
    embedding = encoder.backbone.get_input_embeddings().weight  # pyright: ignore
    share = config.batch_size // dist.get_world_size()
    ours = config.logging
    data = DataSpec(
        DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available()),
        split_batch=lambda batch, size: batch["parts"],  # pyright: ignore
        get_num_samples_in_batch=lambda batch: len(batch["rows"]),  # pyright: ignore
        get_num_tokens_in_batch=lambda batch: sum(sum(part["lengths"]) for part in batch.get("parts", [batch])),  # pyright: ignore
    )
    folder = folder_of(config)
    return Trainer(
        model=model,
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=data,
        max_duration=str(whole),
        optimizers=adamw(model, config.optimizer, embedding=embedding),
        algorithms=[
            WarmupStableDecay(schedule, whole, config.optimizer.lr),
            _Dropout(),
            Gradients(config.optimizer.clip_norm, config.optimizer.skip_nonfinite, ours.loss_spike, folder, after=""),
        ],
        callbacks=[LRMonitor()] if ours.jsonl or ours.tensorboard or ours.wandb or ours.mlflow else [],
        loggers=loggers(ours, folder, config.run_name),
        precision=config.precision,
        # How a batch is cut is the task's and `microbatch_tokens`' business.
        device_train_microbatch_size=share,
        progress_bar=ours.progress_bar,
        log_to_console=ours.console_interval is not None,
        console_log_interval=str(ours.console_interval or "1ep"),
        auto_log_hparams=False,
    )
