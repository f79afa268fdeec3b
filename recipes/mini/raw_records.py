"""The raw records of the mini study: every fine-tuning, the validation losses at the end of each run, and the hours.

They are read from a folder of run.sh, and written to and read from trials.csv, losses.csv and hours.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter

from biphasic.errors import UserError
from biphasic.report.formatting import csv_table
from biphasic.report.scores import trial_table
from biphasic.report.study_folder import read_study
from biphasic.storage import open_store
from biphasic.sweep.records import TrialRecord, read_grid, read_records
from biphasic.training.metrics_file import parse_metrics

FIRST_SEED = 42
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Trial:
    """A fine-tuning. Scores are from 0 to 1."""

    pretraining_seed: int
    model: str
    task: str
    lr: float
    finetuning_seed: int
    validation: float | None
    test: float | None
    chosen: bool
    """Whether its rate is the one that validation chose for this model and task."""


@dataclass(frozen=True)
class Loss:
    """The validation loss at the end of a run, in nats."""

    pretraining_seed: int
    model: str
    objective: str
    loss: float


@dataclass(frozen=True)
class Hours:
    """The machine's hours for a study: in pretraining steps, of two ranks each, and in fine-tunings, two at a time."""

    study: str
    pretraining: float
    finetuning: float


@dataclass(frozen=True)
class Records:
    """What the studies of all pretraining seeds measured."""

    trials: Sequence[Trial]
    losses: Sequence[Loss]
    hours: Sequence[Hours]

    @property
    def total_hours(self) -> tuple[float, float]:
        """The hours of pretraining and of fine-tuning of all studies."""
        return sum(row.pretraining for row in self.hours), sum(row.finetuning for row in self.hours)

    def with_seed(self, seed: int) -> Records:
        """Return the trials and losses of one pretraining seed, without hours."""
        trials = [row for row in self.trials if row.pretraining_seed == seed]
        return Records(trials, [row for row in self.losses if row.pretraining_seed == seed], ())


_KINDS: dict[str, type] = {"trials": Trial, "losses": Loss, "hours": Hours}


def read_run(folder: Path) -> Records:
    """Read `study/`, `untrained/`, `seed<N>/` and `long<N>/` in a folder of run.sh, those that are there.

    Raises:
        UserError: there is none, or one is not finished.
    """
    parts = [(FIRST_SEED, folder / "study"), (FIRST_SEED, folder / UNTRAINED)]
    for name in ("seed", "long"):
        parts += [(int(part.name.removeprefix(name)), part) for part in sorted(folder.glob(f"{name}*"))]
    parts = [(seed, part) for seed, part in parts if part.is_dir()]
    if not parts:
        raise UserError(f"{folder}: has no study, expected a folder that recipes/mini/run.sh has finished")
    trials, losses, hours = list[Trial](), list[Loss](), list[Hours]()
    for seed, part in parts:
        store = open_store(str(part / "sweep"))
        grid = read_grid(store)
        records = read_records(store, grid.trials)
        table = trial_table(grid, records)
        if unfinished := sorted(set(table.trial[table.planned & (table.status != "done")])):
            count = f"{len(unfinished)} of its planned trials are missing or failed, e.g. {unfinished[0]}"
            raise UserError(f"{store.root}: {count}: fine-tune again, with --retry-failed")
        trials += _trials(table, seed)
        points = read_study([str(part)]).losses.query("kind == 'validation'").sort_values("step")
        last = {(point.run, point.objective): point.loss for point in points.itertuples()}
        losses += [Loss(seed, *key, loss) for key, loss in last.items()]
        hours.append(_hours(part, records.values()))
    return Records(trials, losses, hours)


def _trials(table: pd.DataFrame, pretraining_seed: int) -> Iterator[Trial]:
    """Yield the finished trials of a sweep whose tasks have one test set each."""
    for row in table[table.planned & (table.status == "done")].itertuples():
        validation, test = (None if pd.isna(score) else score for score in (row.validation, row.test))
        chosen = row.lr == row.chosen_lr
        yield Trial(pretraining_seed, row.model, row.trained_on, row.lr, row.seed, validation, test, chosen)


def _hours(folder: Path, records: Iterable[TrialRecord]) -> Hours:
    steps = 0.0
    for file in folder.glob("*/metrics.jsonl"):
        steps += sum(entry.get("time/step_seconds", 0.0) for entry in parse_metrics(file.read_text()))
    finetunings = sum(record.seconds.get("total", 0.0) for record in records if "copy_of" not in record.about)
    return Hours(folder.name, steps / 3600, finetunings / 3600 / 2)


def write_records(records: Records, folder: Path) -> None:
    """Write the three files."""
    target = open_store(str(folder))
    for part in fields(Records):
        rows = sorted(map(astuple, getattr(records, part.name)))
        columns = [field.name for field in fields(_KINDS[part.name])]
        target.write(f"{part.name}.csv", csv_table(pd.DataFrame(rows, columns=columns)))


def read_written(folder: Path) -> Records:
    """Read the three files."""

    def rows(name: str) -> list[Any]:
        adapter = TypeAdapter[Any](_KINDS[name])
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            cells = [{column: cell or None for column, cell in row.items()} for row in csv.DictReader(file)]
        return list(map(adapter.validate_python, cells))

    return Records(**{part.name: rows(part.name) for part in fields(Records)})
