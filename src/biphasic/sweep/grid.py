"""From a sweep's YAML to its trials: a fine-tuning configuration and a name for each place of the grid.

A trial's name is `<model>.<task>.<content>`; `content` is a hash of everything that determines the result: what is in the
model's and the data's files, and the settings. So one that was changed is another trial. Two names of models whose files
hold the same (or a model that was given another name) make trials of the same content: one is trained, and the record of
the others is a copy that says so (`about["copy_of"]`).

Trials are begun seed by seed, and within a seed task by task, so that every model has a score on every task early.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Protocol, cast

from biphasic.config.errors import ConfigError, Problem, UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.sweep.records import Cell, Grid, GridModel, GridTask

if TYPE_CHECKING:
    from biphasic.finetuning.trial import Cost, Outcome

TRIAL = "biphasic.finetuning.trial"
"""The module whose functions make and run trials; tests have smaller ones."""
_QUIET = ("logging.progress_bar=false", "logging.jsonl=false", "logging.tensorboard=false")
"""What a single run shows of itself; `overrides` may ask for it all the same."""


class Trials(Protocol):
    """What such a module offers; see `biphasic.finetuning.trial`."""

    def trial_name(self, config: FinetuneConfig) -> str:
        """A hash of everything that determines the result; UserError when there is no such model or data."""
        ...

    def results_of(self, config: FinetuneConfig) -> GridTask:
        """The test sets that a trial gives results for."""
        ...

    def run_trial(self, config: FinetuneConfig) -> Outcome:
        """Train and score."""
        ...

    def cost_of(self, config: FinetuneConfig) -> Cost:
        """About what that takes."""
        ...


@dataclass(frozen=True)
class Made:
    """The grid, and each trial's configuration."""

    grid: Grid
    configs: dict[str, FinetuneConfig]
    """By trial."""


def functions_of(module: str) -> Trials:
    """A module that makes and runs trials."""
    return cast(Trials, import_module(module))


def content_of(trial: str) -> str:
    """The part of a trial's name that two have in common whose results are the same."""
    return trial.rpartition(".")[2]


def one_of_each(cells: dict[Cell, FinetuneConfig]) -> dict[Cell, FinetuneConfig]:
    """The first trial of each model and task."""
    found: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        found.setdefault((cell.model, cell.task), cell)
    return {cell: cells[cell] for cell in found.values()}


def configurations(config: SweepConfig) -> dict[Cell, FinetuneConfig]:
    """Each place of the grid, in the order in which they are begun, and what is run there.

    Raises:
        ConfigError: everything that is wrong in the tasks' YAMLs and in `overrides`.
    """
    made: dict[tuple[str, str], FinetuneConfig] = {}
    # A key that is wrong is wrong for every model.
    problems: dict[Problem, None] = {}
    for task, model in product(config.tasks, config.models):
        try:
            made[model, task] = _load(config, model, task)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))
    return {cell: _at(made[cell.model, cell.task], cell) for cell in _cells(config)}


def make(config: SweepConfig, cells: dict[Cell, FinetuneConfig], trials: Trials) -> Made:
    """Names and grid; reads the models' and the data's files.

    Args:
        config: the sweep.
        cells: what `configurations` gave.
        trials: the functions that make and run them.

    Raises:
        UserError: every model and set that isn't there.
    """
    names: dict[str, Cell] = {}
    faults: dict[tuple[str, str], str] = {}
    """By model and task."""
    for cell, one in cells.items():
        if (cell.model, cell.task) in faults:
            continue
        try:
            names[f"{cell.model}.{cell.task}.{trials.trial_name(one)}"] = cell
        except UserError as error:
            faults[cell.model, cell.task] = str(error)
    if faults:
        # A model that isn't there is missing for every task, and a set for every model: each is said once.
        said: dict[str, list[str]] = {}
        for (model, task), fault in faults.items():
            said.setdefault(fault, []).append(f"{task} of {model}")
        more = {fault: f" and {len(pairs) - 1} more" if len(pairs) > 1 else "" for fault, pairs in said.items()}
        raise UserError("\n".join(f"{pairs[0]}{more[fault]}: {fault}" for fault, pairs in said.items()))
    if len(names) < len(cells):
        # The rate and the seed are part of each: a bug, and half of the grid would be missing without a word.
        raise RuntimeError(f"{len(cells)} trials have only {len(names)} names")
    return Made(_grid(config, cells, names, trials), {name: cells[cell] for name, cell in names.items()})


def _grid(config: SweepConfig, cells: dict[Cell, FinetuneConfig], names: dict[str, Cell], trials: Trials) -> Grid:
    tasks: dict[str, GridTask] = {}
    for cell, one in cells.items():
        if cell.task not in tasks:
            tasks[cell.task] = replace(trials.results_of(one), name=cell.task)
    return Grid(
        models=tuple(GridModel(name, model.steps) for name, model in config.models.items()),
        tasks=tuple(tasks[name] for name in config.tasks),
        learning_rates=tuple(config.learning_rates),
        seeds=tuple(config.seeds),
        trials=names,
        halving=None if config.halving is None else config.halving.model_dump(mode="json"),
    )


def _cells(config: SweepConfig) -> Iterator[Cell]:
    for seed, task, model, lr in product(config.seeds, config.tasks, config.models, config.learning_rates):
        yield Cell(model, task, lr, seed)


def _load(config: SweepConfig, model: str, task: str) -> FinetuneConfig:
    asked, file = config.models[model], config.tasks[task]
    ours = {
        "run_name": f"{task}-{model}",
        "model.path": asked.path,
        "model.revision": asked.revision,
        "model.trust_remote_code": asked.trust_remote_code,
        "optimizer.lr": config.learning_rates[0],
        "save_model": False,
    }
    given = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in ours.items()]
    try:
        found = load(file, [*_QUIET, *config.overrides, *given])
    except ConfigError as error:
        here = f"overrides of the sweep, with {file}"
        raise ConfigError(
            [replace(one, where=here) if one.where == "command line" else one for one in error.problems]
        ) from None
    if not isinstance(found, FinetuneConfig):
        raise ConfigError([Problem(file, "job", f"expected finetune, which tasks.{task} needs; got {found.job}")])
    return found


def _at(config: FinetuneConfig, cell: Cell) -> FinetuneConfig:
    """A copy: reading the YAML again for each rate and seed would take a minute in the paper's grid."""
    optimizer = config.optimizer.model_copy(update={"lr": cell.lr})
    name = f"{cell.task}-{cell.model}-{cell.lr:g}-{cell.seed}"
    return config.model_copy(update={"optimizer": optimizer, "seed": cell.seed, "run_name": name})


def describe(cell: Cell) -> str:
    """A trial, for a person."""
    return f"{cell.task} {cell.model} lr {cell.lr:g} seed {cell.seed}"
