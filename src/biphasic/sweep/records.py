"""Read and write the files of a sweep: its grid and a record of each trial.

    sweep.json              the latest grid: models, tasks, learning rates, seeds, and each trial's name
    trials/<name>.json      a trial's record, written atomically by the worker that ran it

A trial's name contains a hash of everything that determines the result, so a changed trial is a new trial.

Scores are from 0 to 1. A trial has a result for each test set of its task: MNLI has two, and a model trained on MS MARCO is
scored on three retrieval datasets.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from biphasic.errors import UserError
from biphasic.finetuning.records import DownstreamResult
from biphasic.storage import Store, first_line, json_bytes

GRID_FILE = "sweep.json"
TRIALS_FOLDER = "trials"
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """A cell of the grid: the settings of one trial."""

    model: str
    task: str
    lr: float
    seed: int


@dataclass(frozen=True)
class TrialRecord:
    """The record of a trial that has run."""

    trial: str
    cell: Cell
    status: str
    """`done` or `failed`."""
    results: tuple[DownstreamResult, ...] = ()
    error: str | None = None
    """A failed trial's error in one line; the traceback is in `about`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations. `train`: the training loop. `total`: everything, including loading and scoring."""
    about: dict[str, Any] = field(default_factory=dict)
    """Steps, tokens, last loss, configuration, host, hardware and versions."""


_RECORDS = TypeAdapter(TrialRecord)


@dataclass(frozen=True)
class GridModel:
    """A model of the grid, with the optimizer steps of its pretraining if known."""

    name: str
    steps: int | None = None


@dataclass(frozen=True)
class GridTask:
    """A task of the grid, with the test sets on which its trials are scored."""

    name: str
    family: str
    results: tuple[tuple[str, str, str], ...]
    """(task, name, metric) of each test set, as in `DownstreamResult`."""


@dataclass(frozen=True)
class Grid:
    """The grid of a sweep, with all trials."""

    models: tuple[GridModel, ...]
    tasks: tuple[GridTask, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    trials: dict[str, Cell]
    """All combinations by the trial's name, in the order in which they start. With fewer `rate_seeds` than seeds, not all of
    them are run (`biphasic.sweep.selection.planned_trials`)."""
    rate_seeds: int
    """Number of seeds by which rates are chosen, the first ones; the others run at the chosen rates only."""


def record_file(trial: str) -> str:
    """Return the name of a trial's record file."""
    return f"{TRIALS_FOLDER}/{trial}.json"


def write_record(folder: Store, record: TrialRecord) -> None:
    """Write a trial's record atomically."""
    folder.write(record_file(record.trial), json_bytes({"format": FORMAT, **asdict(record)}))


def write_grid(folder: Store, grid: Grid) -> None:
    """Write the grid atomically."""
    folder.write(GRID_FILE, json_bytes({"format": FORMAT, **asdict(grid)}))


def read_grid(folder: Store) -> Grid:
    """Read the grid of a sweep's output.

    Raises:
        UserError: the folder has no grid, or the grid can't be read.
    """
    try:
        return TypeAdapter(Grid).validate_json(folder.read(GRID_FILE))
    except FileNotFoundError:
        raise UserError(f"{folder.root}: has no {GRID_FILE}: it is not a sweep's output") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.root}/{GRID_FILE}: can't be read ({first_line(error)})") from None


def recorded_trials(folder: Store) -> list[str]:
    """Return the names of all trials with a record, including those of earlier grids.

    Raises:
        OSError: the folder can't be read.
    """
    return [name.removeprefix(f"{TRIALS_FOLDER}/").removesuffix(".json") for name in folder.list(TRIALS_FOLDER)]


def read_records(folder: Store, trials: Iterable[str]) -> dict[str, TrialRecord]:
    """Read the records of the given trials by name; trials without a record are omitted.

    Raises:
        UserError: the folder can't be read, or a file is not a record.
    """
    try:
        names = sorted(set(trials) & set(recorded_trials(folder)))
        with ThreadPoolExecutor(16) as pool:
            contents = list(pool.map(folder.read, map(record_file, names)))
    except OSError as error:
        raise UserError(f"{folder.root}: can't be read ({first_line(error)})") from None
    return {name: _parse(folder, name, content) for name, content in zip(names, contents, strict=True)}


def read_record(folder: Store, trial: str) -> TrialRecord | None:
    """Read one trial's record; return None if the trial has no record.

    Raises:
        OSError: the folder can't be read.
        UserError: the file is not a record.
    """
    try:
        return _parse(folder, trial, folder.read(record_file(trial)))
    except FileNotFoundError:
        return None


def _parse(folder: Store, trial: str, content: bytes) -> TrialRecord:
    try:
        return _RECORDS.validate_json(content)
    except ValueError as error:
        message = f"{folder.root}/{record_file(trial)}: is not a trial's record ({first_line(error)})"
        raise UserError(f"{message}; remove it, and the trial runs again") from None
