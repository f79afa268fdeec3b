"""Read and write the files of a sweep: its grid, and a record of each trial.

    sweep.json              the latest grid: models, tasks, learning rates, seeds, and each trial's name
    trials/<name>.json      a trial's record, written atomically by the worker that ran it
    predictions/<name>/     its predictions and scores by example, in Parquet files; rankings without scores of documents

Scores are from 0 to 1. A trial has a result for each test set of its task: MNLI has two, and a model trained on MS
MARCO is scored on three retrieval datasets.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from biphasic.errors import UserError, first_line
from biphasic.finetuning.records import DownstreamResult
from biphasic.grouping import mapped_ahead
from biphasic.storage import Store, json_bytes, user_errors

GRID_FILE = "sweep.json"
TRIALS_FOLDER, PREDICTIONS_FOLDER = "trials", "predictions"
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """A cell of the grid: the settings of one trial."""

    model: str
    task: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.model} lr {self.lr:g} seed {self.seed}"


@dataclass(frozen=True)
class TrialRecord:
    """The record of a finished trial."""

    trial: str
    cell: Cell
    status: str
    """`done` or `failed`."""
    results: tuple[DownstreamResult, ...] = ()
    error: str | None = None
    """The error of a failed trial in one line; `about` has the traceback."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations. `train`: the training loop. `total`: the complete trial, including loading and scoring."""
    about: dict[str, Any] = field(default_factory=dict)
    """Steps, tokens, last loss, configuration, host, hardware and versions."""


_RECORDS = TypeAdapter(TrialRecord)


@dataclass(frozen=True)
class GridTask:
    """A task of the grid, with its test sets."""

    name: str
    family: str
    results: tuple[tuple[str, str, str], ...]
    """(task, name, metric) of each test set, as in `DownstreamResult`."""


@dataclass(frozen=True)
class Grid:
    """The grid of a sweep and all its trials."""

    models: tuple[str, ...]
    tasks: tuple[GridTask, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    trials: dict[str, Cell]
    """All combinations by trial name, in starting order. With fewer `rate_seeds` than seeds, only some of them are run
    (`biphasic.sweep.selection.planned_trials`)."""
    rate_seeds: int
    """The first `rate_seeds` seeds choose the learning rates; the others run at the chosen rates only."""
    task_group: str | None = None
    """The one group that all tasks form in the report; None: a group for each family."""

    def other_records(self, folder: Store) -> list[str]:
        """Return a line on records of trials that the grid doesn't have, if there are any. Raises OSError."""
        count = len(set(recorded_trials(folder)) - self.trials.keys())
        reason = "of other settings, another sweep or an earlier version of Biphasic"
        return [f"{count} records in {TRIALS_FOLDER}/ are not of this grid ({reason})"] if count else []


def record_file(trial: str) -> str:
    """Return the path of a trial's record within the output."""
    return f"{TRIALS_FOLDER}/{trial}.json"


def write_record(folder: Store, record: TrialRecord) -> None:
    """Write a trial's record atomically."""
    folder.write(record_file(record.trial), json_bytes({"format": FORMAT, **asdict(record)}))


def write_grid(folder: Store, grid: Grid) -> None:
    """Write the grid atomically."""
    folder.write(GRID_FILE, json_bytes({"format": FORMAT, **asdict(grid)}))


def read_grid(folder: Store) -> Grid:
    """Read the grid of a sweep's output. Raises a UserError if it is missing or can't be read."""
    try:
        return TypeAdapter(Grid).validate_json(folder.read(GRID_FILE))
    except FileNotFoundError:
        raise UserError(f"{folder.root}: has no {GRID_FILE}: it is not a sweep's output") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.root}/{GRID_FILE}: can't be read ({first_line(error)})") from None


def recorded_trials(folder: Store) -> list[str]:
    """Return the names of all trials with a record, including those of earlier grids. Raises OSError."""
    return [name.removeprefix(f"{TRIALS_FOLDER}/").removesuffix(".json") for name in folder.list(TRIALS_FOLDER)]


def read_records(folder: Store, trials: Iterable[str]) -> dict[str, TrialRecord]:
    """Read the records of these trials; trials without a record are left out.

    Raises a UserError if the folder can't be read or a file is not a record.
    """
    with user_errors(f"{folder.root}: can't be read"):
        names = sorted(set(trials) & set(recorded_trials(folder)))
        contents = list(mapped_ahead(folder.read, map(record_file, names), 16))
    records = {}
    for name, content in zip(names, contents, strict=True):
        try:
            records[name] = _RECORDS.validate_json(content)
        except ValueError as error:
            message = f"{folder.root}/{record_file(name)}: is not a trial's record ({first_line(error)})"
            raise UserError(f"{message}; remove it, and the trial runs again") from None
    return records
