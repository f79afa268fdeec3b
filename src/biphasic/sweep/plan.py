"""Plan a sweep: check it, count its trials, and estimate device hours and dollars from the recorded trials.

A device is a GPU, or a node without GPUs. Trials that run on it at the same time share its hours equally.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from biphasic.config.plan import JobPlan
from biphasic.config.sweep import SweepConfig
from biphasic.errors import Missing, UserError
from biphasic.storage import open_store
from biphasic.sweep.grid import TRIAL_MODULE, build_grid, check_trials, trial_configs
from biphasic.sweep.records import Cell, TrialRecord, read_records
from biphasic.sweep.selection import planned_trials


def plan_sweep(config: SweepConfig, module: str = TRIAL_MODULE) -> JobPlan:
    """Return the plan, based on the tasks' YAMLs, the model and data files and the records. Trains and writes nothing.

    `details` has for all and for each task of a model the numbers of `trials` that are `done`, `failed` and `left`, and the
    `device_hours` and `dollars` of those that are left: None if no trial is recorded. Raises a ConfigError with all problems
    of the YAMLs, and a UserError if the output can't be read.
    """
    plan, configs, records = JobPlan(config.output, config.job), trial_configs(config), dict[str, TrialRecord]()
    try:
        plan.warnings += check_trials(configs, module)
        grid = build_grid(config, configs, module)
    except UserError as error:
        (plan.missing if isinstance(error, Missing) else plan.problems).extend(str(error).splitlines())
        choosing = config.seeds[: config.rate_seeds]
        planned = {str(cell): cell for cell in configs if cell.seed in choosing or cell.lr == config.learning_rates[0]}
    else:
        records = read_records(folder := open_store(config.output), grid.trials)
        planned = planned_trials(grid, records)
        plan.warnings += grid.other_records(folder)
    trials: dict[str, dict[str, int]] = {}
    for name, cell in planned.items():
        for group in ("all", f"{cell.task} of {cell.model}"):
            counts = trials.setdefault(group, {"done": 0, "failed": 0, "left": 0})
            counts[records[name].status if name in records else "left"] += 1
    plan.lines["trials"] = "\n".join(f"{group}, {_describe(counts)}" for group, counts in trials.items())
    seconds = device_seconds(records, (cell for name, cell in planned.items() if name not in records))
    hours = None if seconds is None else seconds / 3600
    price = config.cost.dollars_per_hour if config.cost is not None else None
    dollars = None if price is None or hours is None else price * hours
    if hours is not None:
        cost = "" if dollars is None else f", {dollars:,.2f} dollars"
        plan.lines["time"] = f"about {hours:,.3g} hours of a device (a GPU, or a machine without one){cost}"
    elif trials["all"]["left"]:
        plan.lines["time"] = "hours are not known before some trials have run: --limit 4"
    plan.details = {"trials": trials, "device_hours": hours, "dollars": dollars}
    return plan


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


def _describe(counts: Mapping[str, int]) -> str:
    parts = (f"{counts[name]} {name}" for name in ("done", "failed", "left") if name != "failed" or counts[name])
    return f"{sum(counts.values())} trials: {', '.join(parts)}"
