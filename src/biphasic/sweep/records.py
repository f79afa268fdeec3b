"""What a sweep leaves behind: the grid, and a record of each trial.

    sweep.json              the grid that was asked for last: models, tasks, learning rates, seeds, and each trial's name
    trials/<name>.json      a trial's record; written whole, by whoever ran it. The name is a hash of everything that
                            determines the result, so that a trial that was changed is another trial

Scores are shares of 1. A trial gives a result for each test set of its task: MNLI has two, and a model that was trained on
MS MARCO is scored on three retrieval sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from biphasic.config.errors import UserError
from biphasic.storage import Store, as_bytes, short

GRID = "sweep.json"
TRIALS = "trials"
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """A place in the grid."""

    model: str
    task: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Result:
    """What a trial reached on one test set."""

    task: str
    """The set, as families count it: MNLI's two tests are both `mnli`."""
    name: str
    """The test set's own name, e.g. `mnli-mm`."""
    family: str
    """`classification`, `tokens`, `question_answering` or `retrieval`."""
    metric: str
    """What rates are chosen by and tables show, e.g. `accuracy`."""
    validation: float | None
    test: float | None
    more: dict[str, dict[str, float]] = field(default_factory=dict)
    """Other metrics, by split (`validation`, `test`)."""


@dataclass(frozen=True)
class Record:
    """A trial that was run."""

    trial: str
    cell: Cell
    status: str
    """`done` or `failed`."""
    results: tuple[Result, ...] = ()
    error: str | None = None
    """Of a failed one: what went wrong, in a line; `about["traceback"]` has more."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`train`: the training loop. `total`: everything, loading and scoring included."""
    about: dict[str, Any] = field(default_factory=dict)
    """Steps, examples, tokens, losses, configuration, machine, versions."""


@dataclass(frozen=True)
class GridModel:
    """A model of the grid, and how long it was pretrained (optimizer steps), if that is known."""

    name: str
    steps: int | None = None


@dataclass(frozen=True)
class GridTask:
    """A task of the grid and the test sets that a trial of it gives results for."""

    name: str
    family: str
    results: tuple[tuple[str, str, str], ...]
    """(task, name, metric) of each, as in `Result`."""


@dataclass(frozen=True)
class Grid:
    """What was asked for."""

    models: tuple[GridModel, ...]
    tasks: tuple[GridTask, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    trials: dict[str, Cell]
    """By name, in the order in which they are begun."""
    halving: dict[str, Any] | None = None
    """The YAML's `halving:` section."""


def record_name(trial: str) -> str:
    """Where a trial's record lies."""
    return f"{TRIALS}/{trial}.json"


def write_record(place: Store, record: Record) -> None:
    """Write it, whole."""
    place.write(record_name(record.trial), as_bytes({"format": FORMAT, **asdict(record)}))


def write_grid(place: Store, grid: Grid) -> None:
    """Write it, whole."""
    place.write(GRID, as_bytes({"format": FORMAT, **asdict(grid)}))


def read_grid(place: Store) -> Grid:
    """The grid of a sweep's folder.

    Raises:
        UserError: there is none, or it can't be read.
    """
    try:
        found = json.loads(place.read(GRID))
        return Grid(
            models=tuple(GridModel(**one) for one in found["models"]),
            tasks=tuple(
                GridTask(one["name"], one["family"], tuple((t, n, m) for t, n, m in one["results"]))
                for one in found["tasks"]
            ),
            learning_rates=tuple(found["learning_rates"]),
            seeds=tuple(found["seeds"]),
            trials={name: Cell(**cell) for name, cell in found["trials"].items()},
            halving=found["halving"],
        )
    except FileNotFoundError:
        raise UserError(f"{place.root}: has no {GRID}: it is no sweep's output") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{place.root}/{GRID}: can't be read ({short(error)})") from None


def read_records(place: Store, trials: Iterable[str]) -> dict[str, Record]:
    """The records of those trials that have one, by name.

    Raises:
        UserError: the place can't be read, or a record is no record.
    """
    wanted = set(trials)
    try:
        there = [name for name in place.list(TRIALS) if name.removeprefix(f"{TRIALS}/")[: -len(".json")] in wanted]
        with ThreadPoolExecutor(16) as pool:
            contents = list(pool.map(place.read, there))
    except OSError as error:
        raise UserError(f"{place.root}: can't be read ({short(error)})") from None
    found = [_record(name, content, place.root) for name, content in zip(there, contents, strict=True)]
    return {record.trial: record for record in found}


def read_record(place: Store, trial: str) -> Record | None:
    """One trial's record; None when there is none.

    Raises:
        OSError: the place can't be read.
        UserError: it is no record.
    """
    name = record_name(trial)
    return None if place.stat(name) is None else _record(name, place.read(name), place.root)


def _record(name: str, content: bytes, root: str) -> Record:
    try:
        found = json.loads(content)
        found.pop("format")
        cell, results = Cell(**found.pop("cell")), tuple(Result(**one) for one in found.pop("results"))
        return Record(cell=cell, results=results, **found)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{root}/{name}: is no trial's record ({short(error)}); remove it, and the trial is run again") \
            from None  # fmt: skip
