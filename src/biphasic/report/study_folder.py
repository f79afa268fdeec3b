"""Read the contents of a study's folders: runs and sweeps.

<model>/config.yaml, metrics.jsonl      a pretraining run (`job: pretrain`)
<any folder>/sweep.json, trials/        a sweep (`job: sweep`); there may be several
"""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pandas as pd
import yaml
from omegaconf import OmegaConf

from biphasic.config.check import check
from biphasic.config.model_names import Facets, facets_of_models
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError, UserError, first_line
from biphasic.report.scores import chosen_scores, read_sweep, trial_table
from biphasic.report.study_losses import LOSS, loss_events, loss_points, loss_table
from biphasic.storage import Store, is_remote, join, open_store, user_errors
from biphasic.sweep.records import GRID_FILE, Grid
from biphasic.training.metrics_file import read_columns

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Study:
    """The data of a study's report."""

    models: dict[str, Facets]
    """Models with a run or scores."""
    notes: list[str]
    """A line for each file that could not be used, and for the models that no figure can show."""
    scores: pd.DataFrame
    """Test scores of sweeps at the chosen rates: rows of `chosen_scores`, without missing scores."""
    losses: pd.DataFrame
    """Losses and events of the runs (`study_losses`)."""


def read_study(folders: Sequence[str], models: Sequence[str] | None = None) -> Study:
    """Read a study from its folders, e.g. a bucket prefix with its records and a local folder with its logs.

    `models` are those whose runs the last folder has, which may have other runs too; by default all of it is the
    study's. Raises a UserError if there is neither a run nor a sweep, if a file can't be read or is in two folders, or
    if two sweeps scored a model on the same test set.
    """
    notes = list[str]()
    files = _files(folders, models, notes)
    if not _named(files, CONFIG_FILE) and not _named(files, GRID_FILE):
        raise UserError(f"{' '.join(folders)}: expected a sweep's output (with {GRID_FILE}) or a study's folder (with a "
                        "run or a sweep in a subfolder)")  # fmt: skip
    configs, scores = _configs(files, notes), _scores(files, notes)
    names = sorted({*configs, *scores.model})
    facets, problems = facets_of_models(names, configs)
    notes += problems.values()
    if others := [name for name in names if name not in facets and name not in problems]:
        notes.append(f"no figure shows {', '.join(others)}: a model is placed by its run's {CONFIG_FILE}")
    losses = [loss_table([])]
    for run, config in configs.items():
        if f"{run}/{METRICS_FILE}" in files:
            base_steps = facets[run].base_steps if run in facets else 0
            metrics = _read_losses(files[f"{run}/{METRICS_FILE}"], f"{run}/{METRICS_FILE}")
            losses += [loss_points(run, metrics, base_steps), loss_events(run, config, base_steps)]
    return Study(facets, notes, scores, pd.concat(losses, ignore_index=True))


def _files(folders: Sequence[str], models: Sequence[str] | None, notes: list[str]) -> dict[str, Store]:
    """Return a report's files by their path in the study, with the store of each, and add a note for a folder without."""
    files: dict[str, Store] = {}
    for folder in folders:
        store = open_store(folder)
        with user_errors(f"{folder}: can't be read"):
            own = None if models is None else [*models, *(f"evaluate/{name}" for name in models)]
            parts = own if own is not None and folder == folders[-1] else ("",)
            names = [name for part in parts for name in store.list(part)]
        for name in names:
            depth, base = name.count("/"), posixpath.basename(name)
            # Runs are directly below the study's folder: fine-tuning and evaluation also write a config.yaml.
            if (depth == 1 and base in (CONFIG_FILE, METRICS_FILE)) or (depth and base == GRID_FILE):
                if name in files:
                    message = f"{name} is in both {files[name].root} and {folder}"
                    raise UserError(f"{message}: expected it in only one of a study's folders")
                files[name] = store
        if evaluated := [f"{name[:-5]}.md" for name in names if posixpath.basename(name) == "scores.json"]:
            notes.append(f"evaluations are in no table: read {', '.join(evaluated)}, or compare two with biphasic compare")
        if store not in files.values():
            notes.append(f"{folder}: holds neither a run nor a sweep")
    return dict(sorted(files.items()))


def _read(files: Mapping[str, Store], name: str) -> bytes:
    with user_errors(f"{join(files[name].root, name)}: can't be read"):
        return files[name].read(name)


def _read_losses(store: Store, name: str) -> dict[str, Any]:
    with user_errors(f"{join(store.root, name)}: can't be read", OverflowError), TemporaryDirectory() as folder:
        file = Path(folder, METRICS_FILE) if is_remote(store.root) else Path(store.root, name)
        if is_remote(store.root):
            store.download(name, file)
        return read_columns(file, LOSS)


def _named(files: Iterable[str], base: str) -> list[str]:
    return [posixpath.dirname(name) for name in files if posixpath.basename(name) == base]


def _configs(files: Mapping[str, Store], notes: list[str]) -> dict[str, PretrainConfig]:
    """Return the resolved configurations of the pretraining runs, and add a note for each invalid one."""
    configs = {}
    for run in _named(files, CONFIG_FILE):
        try:
            content = OmegaConf.to_container(OmegaConf.create(_read(files, f"{run}/{CONFIG_FILE}").decode()))
            if isinstance(content, dict) and content.get("job") == "pretrain":
                configs[run] = cast("PretrainConfig", check(content, ("pretrain",), lambda _: CONFIG_FILE, ranks=1))
        except (yaml.YAMLError, ValueError, AssertionError) as error:
            notes.append(f"{run}/{CONFIG_FILE}: is not used ({first_line(error)})")
        except ConfigError as error:
            notes.append(f"{run}/{CONFIG_FILE}: is not used ({error.problems[0].key}: {error.problems[0].message})")
    return configs


def _scores(files: Mapping[str, Store], notes: list[str]) -> pd.DataFrame:
    parts = [chosen_scores(trial_table(Grid((), (), (), (), {}, 0), {}))]
    owners: dict[tuple[str, str], str] = {}
    for folder in _named(files, GRID_FILE):
        root = join(files[f"{folder}/{GRID_FILE}"].root, folder)
        _, trials, others = read_sweep(root)
        scores = chosen_scores(trials)
        notes += [f"{folder}: {line}" for line in others]
        parts.append(scores[scores.score.notna()])
        for model, test_set in parts[-1][["model", "test_set"]].drop_duplicates().to_numpy():
            if (owner := owners.setdefault((model, test_set), folder)) != folder:
                message = f"scores of {model} on {test_set} are also in {owner}: expected them in only one sweep"
                raise UserError(f"{root}: {message}")
    return pd.concat(parts[1:] or parts, ignore_index=True)
