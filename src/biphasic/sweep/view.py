"""What a person sees of a sweep: a live table on a terminal, else a line for each trial and now and then a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from biphasic.amounts import in_time
from biphasic.sweep.grid import describe
from biphasic.sweep.plan import Seconds
from biphasic.sweep.records import Grid, Record
from biphasic.sweep.selection import choices, pruned, scores_by_seed, trials_by_group

if TYPE_CHECKING:
    from rich.console import Group

_SUMMARY_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """A model on a task, and how it does on the task's first test set."""

    model: str
    task: str
    done: int
    failed: int
    left: int
    lr: float | None
    """The best one by now."""
    validation: float | None
    test: float | None
    """Means over seeds at that rate, shares of 1."""


def rows(grid: Grid, records: dict[str, Record]) -> list[Row]:
    """All models and tasks, task by task."""
    chosen, out = choices(grid, records), set(pruned(grid, records))
    groups = trials_by_group(grid)
    found = []
    for task in grid.tasks:
        for model in grid.models:
            mine = list(groups[model.name, task.name].values())
            status = [records[trial].status for trial in mine if trial in records]
            left = sum(trial not in records and trial not in out for trial in mine)
            counts = (status.count("done"), status.count("failed"), left)
            best = chosen[model.name, task.name, task.results[0][1]] if task.results else None
            tests = list(scores_by_seed(records, best).values()) if best is not None else []
            test = sum(tests) / len(tests) if tests else None
            lr, validation = (best.lr, best.validation) if best is not None else (None, None)
            found.append(Row(model.name, task.name, *counts, lr, validation, test))
    return found


class View:
    """Lines for a log."""

    def __init__(self, grid: Grid, records: dict[str, Record], at_once: int, output: str):
        self.grid, self.records, self.at_once, self.output = grid, records, at_once, output
        self.begin = self._said = time.monotonic()
        self.running = self.elsewhere = 0

    def ended(self, record: Record, trained: bool) -> None:
        """A trial has a record, by this driver's worker or by another's."""
        counted = f"{len(self.records)}/{len(self.grid.trials)} {describe(record.cell)}"
        if record.status == "failed":
            self.say(f"{counted}: failed: {record.error}")
            return
        scores = [f"{one.name} {one.metric} {_percent(one.validation)} validation, {_percent(one.test)} test"
                  for one in record.results]  # fmt: skip
        took = in_time(record.seconds["total"]) if trained and "total" in record.seconds else "by another driver"
        self.say(f"{counted}: {'; '.join(scores)}; {took}")

    def say(self, text: str) -> None:
        """A line of its own."""
        print(text, flush=True)

    def tick(self, running: int, elsewhere: int) -> None:
        """Is called again and again, with the trials that run now, here and at other drivers."""
        self.running, self.elsewhere = running, elsewhere
        if time.monotonic() - self._said >= _SUMMARY_SECONDS:
            self._said = time.monotonic()
            self.say(self.summary())

    def summary(self) -> str:
        """Counts and times, in a line."""
        failed = sum(record.status == "failed" for record in self.records.values())
        out = len(pruned(self.grid, self.records))
        waiting = [cell for trial, cell in self.grid.trials.items() if trial not in self.records]
        seconds = Seconds(self.records)
        # What halving leaves out is as long as the rest, on average.
        ahead = seconds.of_all(waiting) * (1 - out / max(len(waiting), 1)) / self.at_once
        last = f", {in_time(ahead)} left" if seconds.known else ""
        others = f", {self.elsewhere} run by other drivers" if self.elsewhere else ""
        counts = (
            f"{len(self.records) - failed} done, {failed} failed, {len(waiting) - out} left, {self.running} running"
        )
        return f"{counts}{others}; {in_time(time.monotonic() - self.begin)}{last}"


class LiveView(View):
    """A table that is drawn again each second."""

    def __init__(self, grid: Grid, records: dict[str, Record], at_once: int, output: str, console: Any = None):
        super().__init__(grid, records, at_once, output)
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._lock = Lock()
        self._rows = rows(grid, records)
        self._newest: dict[tuple[str, str], float] = {}
        self.live = Live(
            get_renderable=self.table, refresh_per_second=1, console=self._console, vertical_overflow="crop"
        )

    def ended(self, record: Record, trained: bool) -> None:
        """See `View`."""
        self._newest[record.cell.model, record.cell.task] = time.monotonic()
        found = rows(self.grid, self.records)
        with self._lock:
            self._rows = found
        if record.status == "failed":
            self.say(f"failed: {describe(record.cell)}: {record.error}")

    def say(self, text: str) -> None:
        """See `View`. Above the table."""
        self._console.print(text, markup=False, highlight=False)

    def tick(self, running: int, elsewhere: int) -> None:
        """See `View`."""
        self.running, self.elsewhere = running, elsewhere

    def table(self) -> Group:
        """What is drawn: as many rows as fit, those with the newest trials first."""
        from rich.console import Group
        from rich.table import Table

        with self._lock:
            found = list(self._rows)
        height = max(self._console.size.height - 8, 3)
        hidden = max(len(found) - height, 0)
        if hidden:
            newest = sorted(found, key=lambda row: -self._newest.get((row.model, row.task), 0.0))[:height]
            found = [row for row in found if row in newest]
        table = Table(title=f"sweep {self.output}")
        for name in ("task", "model"):
            table.add_column(name, overflow="fold")
        for name in ("done", "failed", "left", "best lr", "validation", "test"):
            table.add_column(name, justify="right")
        for row in found:
            lr = "" if row.lr is None else f"{row.lr:g}"
            counts = (str(row.done), str(row.failed or ""), str(row.left or ""))
            table.add_row(row.task, row.model, *counts, lr, _percent(row.validation), _percent(row.test))
        more = [f"and {hidden} pairs of model and task more"] if hidden else []
        return Group(table, *more, self.summary())


@contextmanager
def open_view(grid: Grid, records: dict[str, Record], at_once: int, output: str) -> Iterator[View]:
    """The view that fits where this process prints; `records` is looked at again and again."""
    if not sys.stdout.isatty():
        yield View(grid, records, at_once, output)
        return
    view = LiveView(grid, records, at_once, output)
    with view.live:
        yield view


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
