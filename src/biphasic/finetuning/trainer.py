"""Train an encoder on a downstream task with Composer."""

import atexit
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import LRMonitor
from composer.core import Callback, DataSpec, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist, reproducibility
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from biphasic.config.finetune import FinetuneConfig
from biphasic.devices import describe_machine_once, rank_device
from biphasic.durations import Duration
from biphasic.finetuning.batches import GlobalBatches, count_steps, warmup_batches
from biphasic.finetuning.task import FinetuneTask, TaskBatch
from biphasic.grouping import groups_up_to
from biphasic.model.encoder import Encoder
from biphasic.model.segments import Segments
from biphasic.objectives.batch import mean_over_global_batch
from biphasic.training.anomalies import AnomalyLog, SpikeDetector
from biphasic.training.loggers import loggers
from biphasic.training.optimizer import WarmupStableDecay, build_optimizer
from biphasic.training.step import GradientGuard


class FinetuneModel(ComposerModel):
    """The Composer model for fine-tuning: an encoder and a head, trained with the task's loss.

    `tokens_per_pass` is the number of tokens in a forward pass, unless a text is longer. The loss of retrieval needs
    all texts of a batch: each pass keeps only its embeddings and is computed again in the backward pass, with the same
    dropout, so that the activations and hidden states of one pass are in memory (gradient caching). The gradients are
    those of a single pass.
    """

    def __init__(self, encoder: Encoder, head: nn.Module, task: FinetuneTask, tokens_per_pass: int):
        super().__init__()
        self.tokens_per_pass = tokens_per_pass
        self.backbone, self.head = encoder.backbone, head
        self.encoder, self.task = encoder, task

    def forward(self, batch: TaskBatch) -> Tensor:
        """Return a microbatch's summed loss, computed here because sharding wrappers gather parameters in `forward`."""
        tokens, lengths = batch["tokens"], batch["lengths"]
        passes = list(groups_up_to(self.tokens_per_pass, lengths, int))
        if len(passes) == 1:
            outputs = self._outputs(tokens, lengths)
        else:
            inputs = zip(tokens.split([sum(part) for part in passes]), passes, strict=True)
            outputs = torch.cat([checkpoint(self._outputs, *each, use_reentrant=False) for each in inputs])
        return self.task.loss(self.head, outputs, Segments.of(lengths, tokens.device), batch)

    def _outputs(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        segments = Segments.of(lengths, tokens.device)
        return self.task.outputs(self.encoder.hidden(tokens, segments), segments)

    def loss(self, outputs: Tensor, batch: TaskBatch) -> dict[str, Tensor]:  # pyright: ignore
        """Return the microbatch's share of the mean loss over the global batch's targets."""
        rows, rows_per_rank = len(batch["row_ids"]), batch["rows_per_rank"]
        return {"total": mean_over_global_batch(outputs, batch["mean_targets_per_rank"], rows, rows_per_rank)}


class SeededDropout(Callback):
    """Seeds dropout for each batch and rank, so that it doesn't depend on earlier random numbers."""

    def batch_start(self, state: State, logger: Logger) -> None:
        torch.manual_seed(state.batch["seed"])  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]


def train(config: FinetuneConfig, encoder: Encoder, head: nn.Module, task: FinetuneTask) -> dict[str, Any]:
    """Train the encoder and head in place; return `steps` (batches), `tokens` (summed over ranks) and the last `loss`.

    Raises a UserError if the data can't be used, or the loss is NaN or Inf.
    """
    reproducibility.seed_all(config.seed)
    examples = task.training_examples()
    steps = count_steps(config, len(examples["texts"]))
    batches = GlobalBatches(task, examples, config, steps, dist.get_global_rank(), dist.get_world_size())
    trainer = _build_trainer(config, FinetuneModel(encoder, head, task, config.microbatch_tokens), batches)
    try:
        trainer.fit()
        trainer.close()
    except BaseException:
        # `trainer.close()` would deadlock: it waits for the other ranks, which wait for this rank's batch.
        trainer.engine.close()
        raise
    finally:
        # Composer leaves the closed engine's exit handler registered, which keeps model, optimizer and data in memory.
        atexit.unregister(trainer.engine._close)
    losses: dict[str, float] = trainer.state.total_loss_dict or {}
    tokens = trainer.state.timestamp.token.value
    return {"steps": steps, "tokens": tokens, "loss": losses.get("loss/train/total")}


def _build_trainer(config: FinetuneConfig, model: FinetuneModel, batches: GlobalBatches) -> Trainer:
    total, warmup = Duration(len(batches), "ba"), warmup_batches(config, len(batches))
    decay = Duration(max(len(batches) - warmup, 0), "ba")
    optimizer, folder = config.optimizer, config.run_folder
    built = build_optimizer(model, model.backbone, optimizer.name, **optimizer.adam)
    destinations = loggers(config.logging, folder, config.run_name)
    anomalies = AnomalyLog(folder)
    callbacks: list[Callback] = [SeededDropout()]
    if destinations:  # trials of a sweep have none
        callbacks += [SpikeDetector(anomalies), LRMonitor()]
    data = DataSpec(
        DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available()),
        split_batch=lambda batch, size: batch["parts"],  # pyright: ignore
        get_num_samples_in_batch=lambda batch: len(batch["row_ids"]),  # pyright: ignore
        get_num_tokens_in_batch=lambda batch: sum(sum(part["lengths"]) for part in batch.get("parts", [batch])),  # pyright: ignore
    )
    describe_machine_once()
    return Trainer(
        model=model,
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=data,
        max_duration=str(total),
        optimizers=built,
        algorithms=[
            WarmupStableDecay(Duration(warmup, "ba"), decay, optimizer.lr),
            GradientGuard(optimizer.clip_norm, optimizer.max_skipped_batches, anomalies, advice=""),
        ],
        callbacks=callbacks,
        loggers=destinations,
        precision=config.precision,
        # The batches are already split into microbatches (`parts`).
        device_train_microbatch_size=batches.per_rank,
        device=rank_device(),
        progress_bar=False,  # ours is one of the loggers
        auto_log_hparams=False,
    )
