"""Read the contents of a study's folders: runs, sweeps and evaluations.

<model>/config.yaml, metrics.jsonl      a pretraining run (`job: pretrain`)
<any folder>/sweep.json, trials/        a sweep (`job: sweep`); there may be several
<any folder>/scores.json                an evaluation (`job: evaluate`); a folder above it has the model's name
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import yaml
from omegaconf import OmegaConf

from biphasic.config.check import check
from biphasic.config.model_names import Facets, facets_of_models
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError, UserError, first_line
from biphasic.report.scores import chosen_scores, read_sweep, trial_table
from biphasic.report.study_losses import loss_events, loss_points, loss_table
from biphasic.storage import Store, join, open_store, user_errors
from biphasic.sweep.records import GRID_FILE, Grid
from biphasic.training.metrics_file import parse_metrics

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "scores.json"
EVALUATION_COLUMNS = ["model", "system", "task", "split", "documents", "metric", "value", "low", "high"]


@dataclass(frozen=True)
class Study:
    """The data of a study's report."""

    models: dict[str, Facets]
    """Models with a run or scores."""
    notes: list[str]
    """A line for each model that no figure can show, and for each file that could not be used."""
    scores: pd.DataFrame
    """Test scores of sweeps at the chosen rates: rows of `chosen_scores`, without missing scores."""
    evaluations: pd.DataFrame
    """Scores of evaluations, with `EVALUATION_COLUMNS`. `system` is the model or a baseline, such as `bm25`; `documents` is
    `full` (the complete corpus) or `judged`; `low` and `high` bound NDCG@10's 95% bootstrap interval over queries."""
    losses: pd.DataFrame
    """Losses and events of the runs (`study_losses`)."""


def read_study(folders: Sequence[str], subfolders: Sequence[str] = ("",)) -> Study:
    """Read a study from its folders, e.g. a bucket prefix with its records and a local folder with its logs.

    `subfolders` are those of the last folder that belong to the study; by default all of it does. Raises a UserError if
    there is neither a run nor a sweep, if a file can't be read or is in two folders, or if two sweeps scored a model on
    the same test set.
    """
    files, notes = _files(folders, subfolders), []
    if not _named(files, CONFIG_FILE) and not _named(files, GRID_FILE):
        raise UserError(f"{' '.join(folders)}: expected a sweep's output (with {GRID_FILE}) or a study's folder (with a "
                        "run or a sweep in a subfolder)")  # fmt: skip
    configs = _configs(files, notes)
    scores = _scores(files)
    models, unplaced = facets_of_models(sorted({*configs, *scores.model}), configs)
    losses = [loss_table([])]
    for run, config in configs.items():
        if f"{run}/{METRICS_FILE}" in files:
            base_steps = models[run].base_steps if run in models else 0
            metrics = parse_metrics(_read(files, f"{run}/{METRICS_FILE}").decode(errors="replace"))
            losses += [loss_points(run, metrics, base_steps), loss_events(run, config, base_steps)]
    evaluations = pd.DataFrame(_evaluations(files, {*models, *unplaced}, notes), columns=EVALUATION_COLUMNS)
    return Study(models, [*unplaced.values(), *notes], scores, evaluations, pd.concat(losses, ignore_index=True))


def _files(folders: Sequence[str], subfolders: Sequence[str]) -> dict[str, Store]:
    """Return the files that a report reads, by their path in the study, with the store that holds each."""
    files: dict[str, Store] = {}
    for folder in folders:
        store = open_store(folder)
        with user_errors(f"{folder}: can't be read"):
            names = [name for part in (subfolders if folder == folders[-1] else ("",)) for name in store.list(part)]
        for name in names:
            depth, base = name.count("/"), posixpath.basename(name)
            # Runs are directly below the study's folder: fine-tuning and evaluation also write a config.yaml.
            if (depth == 1 and base in (CONFIG_FILE, METRICS_FILE)) or (depth and base in (GRID_FILE, EVALUATION_FILE)):
                if name in files:
                    message = f"{name} is in both {files[name].root} and {folder}"
                    raise UserError(f"{message}: expected it in only one of a study's folders")
                files[name] = store
    return dict(sorted(files.items()))


def _read(files: Mapping[str, Store], name: str) -> bytes:
    with user_errors(f"{join(files[name].root, name)}: can't be read"):
        return files[name].read(name)


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
        except (yaml.YAMLError, ValueError) as error:
            notes.append(f"{run}/{CONFIG_FILE}: is not used ({first_line(error)})")
        except ConfigError as error:
            notes.append(f"{run}/{CONFIG_FILE}: is not used ({error.problems[0].key}: {error.problems[0].message})")
    return configs


def _scores(files: Mapping[str, Store]) -> pd.DataFrame:
    parts = []
    owners: dict[tuple[str, str], str] = {}
    for folder in _named(files, GRID_FILE):
        root = join(files[f"{folder}/{GRID_FILE}"].root, folder)
        scores = chosen_scores(read_sweep(root)[1])
        parts.append(scores[scores.score.notna()])
        for model, test_set in parts[-1][["model", "test_set"]].drop_duplicates().to_numpy():
            if (owner := owners.setdefault((model, test_set), folder)) != folder:
                message = f"scores of {model} on {test_set} are also in {owner}: expected them in only one sweep"
                raise UserError(f"{root}: {message}")
    return pd.concat(parts or [chosen_scores(trial_table(Grid((), (), (), (), {}, 0), {}))], ignore_index=True)


def _evaluations(files: Mapping[str, Store], models: set[str], notes: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the evaluations' scores, and add a note for each file that is not used."""
    for folder in _named(files, EVALUATION_FILE):
        name = f"{folder}/{EVALUATION_FILE}"
        model = next((part for part in reversed(folder.split("/")) if part in models), None)
        if model is None:
            notes.append(f"{name}: is not used, because no folder above it has the name of a model")
            continue
        try:
            for record in json.loads(_read(files, name))["records"]:
                for scores in record["scores"]:
                    split = f"{scores['subset']}, {scores['split']}".removeprefix("default, ")
                    where = model, record["system"], scores["task"], split, record["about"]["documents"]
                    yield *where, scores["metric"], scores["value"], *(scores["interval"] or (None, None))
        except (ValueError, LookupError, TypeError) as error:
            place = join(files[name].root, name)
            raise UserError(f"{place}: is not an evaluation's result ({first_line(error)})") from None
