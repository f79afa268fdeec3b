"""What a sweep will take: trials by task and model, hours of a device, dollars, and from what that is estimated.

A device is a GPU, or a machine without one. A trial's share of it is its seconds over the trials that run there at a time.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepConfig
from biphasic.storage import short, store
from biphasic.sweep.grid import TRIAL, Made, Trials, configurations, content_of, functions_of, make, one_of_each
from biphasic.sweep.records import Cell, Record, read_records
from biphasic.sweep.selection import pruned, wanted


class Seconds:
    """How long trials take, by those that are recorded: of the same model and task, or else of any."""

    def __init__(self, records: Mapping[str, Record]):
        self._of: dict[tuple[str, str], list[float]] = defaultdict(list)
        for record in records.values():
            if record.status == "done" and "total" in record.seconds and "copy_of" not in record.about:
                share = record.about.get("trials_on_device", 1)
                self._of[record.cell.model, record.cell.task].append(record.seconds["total"] / share)
        self._mean = _mean([value for values in self._of.values() for value in values])
        self._shares = _mean([float(r.about.get("trials_on_device", 1)) for r in records.values()]) or 1.0
        self.known = self._mean is not None

    def on_device(self, model: str, task: str) -> float | None:
        """Seconds of a device that a trial takes; None when none like it is recorded."""
        return _mean(self._of.get((model, task), []))

    def of_all(self, cells: Iterable[Cell]) -> float:
        """Seconds of all these, one after another, as they run beside others; 0 when none is recorded."""
        counts = Counter((cell.model, cell.task) for cell in cells)
        each = {pair: self.on_device(*pair) or self._mean or 0.0 for pair in counts}
        return self._shares * sum(count * each[pair] for pair, count in counts.items())


@dataclass(frozen=True)
class Line:
    """A model on a task."""

    task: str
    model: str
    trials: int
    done: int
    failed: int
    left: int
    device_hours: float | None
    """Of those that are left; None: not known."""
    source: str
    """From what: `recorded`, `FLOPs`, or what is missing."""


@dataclass(frozen=True)
class SweepPlan:
    """All of it."""

    output: str
    lines: tuple[Line, ...]
    pruned: int
    device_hours: float
    """Of what is known; halving takes less."""
    dollars: float | None
    unknown: int
    """Trials that are left and of unknown length."""
    now: int
    """Trials that may begin at once."""
    halving: bool
    faults: str | None = None
    """What keeps the sweep from running yet."""


def plan_sweep(config: SweepConfig, module: str = TRIAL) -> SweepPlan:
    """Read tasks, models' and data's files, and the records; train nothing, write nothing.

    Raises:
        ConfigError: everything that is wrong in the tasks' YAMLs.
        UserError: the output can't be read.
    """
    cells, trials = configurations(config), functions_of(module)
    made: Made | None = None
    faults = None
    records: dict[str, Record] = {}
    try:
        made = make(config, cells, trials)
    except UserError as error:
        faults = str(error)
    else:
        try:
            records = read_records(store(config.output), made.grid.trials)
        except OSError as error:
            raise UserError(f"output {config.output}: can't be read ({short(error)})") from None
    seconds = Seconds(records)
    out = set(pruned(made.grid, records)) if made is not None else set()
    names = {cell: name for name, cell in made.grid.trials.items()} if made is not None else {}
    lines = []
    # Trials of the same content are trained once.
    trained: set[str] = {content_of(name) for name, record in records.items() if record.status == "done"}
    for first, one in one_of_each(cells).items():
        mine = [cell for cell in cells if (cell.model, cell.task) == (first.model, first.task)]
        found = [records[names[cell]].status for cell in mine if cell in names and names[cell] in records]
        left = [names.get(cell, str(cell)) for cell in mine if names.get(cell) not in {*records, *out}]
        new = {content_of(name) for name in left} - trained
        trained |= new
        each, source = seconds.on_device(first.model, first.task), "recorded"
        if each is None:
            each, source = _estimated(config, trials, one) if made is not None else (None, "model or data missing")
        hours = None if each is None else len(new) * each / 3600
        counts = (len(mine), found.count("done"), found.count("failed"), len(left))
        lines.append(Line(first.task, first.model, *counts, hours, source))
    known = sum(line.device_hours or 0.0 for line in lines)
    price = config.cost.dollars_per_hour if config.cost is not None else None
    return SweepPlan(
        output=config.output,
        lines=tuple(lines),
        pruned=len(out),
        device_hours=known,
        dollars=None if price is None else price * known,
        unknown=sum(line.left for line in lines if line.device_hours is None),
        now=len(wanted(made.grid, records)) if made is not None else 0,
        halving=config.halving is not None,
        faults=faults,
    )


def describe_plan(plan: SweepPlan) -> str:
    """The plan as a person reads it."""
    widths = [max(len(line.task) for line in plan.lines), max(len(line.model) for line in plan.lines)]
    head = f"  {'task':{widths[0]}}  {'model':{widths[1]}}  trials   done  failed   left  device-hours  from"
    said = [f"sweep into {plan.output}", head]
    for line in plan.lines:
        hours = "?" if line.device_hours is None else f"{line.device_hours:.3g}"
        counts = f"{line.trials:>6} {line.done:>6}  {line.failed:>6} {line.left:>6}  {hours:>12}"
        said.append(f"  {line.task:{widths[0]}}  {line.model:{widths[1]}}  {counts}  {line.source}")
    left, done = sum(line.left for line in plan.lines), sum(line.done for line in plan.lines)
    all_of_it = sum(line.trials for line in plan.lines)
    said.append(f"{all_of_it} trials: {done} done, {left} left, {plan.now} may begin now"
                + (f", {plan.pruned} left out by halving" if plan.pruned else ""))  # fmt: skip
    least = "at least " if plan.unknown else "at most " if plan.halving else "about "
    if plan.unknown < left or not left:
        price = "" if plan.dollars is None else f", {plan.dollars:,.2f} dollars"
        said.append(f"{least}{plan.device_hours:,.3g} hours of a device (a GPU, or a machine without one){price}")
    if plan.unknown:
        said.append(f"{plan.unknown} trials of unknown length: run a few (--limit), or give cost.flops_per_second")
    if plan.faults is not None:
        said += ["it can't run yet:", *(f"  {line}" for line in plan.faults.splitlines())]
    return "\n".join(said)


def as_json(plan: SweepPlan) -> str:
    """The plan for programs."""
    return json.dumps(asdict(plan), indent=2)


def _estimated(config: SweepConfig, trials: Trials, one: FinetuneConfig) -> tuple[float | None, str]:
    speed = config.cost.flops_per_second if config.cost is not None else None
    if speed is None:
        return None, "no trial recorded, and no cost.flops_per_second"
    flops = trials.cost_of(one).flops
    return (None, "the model's size is not known") if flops is None else (flops / speed, "FLOPs")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
