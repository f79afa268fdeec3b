"""The recipe: pretrain a text encoder with causal language modeling (CLM), then with masked language modeling (MLM).

Read it from top to bottom. `biphasic.training.step` shows what happens to each batch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import LRMonitor, RuntimeEstimator
from composer.core import Algorithm, Callback, Evaluator, Event, State
from composer.utils import dist

from biphasic.checkpointing.open_run import Run, open_run
from biphasic.checkpointing.save import RunSettings, interval_schedule
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.config.conversion_checks import bos_warning, conversion_record
from biphasic.config.load import dump
from biphasic.config.model import architecture_of
from biphasic.config.phase_inputs import phase_key
from biphasic.config.plan import branch_points
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.batches import PhaseRows, TrainingBatches
from biphasic.data.streaming import build_loader
from biphasic.data.streams import index_hashes, opened_streams, read_conversions
from biphasic.data.tokenizer import Tokenizer, TokenTexts, load_tokenizer
from biphasic.devices import describe_machine_once, is_out_of_memory, rank_device
from biphasic.durations import TrainingProgress
from biphasic.errors import first_line
from biphasic.export.write import require_exportable
from biphasic.initial_model import build_language_model
from biphasic.model.language_model import LanguageModel, plain_rope
from biphasic.objectives.objective import CLM, MLM, Objective
from biphasic.objectives.targets import Vocabulary
from biphasic.ranks import is_first_rank
from biphasic.timeline import resolve_phases
from biphasic.training.anomalies import AnomalyLog, SpikeDetector
from biphasic.training.compute import MicrobatchSize, configure_compute
from biphasic.training.loggers import loggers
from biphasic.training.meters import Meters
from biphasic.training.optimizer import WarmupStableDecay, build_optimizer
from biphasic.training.parallel import ShardedModel, Strategy, choose_strategy, parallelism_config
from biphasic.training.record import RunRecord
from biphasic.training.step import GradientGuard, PretrainModel, data_spec
from biphasic.training.switch import ObjectiveSwitch


def pretrain(config: PretrainConfig) -> Path:
    """Train a model, resuming from the newest checkpoint if there is one. Return the run's folder.

    Raises:
        UserError: data, tokenizer or checkpoint is missing or doesn't match the configuration, a shard is damaged, or a GPU
            runs out of memory.
    """
    with open_run(run_settings(config), ResumeGuard(config)) as run:
        trainer = prepare(config, run)
        try:
            run.train(trainer)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            microbatch = next(each for each in trainer.state.algorithms if isinstance(each, MicrobatchSize))
            raise microbatch.out_of_memory(trainer.state) from error
    return config.run_folder


def run_settings(config: PretrainConfig) -> RunSettings:
    """Return what opening the run and saving its checkpoints need to know of its configuration."""
    validates, logging = config.data.validation is not None, config.logging
    return RunSettings(
        name=config.run_name,
        folder=config.run_folder,
        destination=config.checkpoint_destination,
        local_checkpoints=config.local_checkpoints,
        max_duration=config.max_duration,
        interval=config.checkpoint.interval,
        validation_interval=(config.evaluation.interval or config.max_duration) if validates else None,
        keep=config.checkpoint.keep,
        branch_points=tuple(branch_points(config)),
        start_from=config.start_from,
        init_from=config.model.init_from,
        streams=config.splits,
        has_tracker=logging.wandb is not None or logging.mlflow is not None,
        precision=config.precision,
        deterministic=config.compute.deterministic,
        seed=config.seed,
    )


def prepare(config: PretrainConfig, run: Run) -> Trainer:
    """Build the run's Trainer and load the checkpoint that the run starts from, without training."""
    # Tokenizer and rows
    run.say(f"reading {config.tokenizer} and the records of the data")
    tokenizer = load_tokenizer(config.tokenizer)
    streams = config.streams
    conversions = read_conversions(streams)
    data_record = conversion_record(config, tokenizer, conversions)
    if config.model.init_from is not None and (warning := bos_warning(config.model.init_from, conversions)):
        run.say(f"WARNING: {warning}")
    run.say(f"opening {', '.join(stream.remote or stream.local for stream in streams.values())}")
    for line in opened_streams(config.splits)[1]:
        run.say(line)
    phases = [phase.objective for phase in config.objective.phases]
    inputs = [
        PhaseRows(each.source, each.shape, each.streams, each.data.reading, each.data.first_row(each.rows))
        for each in config.inputs
    ]
    batches = TrainingBatches(
        resolve_phases(phases, config.max_duration),
        inputs,
        lambda own, rows: build_loader(own.reading, own.streams, rows, config.seed, train=True, tokenizer=tokenizer),
    )
    run.check_rows(index_hashes(streams))
    run.check_later_data(stream for key, stream in streams.items() if not key.startswith("data."))

    # Model
    run.say("building the model")
    model, strategy = _build_model(config, tokenizer, run)
    run.say(configure_compute(model, config.compute, config.precision))
    if model.compiled_loss:
        run.say("the first batch takes longer, since layers are compiled for each phase")

    # Optimizer and learning rate
    optimizer = build_optimizer(model, model.backbone, config.optimizer.name, **config.optimizer.adam)
    rate = config.schedule
    shape = {"decay_shape": rate.decay_shape, "final_lr": rate.final_lr}
    learning_rate = WarmupStableDecay(rate.warmup, rate.decay, config.optimizer.lr, **shape)

    # Phases: which objective a batch has
    bases, validation = [each.rope_theta for each in config.inputs], _validation_objectives(config)
    for index, base in enumerate(bases):
        if base is not None:  # now, and not when the phase begins
            plain_rope(model.config, str(config.model.init_from), f"{phase_key(index)}.model.rope_theta")
    objective = ObjectiveSwitch(
        phases,
        Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids),
        config.seed,
        validation=validation,
        byte_lengths=[len(text) for text in TokenTexts(tokenizer).texts],
        on_phase=lambda index: model.set_rope_theta(bases[index]),
    )

    # Before each optimizer step: clipping, NaN and Inf
    anomalies = AnomalyLog(config.run_folder)
    guard = GradientGuard(config.optimizer.clip_norm, config.optimizer.max_skipped_batches, anomalies)

    microbatch = MicrobatchSize(
        config.microbatch_size,
        inputs,
        [phase.causal for phase in phases],
        config.checkpoint_destination,
        config.model_dump(mode="json", include={"model", "precision", "parallelism", "compute"}),
        conversions if model.backbone.attention_backend == "varlen" else {},
    )
    algorithms: list[Algorithm] = [learning_rate, objective, microbatch, guard]

    # What is measured, logged and saved
    precision = torch.bfloat16 if config.precision == "amp_bf16" else torch.float32
    layers: Any = model.backbone.layers
    callbacks: list[Callback] = [
        batches,
        ShardedModel(list(layers)),
        RunRecord(dump(config), phases, model, data_record),
        Meters(model.architecture(), precision),
        LRMonitor(),
        RuntimeEstimator(),
        *run.callbacks,
        SpikeDetector(anomalies),
    ]

    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    describe_machine_once()
    trainer = Trainer(
        model=PretrainModel(model),
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=data_spec(batches),
        eval_dataloader=_evaluators(config, run, tokenizer, validation),
        max_duration=str(config.max_duration),
        optimizers=optimizer,
        algorithms=algorithms,
        callbacks=callbacks,
        loggers=loggers(config.logging, config.run_folder, config.run_name, run.id),
        precision=config.precision,
        device_train_microbatch_size=batches.batch_size,  # `MicrobatchSize` sets it
        parallelism_config=parallelism_config(
            strategy, config.parallelism.shard_degree, monolithic=(run.checkpoint or "").endswith(".pt")
        ),
        device=rank_device(),
        progress_bar=False,  # `loggers` adds our own
        load_path=run.checkpoint,
        load_ignore_keys=_leave_out,
        spin_dataloaders=False,  # `batches` begins at the right one
        auto_log_hparams=False,
    )
    batches.progress = lambda: TrainingProgress.of(trainer.state.timestamp)
    for group, own in zip(trainer.state.optimizers[0].param_groups, settings, strict=True):
        group.update(own)  # a checkpoint brings its own, which `checkpoint.resume_overrides` may have changed
    return trainer


def _leave_out(checkpoint: dict[str, Any]) -> None:
    """Remove what no run needs from the state to load: a checkpoint that was written on CPUs lacks a GPU's part of it."""
    checkpoint["state"].pop("scaler", None)  # no precision here needs one
    checkpoint.pop("rng", None)  # each batch seeds its random numbers


def _build_model(config: PretrainConfig, tokenizer: Tokenizer, run: Run) -> tuple[LanguageModel, Strategy]:
    section = config.model
    if section.init_from is not None:
        # A checkpoint of this run has its own network. The other model may be gone by now, or have been trained further.
        own = {"init_from": run.checkpoint, "new_vocabulary": None}
        first = {"init_from": run.fetch_initial_weights(section.init_from)} if run.checkpoint is None else own
        section = section.model_copy(update=first)
    arguments = (section, config.longest_row, config.seed, tokenizer)
    size = architecture_of(config.model)
    if size is None:
        model = build_language_model(*arguments)
        try:
            require_exportable(model, tokenizer)
        except Exception as error:  # the family's code may raise anything
            run.say(f"WARNING: the model can be trained, but not exported: {first_line(error)}")
        return model, choose_strategy(config.parallelism.strategy, model.architecture(), run.checkpoint)
    strategy = choose_strategy(config.parallelism.strategy, size, run.checkpoint)
    # With FSDP the other ranks receive rank 0's weights, so their models are built on the meta device.
    on_meta = strategy == "fsdp" and not is_first_rank()
    return build_language_model(*arguments, on_meta=on_meta), strategy


def _validation_objectives(config: PretrainConfig) -> dict[str, Objective]:
    # A head that predicts masked tokens from the position before can't be validated at their own position.
    last = {each.name: each for each in (CLM(), MLM(), *(phase.objective for phase in config.objective.phases))}
    return {name: each.validating(config.evaluation.masking_ratio) for name, each in last.items()}


def _evaluators(config: PretrainConfig, run: Run, tokenizer: Tokenizer, objectives: Iterable[str]) -> list[Evaluator]:
    if config.data.validation is None:
        return []
    rows = (config.evaluation.batch_size or config.global_batch_size) // dist.get_world_size()
    streams, count = {"data.validation": config.splits["data.validation"]}, config.evaluation.batches
    reading = config.data.reading
    batches = build_loader(reading, streams, rows, config.seed, train=False, batches=count, tokenizer=tokenizer)
    is_due = interval_schedule(run_settings(config).validation_interval, config.max_duration)

    def validates(state: State, event: Event) -> bool:
        # Before the batch's checkpoint, which then has the losses. If the run stops, its next start validates.
        return event == Event.BATCH_END and not run.is_stopping and is_due(state)

    return [
        Evaluator(
            label=label,
            eval_interval=validates,
            dataloader=data_spec(batches),
            metric_names=["loss", "bits_per_byte"],
            subset_num_batches=count,
            device_eval_microbatch_size=None if config.microbatch_size == "auto" else config.microbatch_size,
        )
        for label in objectives
    ]
