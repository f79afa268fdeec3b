"""Expand a sweep's YAML into trials: a name and a fine-tuning configuration for each cell of the grid.

A trial's name is `<model>.<task>.<hash>`. The hash covers everything that determines the result: the settings, and the
contents of the model and data files. So a changed trial is a new trial, and models with equal files (or a renamed
model) have trials with equal hashes. One of these trials is trained; the records of the others are copies
(`about["copy_of"]`).

Trials with `encoder_from` start from the encoder of another task's trial, which is chosen only when that task's trials are
done. Their hashes cover the hashes of all trials that may be chosen, and `about["encoder_from"]` names the chosen one.

Trials start seed by seed, and within a seed task by task, so that every model soon has a score on every task. The seeds
that choose the learning rates come first.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.read import format_override
from biphasic.config.sweep import SweepConfig
from biphasic.errors import ConfigError, Problem, UserError
from biphasic.sweep.records import Cell, Grid, GridModel, GridTask

TRIAL_MODULE = "biphasic.finetuning.trial"
"""Name of the module that names trials, estimates their memory and runs them. Tests use one with smaller trials."""
_QUIET = ("logging.progress_bar=false", "logging.jsonl=false", "logging.tensorboard=false")
"""Overrides that turn off a single run's logging; the sweep's `overrides` can turn it on again."""


def content_hash(trial: str) -> str:
    """Return the hash in a trial's name."""
    return trial.rpartition(".")[2]


def encoder_folder(output: str, trial: str) -> Path:
    """Return the folder in which a sweep keeps the encoder of a trial for other tasks."""
    return Path(output) / "encoders" / content_hash(trial)


def describe(cell: Cell) -> str:
    """Return a trial's description for messages."""
    return f"{cell.task} {cell.model} lr {cell.lr:g} seed {cell.seed}"


def first_cells(configs: dict[Cell, FinetuneConfig]) -> dict[Cell, FinetuneConfig]:
    """Return the first cell of each model and task, with its configuration."""
    first = {(cell.model, cell.task): cell for cell in reversed(configs)}
    return {cell: config for cell, config in configs.items() if first[cell.model, cell.task] == cell}


def fewest_trials(config: SweepConfig) -> int:
    """Return the number of trials if all test sets of a task choose the same learning rate."""
    choosing = config.rate_seeds or len(config.seeds)
    of_pair = len(config.learning_rates) * choosing + len(config.seeds) - choosing
    return len(config.models) * len(config.tasks) * of_pair


def trial_configs(config: SweepConfig) -> dict[Cell, FinetuneConfig]:
    """Return the configuration of each cell of the grid, in the order in which trials start.

    Raises a ConfigError with all problems of the tasks' YAMLs and of `overrides`.
    """
    by_pair: dict[tuple[str, str], FinetuneConfig] = {}
    # An invalid key is invalid for every model, so it is reported once.
    problems: dict[Problem, None] = {}
    for task, model in product(config.tasks, config.models):
        try:
            by_pair[model, task] = _load(config, model, task)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))
    order = product(config.seeds, config.tasks, config.models, config.learning_rates)
    cells = [Cell(model, task, lr, seed) for seed, task, model, lr in order]
    return {cell: _config_at(by_pair[cell.model, cell.task], cell) for cell in cells}


def build_grid(config: SweepConfig, configs: dict[Cell, FinetuneConfig], functions: ModuleType) -> Grid:
    """Return the grid with the names of all trials. Reads the model and data files.

    `configs` come from `trial_configs`; `functions` is the module `TRIAL_MODULE`, or the tests' replacement. Raises a
    UserError that lists all missing models and datasets, and sets without a validation split to choose among rates by.
    """
    hashes: dict[Cell, str] = {}
    faults: dict[tuple[str, str], str] = {}
    tasks: dict[str, GridTask] = {}
    for cell, trial_config in configs.items():
        if (cell.model, cell.task) in faults:
            continue
        try:
            hashes[cell] = functions.trial_name(trial_config)
            if cell.task not in tasks and len(config.learning_rates) > 1:
                functions.require_validation(trial_config)
        except UserError as error:
            faults[cell.model, cell.task] = str(error)
        if cell.task not in tasks:
            about = (trial_config.task.family, functions.scored_sets(trial_config))
            tasks[cell.task] = GridTask(cell.task, *about, config.tasks[cell.task].encoder_from)
    if faults:
        # A missing model affects every task, and a missing dataset every model: report each once.
        pairs: dict[str, list[str]] = {}
        for (model, task), fault in faults.items():
            pairs.setdefault(fault, []).append(f"{task} of {model}")
        more = {fault: f" and {len(users) - 1} more" if len(users) > 1 else "" for fault, users in pairs.items()}
        raise UserError("\n".join(f"{users[0]}{more[fault]}: {fault}" for fault, users in pairs.items()))

    @functools.cache
    def complete_hash(cell: Cell) -> str:
        source = config.tasks[cell.task].encoder_from
        if source is None:
            return hashes[cell]
        choosing = product(config.learning_rates, config.seeds[: config.rate_seeds])
        sources = [complete_hash(Cell(cell.model, source, lr, seed)) for lr, seed in choosing]
        return hashlib.sha256(json.dumps([hashes[cell], sources]).encode()).hexdigest()[:24]

    names = {f"{cell.model}.{cell.task}.{complete_hash(cell)}": cell for cell in configs}
    if len(names) < len(configs):
        # The hash must include the learning rate and the seed, otherwise trials would silently collide.
        raise RuntimeError(f"{len(configs)} trials have only {len(names)} names")
    return Grid(
        models=tuple(GridModel(name, model.steps) for name, model in config.models.items()),
        tasks=tuple(tasks[name] for name in config.tasks),
        learning_rates=tuple(config.learning_rates),
        seeds=tuple(config.seeds),
        trials=names,
        rate_seeds=config.rate_seeds or len(config.seeds),
        task_group=config.task_group,
    )


def _load(config: SweepConfig, model: str, task: str) -> FinetuneConfig:
    settings, file = config.models[model], config.tasks[task].file
    values = {
        "run_name": f"{task}-{model}",
        "model.path": settings.path,
        "model.revision": settings.revision,
        "model.trust_remote_code": settings.trust_remote_code,
        "optimizer.lr": config.learning_rates[0],
        "save_model": False,
    }
    overrides = [format_override(key, value) for key, value in values.items()]
    try:
        loaded = load(file, [*_QUIET, *(each.replace("{task}", task) for each in config.overrides), *overrides])
    except ConfigError as error:
        source = f"overrides of the sweep, with {file}"
        problems = [replace(p, where=source) if p.where == "command line" else p for p in error.problems]
        raise ConfigError(problems) from None
    if not isinstance(loaded, FinetuneConfig):
        raise ConfigError([Problem(file, "job", f"expected finetune, which tasks.{task} needs; got {loaded.job}")])
    if len(config.learning_rates) > 1 and getattr(loaded.task, "validation", "") is None:
        raise ConfigError([Problem(file, "task.validation", "is null, but the sweep chooses among its rates by it")])
    return loaded


def _config_at(config: FinetuneConfig, cell: Cell) -> FinetuneConfig:
    """Copy the configuration for one cell: reading the YAML for each cell would take a minute for the paper's grid."""
    optimizer = config.optimizer.model_copy(update={"lr": cell.lr})
    name = f"{cell.task}-{cell.model}-{cell.lr:g}-{cell.seed}"
    return config.model_copy(update={"optimizer": optimizer, "seed": cell.seed, "run_name": name})
