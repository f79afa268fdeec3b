"""From a checked configuration to a Composer Trainer, and through the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import LRMonitor, RuntimeEstimator
from composer.core import Callback, Evaluator, Event, State
from composer.utils import create_interval_scheduler, dist, get_device, reproducibility

from biphasic.amounts import bytes_of
from biphasic.checkpointing.attempt import Attempt, begin
from biphasic.checkpointing.find import local_copy
from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.saver import Saver
from biphasic.checkpointing.stopping import Stopping
from biphasic.checkpointing.uploads import Uploads
from biphasic.config.checks import architecture_of
from biphasic.config.durations import Duration
from biphasic.config.errors import UserError
from biphasic.config.load import dump
from biphasic.config.places import checkpoint_places, folder_of
from biphasic.config.records import record_of
from biphasic.config.same_run import deciding, differences
from biphasic.config.schema import PretrainConfig
from biphasic.config.timeline import decay_start
from biphasic.data.shards import indexes
from biphasic.data.streaming import loader
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.faults import closing
from biphasic.model.backbone import build
from biphasic.model.checkpoint import require_plain
from biphasic.model.kernels import recomputed
from biphasic.model.language_model import LanguageModel
from biphasic.objectives.mlm import Vocabulary
from biphasic.storage import join
from biphasic.training import microbatch
from biphasic.training.composer_model import PretrainModel
from biphasic.training.compute import require_precision, set_up
from biphasic.training.gradients import Gradients
from biphasic.training.loggers import loggers
from biphasic.training.meters import Meters
from biphasic.training.moments import saves
from biphasic.training.objective_schedule import EVALUATIONS, ObjectiveSchedule, elapsed
from biphasic.training.optimizer import adamw
from biphasic.training.parallel import Strategy, parallelism, save_sharded, set_up_collectives, strategy_of
from biphasic.training.record import RunRecord
from biphasic.training.wsd import WarmupStableDecay


def run(config: PretrainConfig) -> Path:
    """Train, from the newest checkpoint if there is one.

    Returns:
        The run's folder.

    Raises:
        UserError: data, tokenizer or a checkpoint are missing or don't fit, or a shard turns out to be damaged.
    """
    require_precision(config.precision)
    dist.initialize_dist(get_device(None))
    attempt = begin(*checkpoint_places(config), {"name": config.run_name, "decides": deciding(config)})
    trainer = None

    def close(reason: str) -> None:
        # Not `trainer.close()`: it waits for the other ranks, and they wait for this one's batch.
        if trainer is not None:
            trainer.engine.close()
        attempt.end(reason)

    with closing(close):
        trainer = prepare(config, attempt)
        if trainer.state.max_duration is not None and trainer.state.timestamp >= trainer.state.max_duration:
            print(f"{config.run_name}: already trained to {config.max_duration}; nothing to do")
        else:
            trainer.fit()
        trainer.close()
    attempt.end("finished")
    return folder_of(config)


def prepare(config: PretrainConfig, attempt: Attempt) -> Trainer:
    """Build the run and load the checkpoint that it starts from; nothing is trained yet."""
    reproducibility.seed_all(config.seed)
    folder, ranks, resume, stopping = folder_of(config), dist.get_world_size(), attempt.resume, attempt.stopping
    if resume is not None and not config.checkpoint.autoresume:
        raise UserError(f"{attempt.place} holds checkpoints (the newest: {resume.path}) and checkpoint.autoresume is false: "
                        "choose another run_name, or remove them")  # fmt: skip
    tokenizer = load_tokenizer(config.tokenizer)
    data = conversion_record(config, tokenizer)
    start = (
        str(attempt.here / resume.path)
        if resume is not None
        else local_copy(config.schedule.decay_from, folder, attempt.ranks)
    )
    if start is not None:
        require_plain(start)
    model, strategy = _model(config, tokenizer, start)
    computing = set_up(model, config.compute)
    if dist.get_global_rank() == 0:
        print(f"{config.run_name}: {computing}")
    embedding = model.backbone.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
    optimizer = adamw(model, config.optimizer, embedding=embedding, head=model.lm_head.weight)
    train = loader(config.data, config.data.streams, config.global_batch_size // ranks, config.seed, train=True)
    decides = {**deciding(config), **indexes(config.data.streams)}
    if resume is not None:
        _require_same(resume, decides, config)
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids)
    schedule = ObjectiveSchedule(
        config.objective.phases, config.max_duration, vocabulary, config.seed, config.evaluation.masking_ratio
    )
    if dist.get_global_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    dist.barrier()

    gradients = Gradients(
        config.optimizer.clip_norm, config.optimizer.skip_nonfinite, config.logging.loss_spike, folder
    )
    saver = _saver(config, attempt, decides, schedule)
    auto = config.microbatch_size == "auto"
    trainer = Trainer(
        model=PretrainModel(model),
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=train,
        eval_dataloader=evaluators(config, ranks, stopping),
        max_duration=str(config.max_duration),
        optimizers=optimizer,
        algorithms=[
            WarmupStableDecay(config.schedule, config.max_duration, config.optimizer.lr),
            schedule,
            gradients,
        ],
        # The saver comes before the agreement to stop, for which it may have a reason.
        callbacks=[*callbacks(config, model, data), saver, stopping],
        loggers=loggers(config.logging, folder, config.run_name),
        precision=config.precision,
        device_train_microbatch_size=config.global_batch_size // ranks if auto else config.microbatch_size,
        parallelism_config=parallelism(config, strategy, whole=start is not None and start.endswith(".pt")),
        progress_bar=config.logging.progress_bar,
        log_to_console=config.logging.console_interval is not None,
        console_log_interval=str(config.logging.console_interval or "1ep"),
        load_path=start,
        auto_log_hparams=False,
    )
    save_sharded(trainer.state)
    set_up_collectives(trainer.state.model, list(model.backbone.layers))  # pyright: ignore[reportArgumentType]
    if auto and torch.cuda.is_available():
        rows = microbatch.find(trainer, config, folder)
        trainer.state.device_train_microbatch_size = rows
        for evaluator in trainer.state.evaluators:
            evaluator.device_eval_microbatch_size = rows
    if resume is None and config.schedule.decay_from is not None:
        _check_branch(trainer, config)
    return trainer


def _model(config: PretrainConfig, tokenizer: Tokenizer, start: str | None) -> tuple[LanguageModel, Strategy]:
    given = (config.model, config.data.sequence_length, config.seed, tokenizer.vocab_size)
    size = architecture_of(config.model)
    if size is None:
        model = build(*given)
        return model, strategy_of(config, model.architecture(), start)
    strategy = strategy_of(config, size, start)
    # With FSDP the first rank's weights are everybody's: the others need no memory for a copy.
    return build(*given, on_meta=strategy == "fsdp" and dist.get_global_rank() > 0), strategy


def _require_same(resume: Manifest, decides: dict[str, Any], config: PretrainConfig) -> None:
    """Go on only as the same run.

    Raises:
        UserError: naming each key that decides the weights and has changed.
    """
    lines = differences(resume.run["decides"], decides, config.checkpoint.allow)
    if lines:
        keys = ", ".join(line.partition(":")[0] for line in lines)
        raise UserError(
            f"{config.run_name}: its checkpoint {resume.path} was trained with another configuration:\n  "
            + "\n  ".join(lines)
            + f"\nchange that back, choose another run_name, or let it differ: checkpoint.allow=[{keys}]"
        )


def _saver(config: PretrainConfig, attempt: Attempt, decides: dict[str, Any], schedule: ObjectiveSchedule) -> Saver:
    ours = config.checkpoint
    limit = None if ours.disk_limit is None else bytes_of(ours.disk_limit)
    attempt.here.mkdir(parents=True, exist_ok=True)

    def describe(state: State) -> dict[str, Any]:
        return {
            "name": config.run_name,
            "attempt": attempt.name,
            "decides": decides,
            "phase": schedule.phase_now,
            "tokens": int(state.timestamp.token),
            "rows": int(state.timestamp.sample),
            "ranks": dist.get_world_size(),
        }

    uploads = Uploads(attempt.here, attempt.place, ours.keep, limit)
    return Saver(attempt.here, uploads, saves(config), describe, ours.patience, attempt.stopping, attempt.claim)


def _check_branch(trainer: Trainer, config: PretrainConfig) -> None:
    start = decay_start(config.schedule, config.max_duration)
    at = elapsed(trainer.state.timestamp)
    if at.in_unit(start.unit) != start.value:
        reached = Duration(at.in_unit(start.unit), start.unit)
        length = config.schedule.decay.of(config.max_duration)
        raise UserError(
            f"schedule.decay_from: {config.schedule.decay_from} lies at {reached}, but the decay begins at {start}: set "
            f"max_duration to {Duration(reached.value + length.value, start.unit)}, or name the checkpoint at {start}"
        )


def evaluators(config: PretrainConfig, ranks: int, stopping: Stopping) -> list[Evaluator]:
    """The validation split, once for each objective."""
    if config.data.validation is None:
        return []
    rows = (config.evaluation.batch_size or config.global_batch_size) // ranks
    spec = loader(config.data, {"data.validation": config.data.validation}, rows, config.seed, train=False)

    def interval() -> Callable[[State, Event], bool]:
        every = str(config.evaluation.interval or "1dur")
        return create_interval_scheduler(every, checkpoint_events=False, final_events={Event.FIT_END})

    return [
        Evaluator(
            label=label,
            eval_interval=stopping.unless_stopping(interval()),
            dataloader=spec,
            metric_names=["loss"],
            subset_num_batches=config.evaluation.batches,
            device_eval_microbatch_size=None if config.microbatch_size == "auto" else config.microbatch_size,
        )
        for label in EVALUATIONS
    ]


def callbacks(config: PretrainConfig, model: LanguageModel, data: dict[str, Any]) -> list[Callback]:
    """Meters and the run's record."""
    precision = torch.bfloat16 if config.precision == "amp_bf16" else torch.float32
    meters = Meters(model.architecture(), recomputed(model.backbone), precision)
    return [RunRecord(config, model, data), meters, LRMonitor(), RuntimeEstimator()]


def conversion_record(config: PretrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the conversions recorded of the training rows, for the run's own record; empty where no record can be read.

    Raises:
        UserError: the rows of a stream were made with another tokenizer or sequence length.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, stream in config.data.streams.items():
        one = record_of(stream)
        if one is None:
            continue
        theirs, length = one.record["tokenizer"]["sha256"], one.record["sequence_length"]
        if theirs != tokenizer.sha256:
            raise UserError(
                f"tokenizer: {config.tokenizer} is not the one that {key}, {one.folder}, was converted with "
                f"(sha256 {tokenizer.sha256[:12]} against {theirs[:12]}): use {join(one.folder, 'tokenizer')}"
            )
        if length != config.data.sequence_length:
            raise UserError(
                f"data.sequence_length is {config.data.sequence_length}, but {key}, {one.folder}, was converted with "
                f"sequence_length: {length}"
            )
        counts = {name: one.split[name] for name in ("tokens", "rows", "documents") if name in one.split}
        source, commit = one.record.get("config", {}).get("source"), one.record.get("source", {}).get("commit")
        if isinstance(source, dict) and commit is not None:
            source = {**source, "revision": commit}  # a branch, or the newest, was this then
        found[key] = {"source": source, **counts}
    if not found:
        return {}
    if config.data.mix is None:
        return {"tokenizer_sha256": tokenizer.sha256, **found["data.train"]}
    names = {key: key.rpartition(".")[2] for key in found}
    shares = [f"{names[key]} ({config.data.mix[names[key]].proportion:.4g})" for key in found]
    counted = set.intersection(*(set(counts) for counts in found.values())) - {"source"}
    return {
        "tokenizer_sha256": tokenizer.sha256,
        "source": f"a mix of {', '.join(shares)}",
        **{name: sum(counts[name] for counts in found.values()) for name in sorted(counted)},
        "mix": {names[key]: counts for key, counts in found.items()},
    }
