"""Compute and print plans: of a pretraining run its batches, phases, learning rates, checkpoints, memory and FLOPs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from biphasic.amounts import format_bytes
from biphasic.config.architecture import Architecture, shard_ranks
from biphasic.config.checkpoint_plan import branch_points, remaining_checkpoints, saved_checkpoints
from biphasic.config.conversion_record import StreamRecord
from biphasic.config.data_plan import DatasetPlan, describe_datasets, plan_datasets
from biphasic.config.durations import Duration
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import MLMPhase, RampConfig, decay_start, resolve_phases


@dataclass
class JobPlan:
    """What a job other than pretraining will read, do and write.

    Attributes:
        run: the run's folder.
        job: value of the YAML's `job`.
        lines: one line for each topic.
        missing: what has to be made before the job can start.
        problems: what would stop the job although everything is there.
    """

    run: str
    job: str
    lines: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the plan as text."""
        return _as_text(f"{self.run}: {self.job}", self.lines.items(), MISSING=self.missing, PROBLEM=self.problems)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), indent=2)


def _as_text(title: str, lines: Iterable[tuple[str, str]], **remarks: Iterable[str]) -> str:
    remarked = [(topic, text) for topic, texts in remarks.items() for text in texts]
    return "\n".join([title, *(f"  {topic:<14} {text}" for topic, text in [*lines, *remarked])])


@dataclass(frozen=True)
class PhasePlan:
    """A phase: its first and last batch, counted from 0, and its tokens. Values that depend on the data are None."""

    objective: str
    first_batch: int | None
    last_batch: int | None
    tokens: int | None
    masking_ratio: str | None


@dataclass(frozen=True)
class RatePoint:
    """A batch at which the learning rate starts to rise, stay constant or fall."""

    event: str
    batch: int | None
    lr: float


@dataclass(frozen=True)
class StartPlan:
    """Where a run will start: the first batch that it trains, and the checkpoint or the weights that it starts from.

    `problem` says why it can't start, or why that isn't known; `batch` is None then. `refused` says that its own checkpoint
    was trained with another configuration, so that the run would stop.
    """

    batch: int | None = None
    checkpoint: str | None = None
    source: str = ""
    problem: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class Plan:
    """What a pretraining run will do.

    Token counts include padding, which is up to 1% of the positions with `documents` packing. If durations are given in
    tokens, the run therefore takes up to 1% more batches than the plan shows, and `exact` is false.
    """

    run: str
    ranks: int
    exact: bool
    parameters: dict[str, int] | None
    batches: int | None
    tokens: int | None
    tokens_per_batch: int
    rows_per_rank: int
    microbatch: int | str
    phases: list[PhasePlan]
    learning_rate: list[RatePoint]
    checkpoints: dict[str, Any]
    flops: float | None
    memory_per_rank: dict[str, int] | None
    datasets: list[DatasetPlan]
    warnings: list[str]
    start: StartPlan | None = None
    """None if nothing was looked up."""
    missing: tuple[str, ...] = ()
    """What has to be made before the run can start."""
    problems: tuple[str, ...] = ()
    """What would stop the run: rows, tokenizer or a checkpoint that don't fit the YAML."""

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), indent=2)


def plan(config: PretrainConfig, ranks: int, records: Mapping[str, StreamRecord] = MappingProxyType({})) -> Plan:
    """Compute the plan of a run. This reads nothing but `config.json`, if `model.init_from` is a local folder.

    Args:
        config: a checked configuration.
        ranks: number of processes.
        records: the datasets' conversion records, as far as they are known, by key.
    """
    laid_out, size = resolve_phases(config.objective.phases, config.max_duration), config.batch_shape.size
    architecture = architecture_of(config.model) or _init_from_architecture(config.model.init_from)
    batches = _batch(config.max_duration, config)
    units = {config.max_duration.unit, *(span.end.unit for span in laid_out)}
    datasets, warnings = plan_datasets(config, batches, records)
    return Plan(
        run=str(config.run_folder),
        ranks=ranks,
        exact=not units & {"tok", "ep"},
        parameters=None if architecture is None else _parameters(architecture),
        batches=batches,
        tokens=None if batches is None else batches * size,
        tokens_per_batch=size,
        rows_per_rank=config.global_batch_size // ranks,
        microbatch=config.microbatch_size,
        phases=list(_phases(config)),
        learning_rate=list(_rate_points(config)),
        checkpoints=_checkpoints(config, architecture),
        flops=None if architecture is None or "ep" in units else training_flops(config, architecture, 0, batches or 0),
        memory_per_rank=None if architecture is None else _memory(architecture, config, ranks),
        datasets=datasets,
        warnings=warnings,
    )


def describe(plan: Plan, config: PretrainConfig) -> str:
    """Return the plan as text."""
    return _as_text(
        f"{plan.run}: {config.job}, {plan.ranks} rank{'s' * (plan.ranks > 1)}",
        _lines(plan, config),
        WARNING=plan.warnings,
        MISSING=plan.missing,
        PROBLEM=plan.problems,
    )


def _lines(plan: Plan, config: PretrainConfig) -> Iterator[tuple[str, str]]:
    about, counts = "" if plan.exact else "about ", plan.parameters
    if counts is None:
        yield "model", f"from {config.model.init_from} (its size is known once it is loaded)"
    else:
        parts = f"embedding {counts['embedding']:,}, head {counts['head']:,}"
        without = f"{counts['without_embeddings']:,} without embeddings"
        yield "parameters", f"{counts['total']:,} ({without}; {parts})"
    rows = f"{config.global_batch_size:,} rows of {config.data.sequence_length:,}"
    on_rank = f"{plan.rows_per_rank:,} rows a rank, microbatch {plan.microbatch}"
    yield "batch", f"{plan.tokens_per_batch:,} tokens: {rows}; {on_rank}"
    length = "open until the data is seen" if plan.batches is None else f"{about}{plan.batches:,} batches"
    yield "length", f"{config.max_duration}: {length}{_tokens(plan.tokens)}"
    if first_row := config.data.first_row(config.global_batch_size):
        yield "data", f"begins at row {first_row:,} of the order (data.start_at: {config.data.start_at})"
    for line in describe_datasets(plan.datasets, "about " if config.max_duration.unit == "tok" else ""):
        yield "data", line
    for index, phase in enumerate(plan.phases):
        span = f"batch {_number(phase.first_batch)} to {_number(phase.last_batch)}{_tokens(phase.tokens)}"
        ratio = f", masking ratio {phase.masking_ratio}" if phase.masking_ratio else ""
        yield f"phase {index}", f"{phase.objective}: {about}{span}{ratio}"
    for point in plan.learning_rate:
        yield "learning rate", f"{point.lr:.3g} at batch {_number(point.batch)} ({point.event})"
    stored = plan.checkpoints
    each = "" if stored["bytes_each"] is None else f", {format_bytes(stored['bytes_each'])} each"
    kept = "all" if config.checkpoint.keep < 0 else stored["kept"] or "?"
    places = f"{stored['count'] or '?'} in {stored['folder']}, every {config.checkpoint.interval}"
    yield "checkpoints", f"{places}, {kept} kept{each}"
    if plan.flops is not None:
        yield "FLOPs", f"{plan.flops:.3g} (attention counted over complete rows)"
    if plan.memory_per_rank is not None:
        memory = plan.memory_per_rank
        state = f"{format_bytes(memory['weights_gradients_optimizer'])} weights, gradients and optimizer; "
        if memory["ddp_buckets"]:
            state += f"{format_bytes(memory['ddp_buckets'])} DDP's buckets of gradients; "
        auto = " if a rank's complete batch is one microbatch" if plan.microbatch == "auto" else ""
        activations = f"{format_bytes(memory['activations'])} at {memory['microbatch_rows']} rows{auto}"
        left_out = "not counted: logits, workspaces, CUDA's context"
        yield "memory a rank", f"{state}activations roughly {activations}; {left_out}"
    if plan.start is not None:
        yield "start", _start(plan.start, plan.batches, about)


def _start(start: StartPlan, batches: int | None, about: str) -> str:
    if start.batch is None:
        return f"{'PROBLEM' if start.refused else 'WARNING'}: {start.problem}"
    source = f"{start.checkpoint}, {start.source}" if start.checkpoint is not None else start.source
    if batches is None:
        return f"batch {start.batch:,}, from {source}"
    count = max(batches - start.batch, 0)
    trained = f"{about}{count:,} of {batches:,} batches are trained" if count else "nothing is left to train"
    return f"batch {start.batch:,}, from {source}: {trained}"


def _init_from_architecture(path: str | None) -> Architecture | None:
    """Read the architecture from `config.json` if `path` is a local Hugging Face folder; otherwise return None."""
    try:
        content = json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8"))
        return Architecture.from_hf_config(SimpleNamespace(**content))
    except (AttributeError, ValueError, TypeError, OSError):
        return None


def _parameters(architecture: Architecture) -> dict[str, int]:
    return {
        "total": architecture.parameters,
        "without_embeddings": architecture.body_parameters,
        "embedding": architecture.embedding_parameters,
        "head": architecture.head_parameters,
    }


def _batch(time: Duration, config: PretrainConfig) -> int | None:
    """Return the batch that begins at `time`. Return None if it depends on the size of an epoch."""
    return None if time.unit == "ep" else config.batch_shape.batches(time)


def _phases(config: PretrainConfig) -> Iterator[PhasePlan]:
    for span in resolve_phases(config.objective.phases, config.max_duration):
        first, end, ratio = _batch(span.start, config), _batch(span.end, config), None
        if isinstance(span.phase, MLMPhase):
            ratio = span.phase.masking_ratio
            ratio = f"{ratio.start} to {ratio.end}" if isinstance(ratio, RampConfig) else str(ratio)
        last = None if end is None else end - 1
        tokens = None if first is None or end is None else (end - first) * config.batch_shape.size
        yield PhasePlan(span.phase.name, first, last, tokens, ratio)


def _rate_points(config: PretrainConfig) -> Iterator[RatePoint]:
    schedule, end, lr = config.schedule, config.max_duration, config.optimizer.lr
    warmup, decay = schedule.warmup.resolve(end), decay_start(schedule, end)
    yield RatePoint("start", 0, 0.0 if warmup.value else lr)
    if warmup.value:
        yield RatePoint("warmup ends", _batch(warmup, config), lr)
    if decay != end:
        yield RatePoint("decay begins", _batch(decay, config), lr)
    yield RatePoint("end", _batch(end, config), lr if decay == end else lr * schedule.final_lr)


def _checkpoints(config: PretrainConfig, architecture: Architecture | None) -> dict[str, Any]:
    end, keep = config.max_duration, config.checkpoint.keep
    every = config.checkpoint.interval.resolve(end)
    numbers: dict[str, int | None] = {"count": None, "kept": None, "most": None}
    if "ep" not in {end.unit, every.unit, *(point.unit for point in branch_points(config))}:
        saved, kept = saved_checkpoints(config)
        # The checkpoint that is being written is stored beside the others.
        most = len(remaining_checkpoints(saved[:-1], kept, keep)) + 1
        numbers = {"count": len(saved), "kept": len(remaining_checkpoints(saved, kept, keep)), "most": most}
    return {
        "folder": config.checkpoint_destination,
        "every_batches": _batch(every, config),
        **numbers,
        "bytes_each": None if architecture is None else architecture.checkpoint_bytes,
    }


def training_flops(config: PretrainConfig, architecture: Architecture, first: int, end: int) -> float:
    """Return the FLOPs of the batches from `first` (inclusive) to `end` (exclusive).

    Attention is counted over complete rows. No duration of the configuration is in epochs.
    """
    total, row, shape = 0.0, config.data.sequence_length, config.batch_shape
    for span in resolve_phases(config.objective.phases, config.max_duration):
        low, high = max(shape.batches(span.start), first), min(shape.batches(span.end), end)
        if low < high:
            is_mlm = isinstance(span.phase, MLMPhase)
            # A ramp is linear, so its mean is the ratio in the middle.
            predicted = span.masking_ratio(shape.progress((low + high) // 2)) if is_mlm else 1.0
            total += (high - low) * config.global_batch_size * architecture.flops([row], not is_mlm, predicted * row)
    return total


def _memory(architecture: Architecture, config: PretrainConfig, ranks: int) -> dict[str, int]:
    parallelism, shards, buckets = config.parallelism, 1, architecture.bucket_bytes if ranks > 1 else 0
    if parallelism.strategy == "fsdp":
        buckets = 0
        shards = shard_ranks(parallelism.shard_degree, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    rows = config.global_batch_size // ranks if config.microbatch_size == "auto" else config.microbatch_size
    width = 2 if config.precision == "amp_bf16" else 4
    tokens = rows * config.data.sequence_length
    activations = architecture.activation_bytes(tokens, width)
    stored_layers = architecture.layers - len(config.compute.recomputed(architecture.layers))
    # A recomputed layer stores only its input, except during its own backward pass, when it stores all its activations.
    inputs = tokens * architecture.hidden * width * (architecture.layers - stored_layers)
    activations = activations * max(stored_layers, 1) // max(architecture.layers, 1) + inputs
    state = {"weights_gradients_optimizer": architecture.state_bytes(shards), "ddp_buckets": buckets}
    return {**state, "activations": activations, "microbatch_rows": rows}


def _number(batch: int | None) -> str:
    return "?" if batch is None else f"{batch:,}"


def _tokens(tokens: int | None) -> str:
    return "" if tokens is None else f", {tokens:,} tokens"
