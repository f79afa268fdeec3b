"""Compute the plan of a pretraining run: batches, phases, learning rates, checkpoints, memory and FLOPs."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from biphasic.amounts import format_bytes
from biphasic.config.data_plan import plan_datasets, rows_by_source
from biphasic.config.model import architecture_of
from biphasic.config.phase_inputs import phase_key
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streams import StreamRecord
from biphasic.durations import BatchShape, Duration
from biphasic.model.architecture import RANKS_OF_A_MACHINE, Architecture, rows_problem, scaled_rope, shard_ranks
from biphasic.model.stored_weights import read_json, weights_problem
from biphasic.timeline import decay_start, resolve_phases


@dataclass
class JobPlan:
    """What a job will read, do and write in the folder `run`. `job` is the YAML's, with the number of ranks."""

    run: str
    job: str
    lines: dict[str, str] = field(default_factory=dict)
    """Text by topic; each line of a longer text is printed after its topic."""
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What must be made before the job can start."""
    problems: list[str] = field(default_factory=list)
    """What would stop the job even if nothing were missing."""
    details: dict[str, Any] = field(default_factory=dict)
    """The numbers in the lines, for JSON."""

    def describe(self) -> str:
        lines = [(topic, line) for topic, text in self.lines.items() for line in text.splitlines()]
        for remark, texts in (("WARNING", self.warnings), ("MISSING", self.missing), ("PROBLEM", self.problems)):
            lines += [(remark, text) for text in texts]
        return "\n".join([f"{self.run}: {self.job}", *(f"  {topic:<14} {text}" for topic, text in lines)])

    def to_json(self) -> str:
        return json.dumps({**self.details, **asdict(self)}, indent=2)


@dataclass(frozen=True)
class StartPlan:
    """Where a run will start: its first batch, and the checkpoint or weights that it starts from.

    If it can't start, or this isn't known, `batch` is None and one text says why: `problem` what would stop it, `missing`
    what another command makes first, `unknown` what didn't answer. `is_branch`: the checkpoint is of `start_from`'s run.
    """

    batch: int | None = None
    checkpoint: str | None = None
    source: str = ""
    problem: str | None = None
    missing: str | None = None
    unknown: str | None = None
    is_branch: bool = False


def plan(
    config: PretrainConfig,
    ranks: int,
    records: Mapping[str, StreamRecord] = MappingProxyType({}),
    start: StartPlan | None = None,
) -> JobPlan:
    """Compute the plan of a pretraining run. Of a local `model.init_from`, reads only small files.

    Token counts include padding, up to 1% of the positions with `documents` packing. If durations are in tokens, the
    run therefore takes up to 1% more batches than shown. Values that depend on data are None. `records` are the known
    conversion records of the datasets, by key.
    """
    run_plan = JobPlan(str(config.run_folder), f"{config.job}, {ranks} rank{'s' * (ranks > 1)}")
    source = config.model.init_from
    content = {} if source is None else read_json(Path(source, "config.json"))
    if source is not None and (start is None or start.checkpoint is None):  # else it isn't read
        run_plan.problems += filter(None, [weights_problem(source)])
    rows = config.longest_row, config.model.max_position_embeddings
    if (problem := rows_problem(str(config.model.init_from), content, *rows)) is not None:
        run_plan.problems.append(problem)
    bases = {f"{phase_key(index)}.": phase.model for index, phase in enumerate(config.objective.phases)}
    for above, section in {"": config.model, **bases}.items():
        if section is not None and section.rope_theta is not None and (rope := scaled_rope(content)) is not None:
            problem = f"{config.model.init_from} has no plain rotary positions with one base ({rope}); leave it out"
            run_plan.problems.append(f"{above}model.rope_theta: {problem}")
    if content.get("per_layer_config"):
        problem = "its layers have different sizes (per_layer_config), which isn't supported"
        run_plan.problems.append(f"model.init_from: {config.model.init_from}: {problem}")
    architecture = architecture_of(config.model) or _architecture(content)
    if architecture is not None and config.model.new_vocabulary is not None:
        tokenizers = [stream.record["tokenizer"] for stream in records.values() if "tokenizer" in stream.record]
        architecture = replace(architecture, vocab_size=tokenizers[0]["vocab_size"]) if tokenizers else None
    inputs, end, batches = config.inputs, config.max_duration, _batch(config.max_duration, config)
    phases, rates = list(_phases(config, architecture)), list(_rates(config))
    datasets, data_lines, run_plan.warnings = plan_datasets(config, batches, rows_by_source(phases, inputs), records)
    first = start.batch if start is not None and start.is_branch else None
    checkpoints = _checkpoints(config, architecture, first or 0)
    flops = [phase["flops"] for phase in phases]
    details = run_plan.details = {
        "batches": batches,
        "tokens": None if batches is None else config.batch_shapes.progress(batches).tokens,
        "tokens_per_batch": inputs[0].shape.size,
        "rows_per_rank": config.global_batch_size // ranks,
        "phases": phases,
        "learning_rate": rates,
        "checkpoints": checkpoints,
        "flops": None if None in flops else sum(flops),
        "datasets": datasets,
    }
    units = {end.unit, *(span.end.unit for span in resolve_phases(config.objective.phases, end))}
    about, lines = "about " if units & {"tok", "ep"} else "", run_plan.lines
    if architecture is None:
        lines["model"] = f"from {config.model.init_from} (its size is known once it is loaded)"
    else:
        total, embedding = architecture.parameters, architecture.embedding_parameters
        details["parameters"] = {"total": total, "embedding": embedding, "head": architecture.head_parameters}
        lines["parameters"] = f"{total:,} (embedding {embedding:,}, head {architecture.head_parameters:,})"
    on_rank = f"{details['rows_per_rank']:,} rows a rank, microbatch {config.microbatch_size}"
    lines["batch"] = f"{_shape(inputs[0].shape)}; {on_rank}"
    length = "open until the data is seen" if batches is None else f"{about}{batches:,} batches"
    lines["length"] = f"{end}: {length}{_tokens(details['tokens'])}"
    lines["data"] = "\n".join(data_lines)
    for index, phase in enumerate(phases):
        now, before = inputs[index], inputs[max(index - 1, 0)]
        batch_range = f"{about}batch {_number(phase['first_batch'])} to {_number(phase['last_batch'])}"
        parts = [
            f"{phase['objective']}: {batch_range}{_tokens(phase['tokens'])}",
            f"masking ratio {phase['masking_ratio']}" if phase["masking_ratio"] else "",
            f"in batches of {_shape(now.shape)}" if now.shape != before.shape else "",
            f"RoPE base {now.rope_theta:,.0f}" if now.rope_theta != before.rope_theta else "",
            f"of {', '.join(phase['data'])}" if now.source != before.source else "",
            f"{phase['flops']:.3g} FLOPs" if phase["flops"] is not None and len(phases) > 1 else "",
        ]
        lines[f"phase {index}"] = ", ".join(filter(None, parts))
    points = (f"{each['lr']:.3g} at batch {_number(each['batch'])} ({each['event']})" for each in rates)
    lines["learning rate"] = "\n".join(points)
    each = "" if architecture is None else f", {format_bytes(architecture.checkpoint_bytes)} each"
    kept = "all" if config.checkpoint.keep < 0 else checkpoints["kept"] or "?"
    places = f"{checkpoints['count'] or '?'} in {config.checkpoint_destination}, every {config.checkpoint.interval}"
    lines["checkpoints"] = f"{places}, {kept} kept{each}"
    if details["flops"] is not None:
        lines["FLOPs"] = f"{details['flops']:.3g} (attention counted over complete rows)"
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, RANKS_OF_A_MACHINE)))
    nodes = max(ranks // on_node, 1)
    remote = [each for each in inputs if any(stream.remote for stream in each.streams.values())]
    for canonical in sorted({each.data.num_canonical_nodes or 1 for each in remote}):
        if canonical % nodes and nodes % canonical:
            message = f"with {canonical}, several of {nodes} machines of {on_node} ranks download the same shards"
            advice = f"a multiple or a divisor of {nodes} avoids it, set before the first batch"
            run_plan.warnings.append(f"data.num_canonical_nodes: {message}: {advice}")
    if architecture is not None:
        degree = config.parallelism.shard_degree
        shards = shard_ranks(degree, ranks, on_node) if config.parallelism.strategy == "fsdp" else 1
        details["memory_per_rank"] = state = architecture.state_bytes(shards)
        text = f"{format_bytes(state)} weights, gradients and optimizer; benchmarks/rehearse.py adds activations"
        lines["memory a rank"] = text
    if start is not None and start.batch is not None:
        left = f": {about}{max(batches - start.batch, 0):,} of {batches:,} batches are trained" if batches else ""
        source = start.source if start.checkpoint is None else f"{start.checkpoint}, {start.source}"
        lines["start"] = f"batch {start.batch:,}, from {source}{left}"
    elif start is not None:
        run_plan.problems += filter(None, [start.problem])
        run_plan.missing += filter(None, [start.missing])
        run_plan.warnings += filter(None, [start.unknown])
    return run_plan


def _architecture(content: dict[str, Any]) -> Architecture | None:
    try:
        return Architecture.from_hf_config(SimpleNamespace(**content))
    except (AttributeError, ValueError, TypeError):
        return None


def _batch(time: Duration, config: PretrainConfig) -> int | None:
    """Return the batch that begins at `time`; None if it depends on the length of an epoch."""
    return None if time.unit == "ep" else config.batch_shapes.batches(time)


def _phases(config: PretrainConfig, architecture: Architecture | None) -> Iterator[dict[str, Any]]:
    inputs, counted = config.inputs, config.batch_shapes.progress
    spans = resolve_phases(config.objective.phases, config.max_duration)
    in_epochs = any(span.end.unit == "ep" for span in spans)
    for span in spans:
        first, end, own = _batch(span.start, config), _batch(span.end, config), inputs[span.index]
        tokens = flops = None
        if first is not None and end is not None:
            tokens = counted(end).tokens - counted(first).tokens
            flops = training_flops(config, architecture, first, end) if architecture and not in_epochs else None
        yield {
            "objective": span.phase.name,
            "first_batch": first,
            "last_batch": None if end is None else end - 1,
            "tokens": tokens,
            "masking_ratio": str(span.phase.masking_ratio) if hasattr(span.phase, "masking_ratio") else None,
            "flops": flops,
            "sequence_length": own.data.sequence_length,
            "data": [stream.remote or stream.local for stream in own.streams.values()],
        }


def _rates(config: PretrainConfig) -> Iterator[dict[str, Any]]:
    """Yield the batches at which the learning rate starts to rise, stay constant or fall."""
    schedule, end, lr = config.schedule, config.max_duration, config.optimizer.lr
    warmup, decay = schedule.warmup.resolve(end), decay_start(schedule, end)
    yield {"event": "start", "batch": 0, "lr": 0.0 if warmup.value else lr}
    if warmup.value:
        yield {"event": "warmup ends", "batch": _batch(warmup, config), "lr": lr}
    if decay != end:
        yield {"event": "decay begins", "batch": _batch(decay, config), "lr": lr}
    yield {"event": "end", "batch": _batch(end, config), "lr": lr if decay == end else lr * schedule.final_lr}


def _checkpoints(config: PretrainConfig, architecture: Architecture | None, first: int) -> dict[str, int | None]:
    """Return how many checkpoints a run saves and keeps of which another run has trained the first `first` batches."""
    keep, times = config.checkpoint.keep, [config.checkpoint.interval.resolve(config.max_duration)]
    numbers: dict[str, int | None] = {"count": None, "kept": None, "most": None}
    if "ep" not in {time.unit for time in (*times, config.max_duration, *branch_points(config))}:
        saved, kept = saved_checkpoints(config, first)
        # While a checkpoint is written, the older ones are still stored.
        most = len(remaining_checkpoints(saved[:-1], kept, keep)) + 1
        numbers = {"count": len(saved), "kept": len(remaining_checkpoints(saved, kept, keep)), "most": most}
    return {**numbers, "bytes_each": None if architecture is None else architecture.checkpoint_bytes}


def branch_points(config: PretrainConfig) -> list[Duration]:
    """Return the times at which other runs may branch off: phase switches, the decay's start, and `checkpoint.keep_at`.

    A run always saves and keeps these checkpoints, regardless of `checkpoint.interval` and `checkpoint.keep`.
    """
    total = config.max_duration
    switches = [span.start for span in resolve_phases(config.objective.phases, total)[1:]]
    decay = decay_start(config.schedule, total)
    decays = [decay] if decay != total and decay.value else []
    return list(dict.fromkeys([*switches, *decays, *(point.resolve(total) for point in config.checkpoint.keep_at)]))


def saved_checkpoints(config: PretrainConfig, start: int = 0, marked: Iterable[int] = ()) -> tuple[list[int], set[int]]:
    """Return the batches at which an uninterrupted run saves, and those whose checkpoints it never deletes.

    `config` has no times in epochs; with times in tokens, padding makes the run slightly longer. `start` is the number
    of batches that another run has trained. Besides the branch points, checkpoints at `marked` are never deleted.
    """
    shape, total = config.batch_shapes, config.max_duration
    end, every = shape.batches(total), config.checkpoint.interval.resolve(total)
    kept = {batch for batch in (*map(shape.batches, branch_points(config)), *marked) if start < batch < end}
    return sorted({*shape.batches_at(every, start, end), *kept, end}), kept


def remaining_checkpoints(saved: list[int], kept: set[int], keep: int) -> list[int]:
    """Return the checkpoints of `saved` that remain: those in `kept`, and the newest `keep` (-1: all)."""
    return saved if keep < 0 else sorted(kept.intersection(saved).union(saved[-keep:]))


def training_flops(config: PretrainConfig, architecture: Architecture, first: int, end: int) -> float:
    """Return the FLOPs of the batches from `first` (inclusive) to `end` (exclusive), with attention over complete rows.

    No duration of the configuration may be in epochs.
    """
    total, shape, inputs = 0.0, config.batch_shapes, config.inputs
    for span in resolve_phases(config.objective.phases, config.max_duration):
        low, high = max(shape.batches(span.start), first), min(shape.batches(span.end), end)
        if low < high:
            objective = span.phase.objective
            # A ramp is linear, so its mean is the share in the middle.
            middle = shape.progress((low + high) // 2)
            changes = objective.predicted_share(0.0) != objective.predicted_share(1.0)
            predicted = objective.predicted_share(span.share(middle) if changes else 0.0)
            rows, row = inputs[span.index].rows, inputs[span.index].data.sequence_length
            total += (high - low) * rows * architecture.flops([row], objective.causal, predicted * row)
    return total


def _shape(shape: BatchShape) -> str:
    return f"{shape.size:,} tokens: {shape.rows:,} rows of {shape.row_length:,}"


def _number(batch: int | None) -> str:
    return "?" if batch is None else f"{batch:,}"


def _tokens(tokens: int | None) -> str:
    return "" if tokens is None else f", {tokens:,} tokens"
