"""Pretrain a language model: build a Composer Trainer from a checked configuration, and run it."""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import LRMonitor, RuntimeEstimator
from composer.core import Algorithm, Callback, Evaluator, State
from composer.utils import dist, reproducibility
from torch.cuda import is_available as has_gpu

from biphasic.checkpointing.attempt import Attempt, start_attempt
from biphasic.checkpointing.resume import fetch_branch_point, fetch_initial_weights
from biphasic.checkpointing.save import Saver
from biphasic.checkpointing.start import BranchPoint, overridden_keys, require_same_data, require_same_past
from biphasic.checkpointing.stopping import ProcessGroup, StopCoordinator
from biphasic.checkpointing.store import Uploader
from biphasic.config.durations import Duration, Elapsed
from biphasic.config.load import dump
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.shards import index_hashes
from biphasic.data.streaming import RowDataset, build_loader
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.devices import rank_device, require_precision
from biphasic.errors import UserError
from biphasic.faults import COLLECTIVE_SECONDS, close_on_fault
from biphasic.model.backbone import build_language_model
from biphasic.model.checkpoint import require_safe_checkpoint
from biphasic.model.language_model import LanguageModel
from biphasic.model.layers import recomputed_layers
from biphasic.objectives.mlm import Vocabulary
from biphasic.training.anomalies import AnomalyLog, SpikeDetector
from biphasic.training.checkpoint_schedule import checkpoint_schedule, trained, validation_schedule
from biphasic.training.compute import AutoMicrobatch, configure_compute
from biphasic.training.loggers import loggers
from biphasic.training.meters import Meters
from biphasic.training.optimizer import WarmupStableDecay, build_optimizer
from biphasic.training.parallel import ShardedModel, Strategy, choose_strategy, parallelism_config
from biphasic.training.record import RunRecord, conversion_record
from biphasic.training.step import EVALUATIONS, GradientGuard, ObjectiveSchedule, PretrainModel, data_spec


def run(config: PretrainConfig) -> Path:
    """Train, resuming from the newest checkpoint if there is one.

    Returns:
        The run's folder.

    Raises:
        UserError: data, tokenizer or checkpoint is missing or doesn't match the configuration, or a shard is damaged.
    """
    require_precision(config.precision)
    if config.compute.deterministic:
        reproducibility.configure_deterministic_mode()  # before CUDA is initialized
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    attempt = start_attempt(config)
    trainer = None

    def close(reason: str) -> None:
        # Not `trainer.close()`, because it waits for the other ranks, which wait for this rank's batch.
        if trainer is not None:
            trainer.engine.close()
        attempt.end(reason)

    with close_on_fault(close):
        trainer = prepare(config, attempt)
        repeats_validation = (
            attempt.resume is not None and attempt.resume.is_within_validation and config.data.validation is not None
        )
        if repeats_validation:
            _repeat_validation(config, trainer)
        if trained(trainer.state).reached(config.max_duration):
            done = "" if repeats_validation else "; nothing to do"
            _print(f"{config.run_name}: already trained to {config.max_duration}{done}")
        else:
            if config.compute.compile is True or (config.compute.compile == "auto" and has_gpu()):
                _print(f"{config.run_name}: the first batch of each objective takes longer, since layers are compiled")
            trainer.fit()
        trainer.close()
    attempt.end("finished")
    return config.run_folder


def _repeat_validation(config: PretrainConfig, trainer: Trainer) -> None:
    """Repeat the validation within which the run was stopped, and save its losses."""
    _print(f"{config.run_name}: repeating the validation in which the run was stopped")
    trainer.eval()
    [saver] = (callback for callback in trainer.state.callbacks if isinstance(callback, Saver))
    saver.save_after_validation(trainer.state, trainer.logger)
    if trained(trainer.state).reached(config.max_duration):
        saver.fit_end(trainer.state, trainer.logger)


def prepare(config: PretrainConfig, attempt: Attempt) -> Trainer:
    """Build the Trainer and load the checkpoint that the run starts from, without training."""
    reproducibility.seed_all(config.seed)
    folder, rank = config.run_folder, dist.get_global_rank()
    rows_per_rank = config.global_batch_size // dist.get_world_size()
    begin = time.monotonic()
    _print(f"{config.run_name}: reading {config.tokenizer} and the records of the data")
    tokenizer = load_tokenizer(config.tokenizer)
    data_record = conversion_record(config, tokenizer)
    start, branch_point = _starting_checkpoint(config, attempt)

    # Model and optimizer
    _print(f"{config.run_name}: building the model")
    model, strategy = _build_model(config, tokenizer, start, attempt.ranks)
    computing = configure_compute(model, config.compute, config.precision)
    _print(f"{config.run_name}: {computing}")
    optimizer = build_optimizer(model, model.backbone, config.optimizer)

    # Data
    datasets = ", ".join(stream.remote or stream.local for stream in config.data.streams.values())
    _print(f"{config.run_name}: opening {datasets}")
    first_row = config.data.first_row(config.global_batch_size)
    batches = build_loader(
        config.data, config.data.streams, rows_per_rank, config.seed, train=True, first_row=first_row
    )
    dataset = batches.dataset
    assert isinstance(dataset, RowDataset)
    indexes = index_hashes(config.data.streams)
    overridden = []
    if attempt.resume is not None:
        require_same_past(attempt.resume, config, indexes)
        overridden = overridden_keys(attempt.resume, config, indexes)
    elif branch_point is not None:
        require_same_data(branch_point, indexes)

    # Algorithms, which change how a batch is trained
    objective = ObjectiveSchedule(
        config.objective.phases,
        config.max_duration,
        Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids),
        config.seed,
        config.evaluation.masking_ratio,
        dataset.first_epoch,
        repeats_rows=config.data.mix is not None,
    )
    anomalies = AnomalyLog(folder, lambda batch: batch.row_ids)
    algorithms: list[Algorithm] = [
        WarmupStableDecay(config.schedule, config.max_duration, config.optimizer.lr),
        objective,
        GradientGuard(config.optimizer.clip_norm, config.optimizer.max_skipped_batches, anomalies),
    ]
    auto_microbatch = config.microbatch_size == "auto"
    if auto_microbatch and has_gpu():
        algorithms.append(AutoMicrobatch(config, folder))

    # Callbacks, which record and save
    precision = torch.bfloat16 if config.precision == "amp_bf16" else torch.float32
    layers: Any = model.backbone.layers
    callbacks: list[Callback] = [
        ShardedModel(list(layers)),
        RunRecord(config, model, data_record),
        Meters(model.architecture(), recomputed_layers(model.backbone), precision),
        LRMonitor(),
        RuntimeEstimator(),
        _saver(config, attempt, {"indexes": indexes, "overridden": overridden}, objective),
        attempt.stopping,  # after the saver, which may request a stop
    ]
    if config.logging.loss_spike is not None:
        callbacks.append(SpikeDetector(config.logging.loss_spike, anomalies, lambda batch: batch.objective))
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    dist.barrier()

    trainer = Trainer(
        model=PretrainModel(model),
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=data_spec(batches),
        eval_dataloader=_evaluators(config, attempt.stopping),
        max_duration=str(config.max_duration),
        optimizers=optimizer,
        algorithms=algorithms,
        callbacks=callbacks,
        loggers=loggers(config.logging, folder, config.run_name),
        precision=config.precision,
        device_train_microbatch_size=rows_per_rank if auto_microbatch else config.microbatch_size,
        parallelism_config=parallelism_config(config, strategy, monolithic=start is not None and start.endswith(".pt")),
        device=rank_device(),
        progress_bar=False,  # ours is one of the loggers
        load_path=start,
        auto_log_hparams=False,
    )
    position, seconds = _position(trainer, config.max_duration), f"{time.monotonic() - begin:.1f} s"
    if attempt.resume is not None:
        _print(f"{config.run_name}: resuming at {position} from {start}, {seconds}")
    else:
        _print(f"{config.run_name}: starting at {position}, {seconds}")
    return trainer


def _position(trainer: Trainer, end: Duration) -> str:
    """Return the batch that comes next, and how many there are, or the run's length in its own unit."""
    batch = int(trainer.state.timestamp.batch)
    return f"batch {batch:,} of {int(end.value):,}" if end.unit == "ba" else f"batch {batch:,} (length: {end})"


def _print(line: str) -> None:
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def _starting_checkpoint(config: PretrainConfig, attempt: Attempt) -> tuple[str | None, BranchPoint | None]:
    """Return the local path of the checkpoint to load: this run's newest, or else one of another run (`start_from`)."""
    branch_point = None
    if attempt.resume is not None:
        if not config.checkpoint.autoresume:
            raise UserError(
                f"{attempt.destination} holds checkpoints (the newest: {attempt.resume.path}) and checkpoint.autoresume is "
                "false: choose another run_name, or remove them"
            )
        start = str(attempt.local_folder / attempt.resume.path)
    elif config.start_from is not None:
        branch_point, start = fetch_branch_point(config, attempt.ranks)
        batch, tokens = branch_point.manifest.batch, branch_point.manifest.run["tokens"]
        attempt.lock.record_start(batch, tokens)
        _print(f"{config.run_name}: starts from batch {batch}, {branch_point.path}")
    else:
        return None, None
    require_safe_checkpoint(start)
    return start, branch_point


def _build_model(
    config: PretrainConfig, tokenizer: Tokenizer, start: str | None, ranks: ProcessGroup
) -> tuple[LanguageModel, Strategy]:
    section = config.model
    if section.init_from is not None:
        section = section.model_copy(update={"init_from": fetch_initial_weights(config, ranks)})
    arguments = (section, config.data.sequence_length, config.seed, tokenizer.vocab_size)
    size = architecture_of(config.model)
    if size is None:
        model = build_language_model(*arguments)
        return model, choose_strategy(config, model.architecture(), start)
    strategy = choose_strategy(config, size, start)
    # With FSDP the other ranks receive rank 0's weights, so their models are built on the meta device.
    on_meta = strategy == "fsdp" and dist.get_global_rank() > 0
    return build_language_model(*arguments, on_meta=on_meta), strategy


def _saver(config: PretrainConfig, attempt: Attempt, history: dict[str, Any], objective: ObjectiveSchedule) -> Saver:
    section, rank, local_rank = config.checkpoint, dist.get_global_rank(), dist.get_local_rank()
    attempt.local_folder.mkdir(parents=True, exist_ok=True)
    # Rank 0's, because paths may differ between nodes, and the ranks' manifests are compared.
    recorded = attempt.ranks.broadcast({"config": config.model_dump(mode="json"), **history})

    def describe(state: State) -> dict[str, Any]:
        return {
            "name": config.run_name,
            "attempt": attempt.name,
            **recorded,
            "phase": objective.phase_name,
            "tokens": int(state.timestamp.token),
            "rows": int(state.timestamp.sample),
            "epochs": int(state.timestamp.epoch),
            "last_batch": list(astuple(objective.last_batch or Elapsed(0, 0, 0, 0))),
            "ranks": dist.get_world_size(),
        }

    local_ranks = range(rank - local_rank, rank - local_rank + dist.get_local_world_size())
    uploader = Uploader(attempt.local_folder, attempt.destination, section.keep, rank, local_ranks)
    return Saver(attempt, uploader, checkpoint_schedule(config), describe, section.upload_timeout)


def _evaluators(config: PretrainConfig, stopping: StopCoordinator) -> list[Evaluator]:
    """Return an evaluator of the validation split for each objective."""
    if config.data.validation is None:
        return []
    rows = (config.evaluation.batch_size or config.global_batch_size) // dist.get_world_size()
    data = config.data
    if config.evaluation.batches is None:
        # With several canonical nodes Streaming leaves rows out and repeats others. They spread a number of batches over
        # the split.
        data = data.model_copy(update={"num_canonical_nodes": 1})
    batches = build_loader(data, {"data.validation": config.data.validation}, rows, config.seed, train=False)
    is_due = validation_schedule(config, lambda: stopping.reason is not None)
    return [
        Evaluator(
            label=label,
            eval_interval=is_due,
            dataloader=data_spec(batches),
            metric_names=["loss"],
            subset_num_batches=config.evaluation.batches,
            device_eval_microbatch_size=None if config.microbatch_size == "auto" else config.microbatch_size,
        )
        for label in EVALUATIONS
    ]
