"""Fine-tuning: one Composer trainer for all tasks."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from composer import Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.core import DataSpec
from composer.models import ComposerModel
from composer.utils import dist, get_device, reproducibility
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from biphasic.config.durations import Duration
from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import dump
from biphasic.config.places import folder_of
from biphasic.config.schema import ScheduleConfig
from biphasic.export.card import finetuned_card
from biphasic.export.write import export_encoder
from biphasic.finetuning.retrieval import Retrieval
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.storage import as_bytes, store
from biphasic.training.optimizer import adamw
from biphasic.training.pretrain import loggers
from biphasic.training.wsd import WarmupStableDecay

Batch = dict[str, Any]
RECORD = "record.json"


class Task(Protocol):
    """What a kind of task brings: everything else is shared. `batch["lengths"]` holds the lengths of its texts."""

    @property
    def prompts(self) -> dict[str, str]:
        """What goes before texts, by role."""
        ...

    def head(self, width: int) -> nn.Module:
        """What is trained on top of the encoder."""
        ...

    def examples(self, encoder: Encoder) -> Sequence[Any]:
        """All training examples, tokenized."""
        ...

    def collate(self, pairs: Sequence[Any]) -> Batch:
        """Examples to a batch: flat `tokens`, `lengths` on the host, targets."""
        ...

    def loss(self, backbone: nn.Module, head: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the rank's examples."""
        ...


TASKS: dict[str, Callable[[Any], Task]] = {"retrieval": Retrieval}


class FinetuneModel(ComposerModel):
    """An encoder and a task's head, trained by the task's loss."""

    def __init__(self, backbone: nn.Module, task: Task):
        super().__init__()
        self.backbone = backbone
        self.head = task.head(backbone.config.hidden_size)  # pyright: ignore
        self.task = task

    def forward(self, batch: Batch) -> Tensor:
        """The loss; computed here, where wrapped parameters exist."""
        return self.task.loss(self.backbone, self.head, batch)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """What `forward` gave."""
        return outputs


class _Batches(IterableDataset[Batch]):
    """A rank's share of each global batch of one epoch; the order is a function of the seed, not of the ranks."""

    def __init__(self, examples: Sequence[Any], batch_size: int, seed: int, task: Task):
        self.order = list(range(len(examples)))
        random.Random(f"finetune order {seed}").shuffle(self.order)
        self.examples, self.batch_size, self.task = examples, batch_size, task

    def __len__(self) -> int:
        return len(self.examples) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        share = self.batch_size // dist.get_world_size()
        for batch in range(len(self)):
            start = batch * self.batch_size + dist.get_global_rank() * share
            yield self.task.collate([self.examples[index] for index in self.order[start : start + share]])


def run(config: FinetuneConfig) -> Path:
    """Fine-tune, export the encoder, and record what was done; a run that is recorded already is left alone.

    Returns:
        The run's folder, with `model/` in it.

    Raises:
        UserError: the model or the data can't be used.
    """
    folder = folder_of(config)
    dist.initialize_dist(get_device(None))
    mark = _fingerprint(config)
    if (folder / RECORD).is_file():
        if json.loads((folder / RECORD).read_text(encoding="utf-8"))["fingerprint"] == mark:
            print(f"{config.run_name}: already fine-tuned from the same model, data and settings; nothing to do")
            return folder
        raise UserError(f"{folder} holds another fine-tuning: choose another run_name, or remove it")
    reproducibility.seed_all(config.seed)
    encoder = load_encoder(config.model.path, config.model.trust_remote_code)
    task = TASKS[config.task.name](config.task)
    examples = task.examples(encoder)
    batches = _Batches(examples, config.batch_size, config.seed, task)
    if not len(batches):
        raise UserError(f"task.train: {len(examples)} examples don't fill one batch of {config.batch_size}")
    steps = _steps(config, len(batches))
    if dist.get_global_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        # What an interrupted attempt wrote is of no use: a run this short starts over.
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    dist.barrier()
    print(f"fine-tuning {config.model.path} on {len(examples):,} examples: {steps:,} batches of {config.batch_size}")
    start = time.monotonic()
    trainer = _trainer(config, folder, encoder, task, batches, steps)
    trainer.fit()
    seconds, tokens = time.monotonic() - start, trainer.state.timestamp.token.value
    loss = (trainer.state.total_loss_dict or {}).get("loss/train/total")
    trainer.close()
    if dist.get_global_rank() == 0:
        rows = {
            "From": config.model.path,
            "Task": f"{config.task.name} on {', '.join(config.task.train)} ({len(examples):,} examples)",
            "Steps": f"{steps:,} of {config.batch_size}",
            "Learning rate": f"{config.optimizer.lr}, {config.warmup} warmup, then linear decay to 0",
            "Seed": config.seed,
            "Last loss": loss,
        }
        card = finetuned_card(config.run_name, rows)
        longest = min(config.task.max_length, encoder.max_length)
        out = folder / "model"
        export_encoder(
            encoder.backbone, encoder.tokenizer, out, card, prompts=task.prompts, max_length=longest, force=True
        )
        record = {"fingerprint": mark, "steps": steps, "tokens": tokens, "seconds": seconds, "loss": loss}
        store(str(folder)).write(RECORD, as_bytes(record))
    dist.barrier()
    return folder


def _trainer(
    config: FinetuneConfig, folder: Path, encoder: Encoder, task: Task, batches: _Batches, steps: int
) -> Trainer:
    whole = Duration(steps, "ba")
    warmup = (
        config.warmup.of(whole) if config.warmup.unit == "dur" else Duration(_batches_in(config, config.warmup), "ba")
    )
    schedule = ScheduleConfig(warmup=warmup, decay=Duration(steps - warmup.value, "ba"))
    model = FinetuneModel(encoder.backbone, task)
    embedding = encoder.backbone.get_input_embeddings().weight  # pyright: ignore
    share = config.batch_size // dist.get_world_size()
    data = DataSpec(
        DataLoader(batches, batch_size=None),
        # In-batch negatives need the batch whole, so it is its own only microbatch.
        split_batch=lambda batch, size: [batch],
        get_num_samples_in_batch=lambda batch: share,
        get_num_tokens_in_batch=lambda batch: sum(batch["lengths"]),
    )
    clipping = [GradientClipping("norm", config.optimizer.clip_norm)] if config.optimizer.clip_norm else []
    return Trainer(
        model=model,
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=data,
        max_duration=str(whole),
        optimizers=adamw(model, config.optimizer, embedding=embedding),
        algorithms=[WarmupStableDecay(schedule, whole, config.optimizer.lr), *clipping],
        callbacks=[SpeedMonitor(window_size=10), LRMonitor()],
        loggers=loggers(config.logging, folder, config.run_name),
        precision=config.precision,
        device_train_microbatch_size=share,
        progress_bar=config.logging.progress_bar,
        auto_log_hparams=False,
    )


def _steps(config: FinetuneConfig, in_epoch: int) -> int:
    """At most `max_duration`, and at most one epoch."""
    if config.max_duration.unit == "ep":
        return in_epoch
    return min(in_epoch, _batches_in(config, config.max_duration))


def _batches_in(config: FinetuneConfig, duration: Duration) -> int:
    return int(duration.value) if duration.unit == "ba" else int(duration.value) // config.batch_size


def _fingerprint(config: FinetuneConfig) -> str:
    """A hash of the settings and of the files that the run reads."""
    content = hashlib.sha256(json.dumps(config.model_dump(mode="json", exclude={"logging"}), sort_keys=True).encode())
    path = Path(config.model.path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    for file in [*files, *map(Path, config.task.train)]:
        if file.is_file():
            with file.open("rb") as stream:
                content.update(hashlib.file_digest(stream, "sha256").digest())
    return content.hexdigest()
