"""Plan a sweep: check it, count its trials, and estimate device hours and dollars from the recorded trials.

A device is a GPU, or a node without GPUs. Trials that run on it at the same time share its hours equally.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from biphasic.config.sweep import SweepConfig
from biphasic.errors import Missing, UserError
from biphasic.storage import open_store
from biphasic.sweep.grid import TRIAL_MODULE, build_grid, trial_configs
from biphasic.sweep.records import Cell, TrialRecord, read_records
from biphasic.sweep.selection import planned_trials


@dataclass(frozen=True)
class SweepPlan:
    """The planned trials of a sweep."""

    output: str
    trials: list[dict[str, str | int]]
    """For each `task` and `model` the numbers of trials that are `done`, `failed` and `left`."""
    device_hours: float | None
    """Of the trials that are left; None if no trial is recorded."""
    dollars: float | None
    missing: list[str]
    """What must be made before the sweep can start."""
    problems: list[str]
    """What would stop the sweep; also what is missing, if there is both."""


def plan_sweep(config: SweepConfig, module: str = TRIAL_MODULE) -> SweepPlan:
    """Return the plan, based on the tasks' YAMLs, the model and data files and the records. Trains and writes nothing.

    Raises a ConfigError with all problems of the YAMLs, and a UserError if the output can't be read.
    """
    configs = trial_configs(config)
    missing, problems, records = list[str](), list[str](), dict[str, TrialRecord]()
    try:
        grid = build_grid(config, configs, module)
    except UserError as error:
        (missing if isinstance(error, Missing) else problems).extend(str(error).splitlines())
        choosing = config.seeds[: config.rate_seeds]
        planned = {str(cell): cell for cell in configs if cell.seed in choosing or cell.lr == config.learning_rates[0]}
    else:
        records = read_records(open_store(config.output), grid.trials)
        planned = planned_trials(grid, records)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, cell in planned.items():
        counts[cell.task, cell.model][records[name].status if name in records else "left"] += 1
    seconds = device_seconds(records, (cell for name, cell in planned.items() if name not in records))
    hours = None if seconds is None else seconds / 3600
    price = config.cost.dollars_per_hour if config.cost is not None else None
    return SweepPlan(
        output=config.output,
        trials=[
            {"task": task, "model": model, **{status: of_pair[status] for status in ("done", "failed", "left")}}
            for (task, model), of_pair in counts.items()
        ],
        device_hours=hours,
        dollars=None if price is None or hours is None else price * hours,
        missing=missing,
        problems=problems,
    )


def device_seconds(records: Mapping[str, TrialRecord], cells: Iterable[Cell]) -> float | None:
    """Return the device seconds of trials: the means of recorded ones of their model and task, else of all; None without."""
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records.values():
        if record.status == "done" and "total" in record.seconds:
            share = record.seconds["total"] / float(record.about.get("trials_on_device", 1))
            durations[record.cell.model, record.cell.task].append(share)
    if not durations:
        return None
    mean = fmean(seconds for of_pair in durations.values() for seconds in of_pair)
    return sum(fmean(durations.get((cell.model, cell.task), [mean])) for cell in cells)


def describe_plan(plan: SweepPlan) -> str:
    """Format the plan as text."""
    total = Counter[str]()
    lines = [f"sweep into {plan.output}"]
    for row in plan.trials:
        counts = {name: int(row[name]) for name in ("done", "failed", "left")}
        total.update(counts)
        lines.append(f"  {row['task']} of {row['model']}: {sum(counts.values())} trials, {_describe(counts)}")
    lines.append(f"{total.total()} trials: {_describe(total)}")
    if plan.device_hours is not None:
        price = "" if plan.dollars is None else f", {plan.dollars:,.2f} dollars"
        lines.append(f"about {plan.device_hours:,.3g} hours of a device (a GPU, or a machine without one){price}")
    elif total["left"]:
        lines.append("hours are not known before some trials have run: --limit 4")
    lines += [f"  MISSING  {text}" for text in plan.missing] + [f"  PROBLEM  {text}" for text in plan.problems]
    return "\n".join(lines)


def _describe(counts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{counts[name]} {name}" for name in ("done", "failed", "left") if name != "failed" or counts[name]
    )
