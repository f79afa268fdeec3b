"""Plan a study: what each run trains and keeps, and what all runs cost with and without sharing their beginnings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from biphasic.amounts import format_bytes
from biphasic.config.model import architecture_of
from biphasic.config.plan import remaining_checkpoints, saved_checkpoints, training_flops
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import MergeConfig, StudyConfig, StudyCostConfig
from biphasic.model.architecture import Architecture
from biphasic.study.stages import check_stages
from biphasic.study.state import is_ready, read_states
from biphasic.study.tree import StudyRun, study_runs


@dataclass(frozen=True)
class Totals:
    """What runs train. FLOPs are None if a model's size is unknown; hours are those of a device, None if unknown."""

    batches: int
    tokens: int
    flops: float | None
    hours: float | None
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class RunPlan(StudyRun):
    """The plan of one run."""

    own: Totals
    """What this run trains itself."""
    checkpoints: int
    """Number of checkpoints that remain."""
    bytes: int | None
    """Size of these checkpoints; None if the model's size is unknown."""
    state: str
    """`done`, `at BATCH`, `ready` or `waits`."""


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

    def amount(run: StudyRun, start: int) -> Totals:
        """Return what a run trains from batch `start` of its history on."""
        config, shape = configs[run.name], _architecture(run.name, tree, configs)
        tokens = [config.batch_shapes.progress(batches).tokens for batches in (start, run.length)]
        flops = None if shape is None else training_flops(config, shape, start, run.length)
        return _totals(run.length - start, tokens[1] - tokens[0], flops, study.cost)

    def plan_of(run: StudyRun) -> RunPlan:
        config, shape, state = configs[run.name], _architecture(run.name, tree, configs), states[run.name]
        checkpoints = len(retained_batches(config, run))
        begun = f"at {state.trained:,}" if state.trained else "ready" if is_ready(run, configs, states) else "waits"
        return RunPlan(
            **vars(run),
            own=amount(run, run.start),
            checkpoints=checkpoints,
            bytes=None if shape is None else checkpoints * shape.checkpoint_bytes,
            state="done" if state.is_done(config) else begun,
        )

    runs = tuple(plan_of(run) for run in tree.values())
    return StudyPlan(
        folder=study.folder,
        runs=runs,
        shared=_sum_totals([run.own for run in runs], study.cost),
        alone=_sum_totals([amount(run, 0) for run in tree.values()], study.cost),
        bytes=_sum([run.bytes for run in runs]),
        warnings=tuple(f"{name}: {line}" for name in tree for line in states[name].past_differences(configs[name])),
        merges={name: _describe_merge(merge) for name, merge in study.merges.items()},
    )


def retained_batches(config: PretrainConfig, run: StudyRun) -> list[int]:
    """Return the batches whose checkpoints remain after the end of a run."""
    saved, kept = saved_checkpoints(config, run.start, {*run.kept, *run.scored})
    return remaining_checkpoints(saved, kept, config.checkpoint.keep)


def _architecture(name: str, tree: Mapping[str, StudyRun], configs: Mapping[str, PretrainConfig]) -> Architecture | None:
    """Return a model's architecture, or that of the model it continues; None if it comes from outside the study."""
    continued = tree[name].continues
    return architecture_of(configs[name].model) if continued is None else _architecture(continued, tree, configs)


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum, or None if a value is None."""
    return None if None in values else sum(values)


def _sum_totals(parts: Sequence[Totals], cost: StudyCostConfig | None) -> Totals:
    flops = _sum([part.flops for part in parts])
    return _totals(sum(part.batches for part in parts), sum(part.tokens for part in parts), flops, cost)


def _totals(batches: int, tokens: int, flops: float | None, cost: StudyCostConfig | None) -> Totals:
    if flops is None or cost is None:
        return Totals(batches, tokens, flops, None, None)
    hours, price = flops / (cost.peak_flops * cost.mfu) / 3600, cost.dollars_per_hour
    return Totals(batches, tokens, flops, hours, None if price is None else hours * price)


def _describe_merge(merge: MergeConfig) -> str:
    weights = "weighted " if isinstance(merge.weights, list) else "" if merge.weights == "mean" else f"{merge.weights} "
    parts = (f"{name} at {_batches(batches)}" for name, batches in merge.merge_of.items())
    return f"{weights}mean of {'; '.join(parts)}"


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
        flops, hours = _number(run.own.flops, ".3g"), _number(run.own.hours, ",.0f")
        numbers = f"{run.own.batches:>8,} {run.length:>8,} {_short(run.own.tokens):>8} {flops:>9} {hours:>8}"
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
        if cost.devices is not None and plan.shared.hours is not None:
            lines.append(f"  with {cost.devices:,} devices        {plan.shared.hours / cost.devices / 24:,.1f} days")
    return "\n".join([*lines, *(f"  WARNING {warning}" for warning in plan.warnings)])


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
