"""What a configuration will do, computed without doing it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from biphasic.amounts import in_bytes
from biphasic.config.architecture import Architecture, shard_ranks
from biphasic.config.checks import architecture_of, nominal_batches
from biphasic.config.durations import Duration, Elapsed
from biphasic.config.load import Config
from biphasic.config.places import checkpoint_places, folder_of
from biphasic.config.schema import MLMPhase, PretrainConfig, RampConfig
from biphasic.config.sources_plan import SourcePlan, describe_sources, plan_sources
from biphasic.config.timeline import Span, decay_start, learning_rate_factor, spans


@dataclass(frozen=True)
class PhasePlan:
    """A phase: its batches, counted from 0, both ends included, and the tokens they hold. None where only the data tells."""

    objective: str
    first_batch: int | None
    last_batch: int | None
    tokens: int | None
    masking_ratio: str | None


@dataclass(frozen=True)
class Corner:
    """A batch at which the learning rate's course changes."""

    what: str
    batch: int | None
    lr: float


@dataclass(frozen=True)
class Plan:
    """What a pretraining run will do.

    Tokens count every position of a row: with `documents` packing up to 1% of them are padding, so that a run whose
    lengths are given in tokens takes that much longer than its batches here say (`exact` is then false).
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
    learning_rate: list[Corner]
    checkpoints: dict[str, Any]
    flops: float | None
    memory_per_rank: dict[str, int] | None
    sources: list[SourcePlan]
    warnings: list[str]

    def to_json(self) -> str:
        """For programs."""
        return json.dumps(asdict(self), indent=2)


def plan(config: PretrainConfig, ranks: int) -> Plan:
    """Compute the plan of a checked configuration for a run of `ranks` processes. Reads nothing but the records of the
    data's conversions and, with `model.init_from` a local folder, its config.json."""
    laid_out = spans(config.objective.phases, config.max_duration)
    size = _architecture(config)
    per_batch = config.global_batch_size * config.data.sequence_length
    total = _batch(config.max_duration, config)
    phases = [_phase(span, config, per_batch) for span in laid_out]
    units = {config.max_duration.unit, *(span.end.unit for span in laid_out)}
    sources, warnings = plan_sources(config, total)
    return Plan(
        run=str(folder_of(config)),
        ranks=ranks,
        exact=not units & {"tok", "ep"},
        parameters=None if size is None else _parameters(size),
        batches=total,
        tokens=None if total is None else total * per_batch,
        tokens_per_batch=per_batch,
        rows_per_rank=config.global_batch_size // ranks,
        microbatch=config.microbatch_size,
        phases=phases,
        learning_rate=list(_corners(config)),
        checkpoints=_checkpoints(config, size, total),
        flops=None if size is None else _flops(size, laid_out, phases, config),
        memory_per_rank=None if size is None else _memory(size, config, ranks),
        sources=sources,
        warnings=warnings,
    )


def _architecture(config: PretrainConfig) -> Architecture | None:
    size = architecture_of(config.model)
    path = Path(config.model.init_from or "") / "config.json"
    if size is not None or config.model.init_from is None or not path.is_file():
        return size
    found = json.loads(path.read_text(encoding="utf-8"))
    try:
        heads, hidden = found["num_attention_heads"], found["hidden_size"]
        return Architecture(
            vocab_size=found["vocab_size"],
            hidden=hidden,
            ffn=found["intermediate_size"],
            layers=found["num_hidden_layers"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or hidden // heads,
            tied=found.get("tie_word_embeddings", False),
        )
    except KeyError:
        return None


def _parameters(size: Architecture) -> dict[str, int]:
    return {
        "total": size.parameters,
        "without_embeddings": size.body_parameters,
        "embedding": size.embedding_parameters,
        "head": size.head_parameters,
    }


def _batch(when: Duration, config: PretrainConfig) -> int | None:
    """The batch that begins at `when`; None when that depends on the size of an epoch."""
    return None if when.unit == "ep" else math.ceil(round(nominal_batches(when, config), 6))


def _phase(span: Span, config: PretrainConfig, tokens_per_batch: int) -> PhasePlan:
    first, end = (0 if not span.start.value else _batch(span.start, config)), _batch(span.end, config)
    ratio = None
    if isinstance(span.phase, MLMPhase):
        given = span.phase.masking_ratio
        ratio = f"{given.start} to {given.end}" if isinstance(given, RampConfig) else str(given)
    return PhasePlan(
        objective=span.phase.name,
        first_batch=first,
        last_batch=None if end is None else end - 1,
        tokens=None if first is None or end is None else (end - first) * tokens_per_batch,
        masking_ratio=ratio,
    )


def _corners(config: PretrainConfig) -> Iterator[Corner]:
    schedule, whole = config.schedule, config.max_duration
    stops = [("start", Duration(0, whole.unit)), ("warmup ends", schedule.warmup.of(whole))]
    start = decay_start(schedule, whole)
    if start != whole:
        stops.append(("decay begins", start))
    stops.append(("end", whole))
    for what, when in stops:
        batch = _batch(when, config)
        if what == "warmup ends" and not when.value:
            continue
        counts = {unit: 0 for unit in ("ba", "sp", "tok", "ep")}
        if batch is not None:
            rows = config.global_batch_size
            counts |= {"ba": batch, "sp": batch * rows, "tok": batch * rows * config.data.sequence_length}
        counts[when.unit] = int(when.value)
        now = Elapsed(counts["ba"], counts["sp"], counts["tok"], counts["ep"])
        yield Corner(what, batch, config.optimizer.lr * learning_rate_factor(schedule, whole, now))


def _checkpoints(config: PretrainConfig, size: Architecture | None, total: int | None) -> dict[str, Any]:
    every = _batch(config.checkpoint.interval.of(config.max_duration), config)
    count = None if total is None or not every else math.ceil(total / every)
    return {
        "folder": checkpoint_places(config)[0],
        "every_batches": every,
        "count": count,
        "kept": config.checkpoint.keep if config.checkpoint.keep >= 0 else count,
        # Weights and Adam's two moments, fp32.
        "bytes_each": None if size is None else 12 * size.parameters,
    }


def _flops(size: Architecture, laid_out: list[Span], phases: list[PhasePlan], config: PretrainConfig) -> float | None:
    total = 0.0
    for span, phase in zip(laid_out, phases, strict=True):
        if phase.tokens is None:
            return None
        causal, share = not isinstance(span.phase, MLMPhase), 1.0
        if isinstance(span.phase, MLMPhase):
            given = span.phase.masking_ratio
            share = (given.start + given.end) / 2 if isinstance(given, RampConfig) else given
        row = config.data.sequence_length
        total += phase.tokens / row * size.flops([row], causal, share * row)
    return total


def _memory(size: Architecture, config: PretrainConfig, ranks: int) -> dict[str, int]:
    ours, shards = config.parallelism, 1
    if ours.strategy == "fsdp":
        shards = shard_ranks(ours.shard_degree, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    rows = config.global_batch_size // ranks if config.microbatch_size == "auto" else config.microbatch_size
    width = 2 if config.precision == "amp_bf16" else 4
    tokens = rows * config.data.sequence_length
    activations = size.activation_bytes(tokens, width)
    kept = size.layers - len(config.compute.recomputed(size.layers))
    # Of a layer that is computed again its input stays, and while it is computed, all of it.
    inputs = tokens * size.hidden * width * (size.layers - kept)
    activations = activations * max(kept, 1) // max(size.layers, 1) + inputs
    state = size.state_bytes(shards)
    return {"weights_gradients_optimizer": state, "activations": activations, "microbatch_rows": rows}


def describe(found: Plan, config: PretrainConfig) -> str:
    """The plan as a person reads it."""
    about = "" if found.exact else "about "
    lines = [f"{found.run}: {config.job}, {found.ranks} rank{'s' * (found.ranks > 1)}"]
    if found.parameters is None:
        lines.append(f"  model          from {config.model.init_from} (size known when it is loaded)")
    else:
        p = found.parameters
        lines.append(
            f"  parameters     {p['total']:,} ({p['without_embeddings']:,} without embeddings; "
            f"embedding {p['embedding']:,}, head {p['head']:,})"
        )
    lines.append(
        f"  batch          {found.tokens_per_batch:,} tokens: {config.global_batch_size:,} rows of "
        f"{config.data.sequence_length:,}; {found.rows_per_rank:,} rows a rank, microbatch {found.microbatch}"
    )
    length = "open until the data is seen" if found.batches is None else f"{about}{found.batches:,} batches"
    lines.append(f"  length         {config.max_duration}: {length}" + _tokens(found.tokens, ", "))
    lines += describe_sources(found.sources, "about " if config.max_duration.unit == "tok" else "")
    for index, phase in enumerate(found.phases):
        span = f"batch {_number(phase.first_batch)} to {_number(phase.last_batch)}"
        ratio = f", masking ratio {phase.masking_ratio}" if phase.masking_ratio else ""
        lines.append(f"  phase {index}        {phase.objective}: {about}{span}{_tokens(phase.tokens, ', ')}{ratio}")
    for corner in found.learning_rate:
        lines.append(f"  learning rate  {corner.lr:.3g} at batch {_number(corner.batch)} ({corner.what})")
    kept = found.checkpoints
    size = "" if kept["bytes_each"] is None else f", {in_bytes(kept['bytes_each'])} each"
    lines.append(
        f"  checkpoints    {kept['count'] or '?'} in {kept['folder']}, every {config.checkpoint.interval}, "
        f"{'all' if config.checkpoint.keep < 0 else kept['kept']} kept{size}"
    )
    if found.flops is not None:
        lines.append(f"  FLOPs          {found.flops:.3g} (attention counted over whole rows)")
    if found.memory_per_rank is not None:
        m = found.memory_per_rank
        auto = " if the whole rank batch is one microbatch" if found.microbatch == "auto" else ""
        lines.append(
            f"  memory a rank  {in_bytes(m['weights_gradients_optimizer'])} weights, gradients and optimizer; activations "
            f"roughly {in_bytes(m['activations'])} at {m['microbatch_rows']} rows{auto}"
        )
    lines += [f"  WARNING        {warning}" for warning in found.warnings]
    return "\n".join(lines)


def describe_other(config: Config) -> str:
    """The plan of a job that has no phases: its configuration, defaults filled in."""
    from biphasic.config.load import dump

    return dump(config)


def _number(batch: int | None) -> str:
    return "?" if batch is None else f"{batch:,}"


def _tokens(tokens: int | None, before: str) -> str:
    return "" if tokens is None else f"{before}{tokens:,} tokens"
