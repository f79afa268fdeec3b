"""Compute and print the plan of a pretraining run: batches, phases, learning rates, checkpoints, memory and FLOPs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from biphasic.amounts import format_bytes
from biphasic.config.architecture import Architecture, shard_ranks
from biphasic.config.checkpoint_plan import count_checkpoints
from biphasic.config.data_plan import DatasetPlan, describe_datasets, plan_datasets
from biphasic.config.durations import Duration, Elapsed
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import MLMPhase, RampConfig, Span, decay_start, learning_rate_factor, spans


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


def plan(config: PretrainConfig, ranks: int) -> Plan:
    """Compute the plan of a checked configuration for a run of `ranks` processes.

    This reads only the conversion records of the data and, if `model.init_from` is a local folder, its `config.json`.
    """
    laid_out = spans(config.objective.phases, config.max_duration)
    architecture = architecture_of(config.model) or _init_from_architecture(config.model.init_from)
    batches = _batch(config.max_duration, config)
    phases = [_phase(span, config) for span in laid_out]
    units = {config.max_duration.unit, *(span.end.unit for span in laid_out)}
    datasets, warnings = plan_datasets(config, batches)
    return Plan(
        run=str(config.run_folder),
        ranks=ranks,
        exact=not units & {"tok", "ep"},
        parameters=None if architecture is None else _parameters(architecture),
        batches=batches,
        tokens=None if batches is None else batches * _tokens_per_batch(config),
        tokens_per_batch=_tokens_per_batch(config),
        rows_per_rank=config.global_batch_size // ranks,
        microbatch=config.microbatch_size,
        phases=phases,
        learning_rate=list(_rate_points(config)),
        checkpoints=_checkpoints(config, architecture),
        flops=None if architecture is None or "ep" in units else training_flops(config, architecture, 0, batches or 0),
        memory_per_rank=None if architecture is None else _memory(architecture, config, ranks),
        datasets=datasets,
        warnings=warnings,
    )


def describe(plan: Plan, config: PretrainConfig) -> str:
    """Return the plan as text."""
    about = "" if plan.exact else "about "
    lines = [f"{plan.run}: {config.job}, {plan.ranks} rank{'s' * (plan.ranks > 1)}"]
    if plan.parameters is None:
        lines.append(f"  model          from {config.model.init_from} (its size is known once it is loaded)")
    else:
        counts = plan.parameters
        lines.append(
            f"  parameters     {counts['total']:,} ({counts['without_embeddings']:,} without embeddings; "
            f"embedding {counts['embedding']:,}, head {counts['head']:,})"
        )
    lines.append(
        f"  batch          {plan.tokens_per_batch:,} tokens: {config.global_batch_size:,} rows of "
        f"{config.data.sequence_length:,}; {plan.rows_per_rank:,} rows a rank, microbatch {plan.microbatch}"
    )
    length = "open until the data is seen" if plan.batches is None else f"{about}{plan.batches:,} batches"
    lines.append(f"  length         {config.max_duration}: {length}" + _tokens(plan.tokens))
    if first_row := config.data.first_row(config.global_batch_size):
        lines.append(
            f"  data           begins at row {first_row:,} of the order (data.start_at: {config.data.start_at})"
        )
    lines += describe_datasets(plan.datasets, "about " if config.max_duration.unit == "tok" else "")
    for index, phase in enumerate(plan.phases):
        span = f"batch {_number(phase.first_batch)} to {_number(phase.last_batch)}"
        ratio = f", masking ratio {phase.masking_ratio}" if phase.masking_ratio else ""
        lines.append(f"  phase {index}        {phase.objective}: {about}{span}{_tokens(phase.tokens)}{ratio}")
    for point in plan.learning_rate:
        lines.append(f"  learning rate  {point.lr:.3g} at batch {_number(point.batch)} ({point.event})")
    checkpoints = plan.checkpoints
    size = "" if checkpoints["bytes_each"] is None else f", {format_bytes(checkpoints['bytes_each'])} each"
    kept = "all" if config.checkpoint.keep < 0 else checkpoints["kept"] or "?"
    lines.append(
        f"  checkpoints    {checkpoints['count'] or '?'} in {checkpoints['folder']}, every {config.checkpoint.interval}, "
        f"{kept} kept{size}"
    )
    if plan.flops is not None:
        lines.append(f"  FLOPs          {plan.flops:.3g} (attention counted over complete rows)")
    if plan.memory_per_rank is not None:
        memory = plan.memory_per_rank
        buckets = f"{format_bytes(memory['ddp_buckets'])} DDP's buckets of gradients; " if memory["ddp_buckets"] else ""
        auto = " if a rank's complete batch is one microbatch" if plan.microbatch == "auto" else ""
        lines.append(
            f"  memory a rank  {format_bytes(memory['weights_gradients_optimizer'])} weights, gradients and optimizer; "
            f"{buckets}activations roughly {format_bytes(memory['activations'])} at {memory['microbatch_rows']} rows{auto}; "
            "not counted: logits, workspaces, CUDA's context"
        )
    if plan.start is not None:
        lines.append("  start          " + _start(plan.start, plan.batches, about))
    lines += [f"  WARNING        {warning}" for warning in plan.warnings]
    lines += [f"  MISSING        {missing}" for missing in plan.missing]
    lines += [f"  PROBLEM        {problem}" for problem in plan.problems]
    return "\n".join(lines)


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
    file = Path(path or "") / "config.json"
    if path is None or not file.is_file():
        return None
    try:
        return Architecture.from_hf_config(SimpleNamespace(**json.loads(file.read_text(encoding="utf-8"))))
    except (AttributeError, ValueError, TypeError, OSError):
        return None


def _parameters(architecture: Architecture) -> dict[str, int]:
    return {
        "total": architecture.parameters,
        "without_embeddings": architecture.body_parameters,
        "embedding": architecture.embedding_parameters,
        "head": architecture.head_parameters,
    }


def _tokens_per_batch(config: PretrainConfig) -> int:
    return config.global_batch_size * config.data.sequence_length


def batches_of(time: Duration, config: PretrainConfig) -> int:
    """Return the batch that begins at `time`, which is not in epochs."""
    return math.ceil(round(config.batch_shape.batches(time), 6))


def _batch(time: Duration, config: PretrainConfig) -> int | None:
    """Return the batch that begins at `time`. Return None if it depends on the size of an epoch."""
    return None if time.unit == "ep" else batches_of(time, config)


def _phase(span: Span, config: PretrainConfig) -> PhasePlan:
    first, end = (0 if not span.start.value else _batch(span.start, config)), _batch(span.end, config)
    text = None
    if isinstance(span.phase, MLMPhase):
        ratio = span.phase.masking_ratio
        text = f"{ratio.start} to {ratio.end}" if isinstance(ratio, RampConfig) else str(ratio)
    return PhasePlan(
        objective=span.phase.name,
        first_batch=first,
        last_batch=None if end is None else end - 1,
        tokens=None if first is None or end is None else (end - first) * _tokens_per_batch(config),
        masking_ratio=text,
    )


def _rate_points(config: PretrainConfig) -> Iterator[RatePoint]:
    schedule, end = config.schedule, config.max_duration
    times = [("start", Duration(0, end.unit))]
    if (warmup := schedule.warmup.resolve(end)).value:
        times.append(("warmup ends", warmup))
    if (decay := decay_start(schedule, end)) != end:
        times.append(("decay begins", decay))
    for event, time in [*times, ("end", end)]:
        batch = _batch(time, config)
        counts = {"ba": batch or 0, "sp": (batch or 0) * config.global_batch_size, "ep": 0}
        counts["tok"] = counts["sp"] * config.data.sequence_length
        counts[time.unit] = int(time.value)
        elapsed = Elapsed(counts["ba"], counts["sp"], counts["tok"], counts["ep"])
        yield RatePoint(event, batch, config.optimizer.lr * learning_rate_factor(schedule, end, elapsed))


def _checkpoints(config: PretrainConfig, architecture: Architecture | None) -> dict[str, Any]:
    counts = count_checkpoints(config)
    return {
        "folder": config.checkpoint_destination,
        "every_batches": _batch(config.checkpoint.interval.resolve(config.max_duration), config),
        "count": None if counts is None else counts.saved,
        "kept": None if counts is None else counts.kept,
        "most": None if counts is None else counts.most,
        "bytes_each": None if architecture is None else architecture.checkpoint_bytes,
    }


def training_flops(config: PretrainConfig, architecture: Architecture, first: int, end: int) -> float:
    """Return the FLOPs of the batches from `first` (inclusive) to `end` (exclusive).

    Attention is counted over complete rows. No duration of the configuration is in epochs.
    """
    total, row = 0.0, config.data.sequence_length
    for span in spans(config.objective.phases, config.max_duration):
        begin, stop = batches_of(span.start, config), batches_of(span.end, config)
        low, high = max(begin, first), min(stop, end)
        if low >= high:
            continue
        causal, share = True, 1.0
        if isinstance(span.phase, MLMPhase):
            causal, ratio = False, span.phase.masking_ratio
            if isinstance(ratio, RampConfig):
                middle = ((low + high) / 2 - begin) / (stop - begin)
                ratio = ratio.start + (ratio.end - ratio.start) * middle
            share = ratio
        total += (high - low) * config.global_batch_size * architecture.flops([row], causal, share * row)
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
