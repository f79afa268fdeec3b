"""Plan a sweep: count trials by task and model, and estimate device hours and dollars.

A device is a GPU, or a node without GPUs. Trials that run on it at the same time share its hours equally.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from types import ModuleType

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepConfig
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.sweep.grid import TRIAL_MODULE, build_grid, content_hash, encoder_folder, first_cells, trial_configs
from biphasic.sweep.records import Cell, TrialRecord, read_records
from biphasic.sweep.selection import encoder_trials, planned_trials


class TrialSeconds:
    """Mean durations of recorded trials by model and task."""

    def __init__(self, records: Mapping[str, TrialRecord]):
        durations: dict[tuple[str, str], list[float]] = defaultdict(list)
        done = [record for record in records.values() if record.status == "done" and "total" in record.seconds]
        trained = [record for record in done if "copy_of" not in record.about]
        sharing = [float(record.about.get("trials_on_device", 1)) for record in trained]
        for record, share in zip(trained, sharing, strict=True):
            durations[record.cell.model, record.cell.task].append(record.seconds["total"] / share)
        self.on_device = {pair: fmean(values) for pair, values in durations.items()}
        """Device seconds per trial, by (model, task)."""
        self._mean = fmean(itertools.chain(*durations.values())) if durations else 0.0
        self._sharing = fmean(sharing) if sharing else 1.0

    def total(self, cells: Iterable[Cell]) -> float:
        """Return the total duration of these trials in seconds, on shared devices; 0 if no trial is recorded."""
        counts = Counter((cell.model, cell.task) for cell in cells)
        return self._sharing * sum(count * self.on_device.get(pair, self._mean) for pair, count in counts.items())


@dataclass(frozen=True)
class PlanLine:
    """The planned trials of one model on one task."""

    task: str
    model: str
    trials: int
    done: int
    failed: int
    left: int
    device_hours: float | None
    """Device hours of the remaining trials; None if unknown."""
    source: str
    """The source of the estimate: `recorded`, `FLOPs`, or what is missing for an estimate."""


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep."""

    output: str
    lines: tuple[PlanLine, ...]
    device_hours: float
    """The sum of the known device hours."""
    dollars: float | None
    unknown: int
    """Number of remaining trials whose duration is unknown."""
    faults: str | None = None
    """Missing models and data; None if there are none."""


def plan_sweep(config: SweepConfig, module: str = TRIAL_MODULE) -> SweepPlan:
    """Return the plan, based on the tasks' YAMLs, the model and data files and the records. Trains and writes nothing.

    Raises a ConfigError with all problems of the YAMLs, and a UserError if the output can't be read.
    """
    configs, functions = trial_configs(config), import_module(module)
    choosing = config.seeds[: config.rate_seeds]
    faults, records, sources = None, dict[str, TrialRecord](), dict[tuple[str, str], str | None]()
    try:
        grid = build_grid(config, configs, functions)
    except UserError as error:
        faults = str(error)
        planned = {str(c): c for c in configs if c.seed in choosing or c.lr == config.learning_rates[0]}
    else:
        records = read_records(open_store(config.output), grid.trials)
        planned = planned_trials(grid, records)
        sources = encoder_trials(grid, records)
    seconds = TrialSeconds(records)
    kept = {pair for pair, trial in sources.items() if trial and encoder_folder(config.output, trial).is_dir()}
    left_cells = {(cell.model, cell.task) for name, cell in planned.items() if name not in records} - kept
    # Of these (model, task), a trial is trained again, because trials that are left start from its encoder.
    again = {(model, config.tasks[task].encoder_from) for model, task in left_cells}
    lines = []
    # Trials with the same content hash are trained once.
    trained = {content_hash(name) for name, record in records.items() if record.status == "done"}
    for first, first_config in first_cells(configs).items():
        trials = [name for name, cell in planned.items() if (cell.model, cell.task) == (first.model, first.task)]
        statuses = [records[name].status for name in trials if name in records]
        left = [name for name in trials if name not in records]
        new = {content_hash(name) for name in left} - trained
        trained |= new
        each, source = seconds.on_device.get((first.model, first.task)), "recorded"
        if each is None:
            each, source = (None, "model or data missing") if faults else _estimate(config, functions, first_config)
        keeps = (first.model, first.task) in again
        hours = None if each is None else (len(new) + keeps) * each / 3600
        source += ", with 1 trial again for its encoder" * keeps
        counts = (len(trials), statuses.count("done"), statuses.count("failed"), len(left))
        lines.append(PlanLine(first.task, first.model, *counts, hours, source))
    device_hours = sum(line.device_hours or 0.0 for line in lines)
    price = config.cost.dollars_per_hour if config.cost is not None else None
    return SweepPlan(
        output=config.output,
        lines=tuple(lines),
        device_hours=device_hours,
        dollars=None if price is None else price * device_hours,
        unknown=sum(line.left for line in lines if line.device_hours is None),
        faults=faults,
    )


def describe_plan(plan: SweepPlan) -> str:
    """Format the plan as text."""
    widths = [max(len(line.task) for line in plan.lines), max(len(line.model) for line in plan.lines)]
    head = f"  {'task':{widths[0]}}  {'model':{widths[1]}}  trials   done  failed   left  device-hours  from"
    text = [f"sweep into {plan.output}", head]
    for line in plan.lines:
        hours = "?" if line.device_hours is None else f"{line.device_hours:.3g}"
        counts = f"{line.trials:>6} {line.done:>6}  {line.failed:>6} {line.left:>6}  {hours:>12}"
        text.append(f"  {line.task:{widths[0]}}  {line.model:{widths[1]}}  {counts}  {line.source}")
    total, done, left = (sum(getattr(line, name) for line in plan.lines) for name in ("trials", "done", "left"))
    text.append(f"{total} trials: {done} done, {left} left")
    bound = "at least " if plan.unknown else "about "
    if plan.unknown < left or not left:
        price = "" if plan.dollars is None else f", {plan.dollars:,.2f} dollars"
        text.append(f"{bound}{plan.device_hours:,.3g} hours of a device (a GPU, or a machine without one){price}")
    if plan.unknown:
        text.append(f"trials of unknown duration: {plan.unknown}; run a few (--limit), or set cost.flops_per_second")
    if plan.faults is not None:
        text += ["the sweep can't start yet:", *(f"  {line}" for line in plan.faults.splitlines())]
    return "\n".join(text)


def _estimate(config: SweepConfig, functions: ModuleType, trial: FinetuneConfig) -> tuple[float | None, str]:
    """Return a trial's device seconds, estimated from its FLOPs, and the source of the estimate."""
    speed = config.cost.flops_per_second if config.cost is not None else None
    if speed is None:
        return None, "no trial recorded, and no cost.flops_per_second"
    flops = functions.estimate_cost(trial).flops
    return (None, "the model's size is not known") if flops is None else (flops / speed, "FLOPs")
