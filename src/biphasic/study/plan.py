"""Plan a study: what each run trains and keeps, and what all runs cost with and without sharing their beginnings.

Once the runs are trained, their metrics tell what they have trained, to compare it with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphasic.amounts import format_bytes
from biphasic.config.model import architecture_of
from biphasic.config.plan import remaining_checkpoints, saved_checkpoints, training_flops
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import MergeConfig, StudyConfig, StudyCostConfig
from biphasic.model.architecture import Architecture
from biphasic.objectives.objective import CLM, MLM
from biphasic.study.stages import check_stages
from biphasic.study.state import RunState, is_ready, read_states
from biphasic.study.tree import StudyRun, study_runs
from biphasic.timeline import resolve_phases
from biphasic.training.metrics_file import trained_batches

"""Color of a run by the objective of its last phase."""


@dataclass(frozen=True, kw_only=True)
class RunPlan(StudyRun):
    """The plan of one run. Values that depend on an unknown model size are None."""

    own_tokens: int
    """Number of tokens in the batches that this run trains itself."""
    own_flops: float | None
    flops: float | None
    """FLOPs of the complete history, as if nothing were shared."""
    checkpoints: int
    """Number of checkpoints that remain."""
    bytes: int | None
    state: str
    """`done`, `at BATCH`, `ready` or `waits`."""
    drift: tuple[str, ...]
    """Keys whose values differ from those of the newest checkpoint."""


@dataclass(frozen=True)
class Totals:
    """Totals over all runs. Hours are those of a device; None if unknown."""

    batches: int
    tokens: int
    flops: float | None
    hours: float | None
    dollars: float | None


@dataclass(frozen=True)
class StudyPlan:
    """The plan of a study."""

    folder: str
    runs: tuple[RunPlan, ...]
    """In the order of training."""
    shared: Totals
    """What the study trains, with each shared beginning trained once."""
    alone: Totals
    """What the study would train if nothing were shared."""
    bytes: int | None
    """Size of the checkpoints that remain."""
    devices: int | None
    warnings: tuple[str, ...]
    merges: dict[str, str]
    """Of which checkpoints each merged model is the mean."""


def plan_study(study: StudyConfig) -> StudyPlan:
    """Return the plan of a checked study. Reads only the checkpoints' manifests in the study's folder.

    Raises a UserError if two models have the same history or the folder can't be read, and a ConfigError if a YAML of a
    stage is invalid.
    """
    check_stages(study)
    configs, tree = study_runs(study)
    states = read_states(study)
    runs = tuple(_plan_run(run, tree, configs, states) for run in tree.values())
    return StudyPlan(
        folder=study.folder,
        runs=runs,
        shared=_totals([(run.own_batches, run.own_tokens, run.own_flops) for run in runs], study.cost),
        alone=_totals([(run.length, _tokens(configs[run.name], run.length), run.flops) for run in runs], study.cost),
        bytes=_sum([run.bytes for run in runs]),
        devices=study.cost.devices if study.cost is not None else None,
        warnings=tuple(f"{run.name}: {line}" for run in runs for line in run.drift),
        merges={name: _describe_merge(merge) for name, merge in study.merges.items()},
    )


def architecture_in(
    name: str, tree: Mapping[str, StudyRun], configs: Mapping[str, PretrainConfig]
) -> Architecture | None:
    """Return a model's architecture, or that of the model it continues; None if it comes from outside the study."""
    continued = tree[name].continues
    return architecture_of(configs[name].model) if continued is None else architecture_in(continued, tree, configs)


def retained_batches(config: PretrainConfig, run: StudyRun) -> list[int]:
    """Return the batches whose checkpoints remain after the end of a run."""
    saved, kept = saved_checkpoints(config, run.start, {*run.kept, *run.scored})
    return remaining_checkpoints(saved, kept, config.checkpoint.keep)


def _plan_run(
    run: StudyRun,
    tree: Mapping[str, StudyRun],
    configs: Mapping[str, PretrainConfig],
    states: Mapping[str, RunState],
) -> RunPlan:
    config, architecture, trained = configs[run.name], architecture_in(run.name, tree, configs), states[run.name]
    checkpoints = len(retained_batches(config, run))
    state = f"at {trained.trained:,}" if trained.trained else "ready" if is_ready(run, configs, states) else "waits"
    return RunPlan(
        **vars(run),
        own_tokens=_tokens(config, run.length) - _tokens(config, run.length - run.own_batches),
        own_flops=None if architecture is None else training_flops(config, architecture, run.start, run.length),
        flops=None if architecture is None else training_flops(config, architecture, 0, run.length),
        checkpoints=checkpoints,
        bytes=None if architecture is None else checkpoints * architecture.checkpoint_bytes,
        state="done" if trained.is_done(config) else state,
        drift=tuple(trained.past_differences(config)),
    )


def _tokens(config: PretrainConfig, batches: int) -> int:
    return config.batch_shapes.progress(batches).tokens


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum, or None if a value is None."""
    return None if None in values else sum(values)


def _totals(runs: Sequence[tuple[int, int, float | None]], cost: StudyCostConfig | None) -> Totals:
    """Return the totals of runs, each given by its batches, tokens and FLOPs."""
    batches, tokens, run_flops = zip(*runs, strict=True)
    flops = _sum(run_flops)
    hours = device_hours(flops, cost)
    price = None if cost is None else cost.dollars_per_hour
    return Totals(sum(batches), sum(tokens), flops, hours, None if hours is None or price is None else hours * price)


def device_hours(flops: float | None, cost: StudyCostConfig | None) -> float | None:
    """Return the device hours at the MFU and peak FLOPs of `cost`; None if FLOPs or cost are unknown."""
    return None if flops is None or cost is None else flops / (cost.peak_flops * cost.mfu) / 3600


def _describe_merge(merge: MergeConfig) -> str:
    weights = "weighted " if isinstance(merge.weights, list) else "" if merge.weights == "mean" else f"{merge.weights} "
    return f"{weights}mean of " + "; ".join(
        f"{name} at {_batches(batches)}" for name, batches in merge.merge_of.items()
    )


def _batches(batches: Sequence[int]) -> str:
    return ", ".join(f"{batch:,}" for batch in batches)


def describe_plan(plan: StudyPlan, cost: StudyCostConfig | None) -> str:
    """Format the plan as text."""
    width = max(len("model"), *(len(run.name) for run in plan.runs), *map(len, plan.merges))
    starts = [_start(run) for run in plan.runs]
    start_width = max(len("starts from"), *map(len, starts))
    head = f"{'batches':>8} {'of':>8} {'tokens':>8} {'FLOPs':>9} {'hours':>8}  {'kept':>9}  {'state':9}"
    lines = [f"study in {plan.folder}: {len(plan.runs) + len(plan.merges)} models"]
    lines.append(f"  {'model':{width}}  {'starts from':{start_width}}  {head} other runs start at")
    for run, start in zip(plan.runs, starts, strict=True):
        flops, hours = _number(run.own_flops, ".3g"), _number(device_hours(run.own_flops, cost), ",.0f")
        numbers = f"{run.own_batches:>8,} {run.length:>8,} {_short(run.own_tokens):>8} {flops:>9} {hours:>8}"
        end = f"{_bytes(run.bytes):>9}  {run.state:9} {_batches(run.kept)}"
        lines.append(f"  {run.name:{width}}  {start:{start_width}}  {numbers}  {end}".rstrip())
    lines += [f"  {name:{width}}  {text}" for name, text in plan.merges.items()]
    for label, totals in (("with shared beginnings", plan.shared), ("each model alone", plan.alone)):
        amounts = (("{:.3g} FLOPs", totals.flops), ("{:,.0f} hours", totals.hours), ("{:,.0f} dollars", totals.dollars))
        known = [form.format(amount) for form, amount in amounts if amount is not None]
        counts = [f"{totals.batches:,} batches", f"{_short(totals.tokens)} tokens"]
        lines.append(f"  {label:22}  {', '.join([*counts, *known])}")
    if plan.alone.flops and plan.shared.flops is not None:
        lines.append(f"  saved                   {1 - plan.shared.flops / plan.alone.flops:.1%} of the FLOPs")
    lines.append(f"  checkpoints             {_bytes(plan.bytes)} in {plan.folder}, with what other runs start from")
    if cost is None:
        lines.append("  hours and dollars are unknown: set cost.peak_flops and cost.mfu")
    else:
        peak = f"{cost.peak_flops:.3g} FLOPs a second"
        lines.append(f"  at an MFU of {cost.mfu:g} of {peak}; hours are those of a device")
        if plan.devices is not None and plan.shared.hours is not None:
            lines.append(f"  with {plan.devices:,} devices        {plan.shared.hours / plan.devices / 24:,.1f} days")
    return "\n".join([*lines, *(f"  WARNING {warning}" for warning in plan.warnings)])


def draw_study(study: StudyConfig) -> str:
    """Return the tree of a checked study as a Mermaid flowchart.

    A node is a run with its phases. A solid arrow comes from the run whose checkpoint a run starts from, and names the
    batch. A dotted arrow comes from the run that a run continues, a thick one from a model whose checkpoints are merged.
    Raises a UserError if two histories are equal.
    """
    configs, tree = study_runs(study)
    ids = {name: f"run{number}" for number, name in enumerate(tree)}
    # The text is dark in a dark theme too, because the fill is light there.
    kinds = {kind.name: kind.color for kind in (CLM, MLM)}
    kinds |= {
        phase.objective.name: phase.objective.color for each in configs.values() for phase in each.objective.phases
    }
    classes = (f"  classDef {name} fill:{color},stroke:#666,color:#222" for name, color in kinds.items())
    lines = ["flowchart LR", *classes]
    for name, run in tree.items():
        spans = resolve_phases(configs[name].objective.phases, configs[name].max_duration)
        phases = ", ".join(str(span.phase.objective) for span in spans)
        lines.append(f'  {ids[name]}["{name}<br>{phases}; {run.length:,} batches"]:::{spans[-1].phase.objective.name}')
        if run.parent is not None:
            lines.append(f'  {ids[run.parent]} -- "{run.start:,}" --> {ids[name]}')
        elif run.continues is not None:
            lines.append(f"  {ids[run.continues]} -.-> {ids[name]}")
    for number, (name, merge) in enumerate(study.merges.items()):
        lines.append(f'  merge{number}["{name}<br>{_describe_merge(merge).partition(" of ")[0]} of checkpoints"]')
        lines += [f'  {ids[s]} == "{_batches(batches)}" ==> merge{number}' for s, batches in merge.merge_of.items()]
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class TrainedTotals:
    """What the runs of a study have trained. A batch that is trained again after an interruption counts twice."""

    batches: int
    flops: float | None
    """None if the size of a model is unknown."""
    without_record: tuple[str, ...]
    """Models whose run has no metrics on this machine."""


def trained_totals(study: StudyConfig) -> TrainedTotals:
    """Read the metrics of all runs in the study's local folder. Raises a UserError if two histories are equal."""
    configs, tree = study_runs(study)
    flops, without_record = list[float | None](), list[str]()
    for name, config in configs.items():
        file = Path(study.local_folder) / name / "metrics.jsonl"
        if not file.is_file():
            without_record.append(name)
            continue
        shape = architecture_in(name, tree, configs)
        for batch in trained_batches(file.read_text(encoding="utf-8")):
            flops.append(None if shape is None else training_flops(config, shape, batch - 1, batch))
    return TrainedTotals(len(flops), _sum(flops), tuple(without_record))


def describe_totals(trained: TrainedTotals, plan: StudyPlan) -> str:
    """Format the totals, compared with the plan's and with those of training each model alone."""
    if trained.without_record:
        return f"the trained totals are unknown: this machine has no metrics of {', '.join(trained.without_record)}"
    lines = [f"trained, by the runs' records: {_amount(trained.batches, trained.flops)}"]
    for label, totals in (("planned", plan.shared), ("each model alone", plan.alone)):
        if trained.flops is not None and totals.flops:
            share, unit = trained.flops / totals.flops, "FLOPs"
        else:
            share, unit = trained.batches / totals.batches, "batches"
        lines.append(f"  {label}: {_amount(totals.batches, totals.flops)}; trained {share:.1%} of these {unit}")
    return "\n".join(lines)


def _amount(batches: int, flops: float | None) -> str:
    return f"{batches:,} batches" + ("" if flops is None else f", {flops:.4g} FLOPs")


def _start(run: RunPlan) -> str:
    if run.parent is not None:
        return f"{run.parent} at {run.start:,}"
    return "the beginning" if run.continues is None else f"the end of {run.continues}"


def _short(count: int) -> str:
    """Format a count with three digits and a unit, such as `99.1 B`."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def _bytes(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)
