"""Show a sweep's progress: a live table on a terminal, otherwise a line per trial and a summary every minute."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from threading import Lock
from typing import TYPE_CHECKING, Any

from biphasic.amounts import format_seconds
from biphasic.sweep.grid import describe
from biphasic.sweep.plan import TrialSeconds
from biphasic.sweep.records import Grid, TrialRecord
from biphasic.sweep.selection import choose_rates, planned_trials, scores_by_seed

if TYPE_CHECKING:
    from rich.console import Group

_SUMMARY_SECONDS = 60.0


@dataclass(frozen=True)
class ProgressRow:
    """A row of the progress table: a model on a task, with scores on the task's first test set."""

    model: str
    task: str
    done: int
    failed: int
    left: int
    lr: float | None
    """The best rate so far."""
    validation: float | None
    test: float | None
    """The mean over seeds at that rate, from 0 to 1, like `validation`."""


def progress_rows(grid: Grid, records: dict[str, TrialRecord]) -> list[ProgressRow]:
    """Return a row for each task and model."""
    chosen, planned = choose_rates(grid, records), planned_trials(grid, records)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for trial, cell in planned.items():
        groups[cell.model, cell.task].append(trial)
    rows = []
    for task in grid.tasks:
        for model in grid.models:
            trials = groups[model.name, task.name]
            statuses = [records[trial].status for trial in trials if trial in records]
            best = chosen[model.name, task.name, task.results[0][1]]
            tests = scores_by_seed(records, best).values()
            counts = (statuses.count("done"), statuses.count("failed"), len(trials) - len(statuses))
            scores = (best.lr, best.validation, fmean(tests) if tests else None)
            rows.append(ProgressRow(model.name, task.name, *counts, *scores))
    return rows


class View:
    """Prints progress as log lines.

    Args:
        grid: the sweep's grid.
        records: the driver's records, which change while the sweep runs.
        at_once: number of trials that run at the same time.
        output: the sweep's output.
    """

    def __init__(self, grid: Grid, records: dict[str, TrialRecord], at_once: int, output: str):
        self.grid, self.records, self.at_once, self.output = grid, records, at_once, output
        self.start = self._last_summary = time.monotonic()
        self.running = 0

    def finished(self, record: TrialRecord) -> None:
        """Show a trial that has just finished."""
        planned = planned_trials(self.grid, self.records)
        prefix = f"{len(planned.keys() & self.records.keys())}/{len(planned)} {describe(record.cell)}"
        if record.status == "failed":
            self.print(f"{prefix}: failed: {record.error}")
            return
        scores = [f"{result.name} {result.metric} {_percent(result.validation)} validation, {_percent(result.test)} test"
                  for result in record.results]  # fmt: skip
        self.print(f"{prefix}: {'; '.join(scores)}; {format_seconds(record.seconds['total'])}")

    def print(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def tick(self, running: int) -> None:
        """Update the number of running trials; called every half second."""
        self.running = running
        if time.monotonic() - self._last_summary >= _SUMMARY_SECONDS:
            self._last_summary = time.monotonic()
            self.print(self.summary())

    def summary(self) -> str:
        """Return counts and times in one line."""
        records = dict(self.records)  # the live table's thread reads while the driver adds records
        planned = planned_trials(self.grid, records)
        recorded = [records[trial] for trial in planned if trial in records]
        failed = sum(record.status == "failed" for record in recorded)
        waiting = [cell for trial, cell in planned.items() if trial not in records]
        ahead = TrialSeconds(records).total(waiting) / self.at_once
        remaining = f", {format_seconds(ahead)} left" if ahead else ""
        counts = f"{len(recorded) - failed} done, {failed} failed, {len(waiting)} left, {self.running} running"
        return f"{counts}; {format_seconds(time.monotonic() - self.start)}{remaining}"


class LiveView(View):
    """Shows progress as a table that is redrawn every second."""

    def __init__(self, grid: Grid, records: dict[str, TrialRecord], at_once: int, output: str, console: Any = None):
        super().__init__(grid, records, at_once, output)
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._lock = Lock()
        self._rows = progress_rows(grid, records)
        self._changed: dict[tuple[str, str], float] = {}
        self.live = Live(
            get_renderable=self.table, refresh_per_second=1, console=self._console, vertical_overflow="crop"
        )

    def finished(self, record: TrialRecord) -> None:
        """See `View`."""
        self._changed[record.cell.model, record.cell.task] = time.monotonic()
        rows = progress_rows(self.grid, self.records)
        with self._lock:
            self._rows = rows
        if record.status == "failed":
            self.print(f"failed: {describe(record.cell)}: {record.error}")

    def print(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def tick(self, running: int) -> None:
        """See `View`."""
        self.running = running

    def table(self) -> Group:
        """Return the table, with the most recently changed rows if not all fit on the terminal."""
        from rich.console import Group
        from rich.table import Table

        with self._lock:
            rows = list(self._rows)
        height = max(self._console.size.height - 8, 3)
        hidden = max(len(rows) - height, 0)
        if hidden:
            newest = sorted(rows, key=lambda row: -self._changed.get((row.model, row.task), 0.0))[:height]
            rows = [row for row in rows if row in newest]
        table = Table(title=f"sweep {self.output}")
        for name in ("task", "model"):
            table.add_column(name, overflow="fold")
        for name in ("done", "failed", "left", "best lr", "validation", "test"):
            table.add_column(name, justify="right")
        for row in rows:
            lr = "" if row.lr is None else f"{row.lr:g}"
            counts = (str(row.done), str(row.failed or ""), str(row.left or ""))
            table.add_row(row.task, row.model, *counts, lr, _percent(row.validation), _percent(row.test))
        more = [f"and {hidden} more pairs of model and task"] if hidden else []
        return Group(table, *more, self.summary())


@contextmanager
def open_view(grid: Grid, records: dict[str, TrialRecord], at_once: int, output: str) -> Iterator[View]:
    """Open a live table if stdout is a terminal, else a log."""
    if not sys.stdout.isatty():
        yield View(grid, records, at_once, output)
        return
    view = LiveView(grid, records, at_once, output)
    with view.live:
        yield view


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
