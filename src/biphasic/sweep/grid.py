"""Expand a sweep's YAML into trials: a name and a fine-tuning configuration for each cell of the grid.

A trial's name is `<model>.<task>.<hash>`. The hash covers everything that determines the result: the settings, and the
contents of the model and data files. So a changed trial is a new trial.

Trials start seed by seed, and within a seed task by task, so that every model soon has a score on every task. The seeds
that choose the learning rates come first.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import load
from biphasic.config.read import format_override
from biphasic.config.sweep import SweepConfig
from biphasic.errors import ConfigError, Missing, Problem, UserError
from biphasic.finetuning.plan import require_data
from biphasic.storage.hub import require_model
from biphasic.sweep.records import Cell, Grid, GridTask

TRIAL_MODULE = "biphasic.finetuning.trial"
"""Name of the module that names trials and runs them. Tests use one with smaller trials."""
_QUIET = ("logging.progress_bar=false", "logging.jsonl=false", "logging.tensorboard=false")
"""Overrides that turn off a single run's logging; the sweep's `overrides` can turn it on again."""


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


def check_trials(configs: dict[Cell, FinetuneConfig], module: str = TRIAL_MODULE) -> list[str]:
    """Check each pair of a model and a task as the plan of a fine-tuning does, and return the warnings.

    Raises a UserError that lists all missing models and datasets (Missing, if nothing else is wrong), or what doesn't fit.
    """
    pairs = {(cell.task, cell.model): (cell, each) for cell, each in configs.items()}.values()
    if module == TRIAL_MODULE:  # at once, since the module's imports take seconds
        _check_pairs(pairs, _require_inputs)
    functions, warnings = import_module(module), dict[str, None]()
    _check_pairs(pairs, lambda _, trial_config: warnings.update(dict.fromkeys(functions.check_trial(trial_config))))
    return list(warnings)


def build_grid(config: SweepConfig, configs: dict[Cell, FinetuneConfig], module: str = TRIAL_MODULE) -> Grid:
    """Return the grid with the names of all trials, which `check_trials` has passed. Reads the model and data files.

    `configs` come from `trial_configs`; `module` names and runs trials. Raises a UserError about sets without a validation
    split to choose among rates by.
    """
    names: dict[str, Cell] = {}
    tasks: dict[str, GridTask] = {}
    functions = import_module(module)

    def add(cell: Cell, trial_config: FinetuneConfig) -> None:
        names[f"{cell.model}.{cell.task}.{functions.trial_name(trial_config)}"] = cell
        if cell.task not in tasks:
            if len(config.learning_rates) > 1:
                functions.require_validation(trial_config)
            tasks[cell.task] = GridTask(cell.task, trial_config.task.family, functions.scored_sets(trial_config))

    _check_pairs(configs.items(), add)
    if len(names) < len(configs):
        # The hash must include the learning rate and the seed, otherwise trials would silently collide.
        raise RuntimeError(f"{len(configs)} trials have only {len(names)} names")
    return Grid(
        models=tuple(config.models),
        tasks=tuple(tasks[name] for name in config.tasks),
        learning_rates=tuple(config.learning_rates),
        seeds=tuple(config.seeds),
        trials=names,
        rate_seeds=config.rate_seeds or len(config.seeds),
        task_group=config.task_group,
    )


def _check_pairs(configs: Iterable[tuple[Cell, FinetuneConfig]], check: Callable[[Cell, FinetuneConfig], None]) -> None:
    """Check trials, and raise a UserError with the faults of all pairs of a task and a model; of each pair the first one."""
    faulty: dict[str, dict[tuple[str, str], None]] = {}
    faults = list[UserError]()
    for cell, trial_config in configs:
        if any((cell.task, cell.model) in pairs for pairs in faulty.values()):
            continue
        try:
            check(cell, trial_config)
        except UserError as error:
            # A missing model affects every task, and a missing dataset every model: each is reported once.
            faulty.setdefault(str(error), {})[cell.task, cell.model] = None
            faults.append(error)
    if faulty:
        kind = Missing if all(isinstance(fault, Missing) for fault in faults) else UserError
        raise kind("\n".join(f"{_describe_pairs(list(pairs))}: {fault}" for fault, pairs in faulty.items()))


def _require_inputs(cell: Cell, config: FinetuneConfig) -> None:
    if not Path(config.model.path).is_file():
        require_model(config.model.path, config.model.revision)
    require_data(config)


def _describe_pairs(pairs: list[tuple[str, str]]) -> str:
    (task, model), more = pairs[0], len(pairs) - 1
    return f"{task} of {model}" + (f" and {more} more" if more else "")


def _load(config: SweepConfig, model: str, task: str) -> FinetuneConfig:
    settings, file = config.models[model], config.tasks[task]
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
