"""Read what a study's folders hold: runs, sweeps and evaluations.

<model>/config.yaml, metrics.jsonl      a pretraining run, as `job: pretrain` leaves it
<any folder>/sweep.json, trials/        a sweep, as `job: sweep` leaves it; there may be several
<any folder>/scores.json                an evaluation, as `job: evaluate` leaves it; a folder above it has the model's name
"""

from __future__ import annotations

import json
import posixpath
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from biphasic.config.load import load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError, UserError
from biphasic.report.study_losses import LossEvent, LossPoint, loss_events, loss_points
from biphasic.report.study_models import Facets, facets_of_models
from biphasic.report.study_scores import ScoreRow, rows_of_sweep
from biphasic.report.sweep_scores import collect_scores
from biphasic.storage import Store, first_line, join, open_store
from biphasic.sweep.records import GRID_FILE, read_grid, read_records
from biphasic.training.metrics_file import parse_metrics

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "scores.json"


@dataclass(frozen=True)
class EvaluationRow:
    """One score of a model, or of a baseline that was evaluated beside it."""

    model: str
    system: str
    """The model's name in the evaluation, or the baseline's, such as `bm25`."""
    task: str
    split: str
    documents: str
    """Which documents were searched: `full` (all of the corpus) or `judged`."""
    metric: str
    value: float
    interval: tuple[float, float] | None
    """95% bootstrap interval over queries, for the metric NDCG@10 only."""


@dataclass(frozen=True)
class Study:
    """Everything that a study's report is made of."""

    models: dict[str, Facets]
    """Models with a run or scores."""
    unplaced: dict[str, str]
    """Models that no figure can show, with the reason."""
    notes: list[str]
    """Warnings, one line for each file that could not be used."""
    rows: list[ScoreRow]
    """Scores of sweeps."""
    evaluations: list[EvaluationRow]
    losses: list[LossPoint]
    events: list[LossEvent]


def is_study(folder: str) -> bool:
    """Return whether a folder is a study's; False if it is a sweep's output.

    Raises:
        UserError: the folder can't be read, or is neither.
    """
    if GRID_FILE in _list(open_store(folder)):
        return False
    files = _files([folder])
    if not _named(files, CONFIG_FILE) and not _named(files, GRID_FILE):
        raise UserError(
            f"{folder}: is no sweep's output (it has no {GRID_FILE}), and no study's folder (none of its folders has a run "
            "or a sweep)"
        )
    return True


def read_study(folders: Sequence[str]) -> Study:
    """Read a study.

    Args:
        folders: the study's folder; or several, for example a bucket's prefix with its records and a local folder with
            its logs.

    Raises:
        UserError: a file can't be read or is in two of the folders, or two sweeps have scores of the same model on the same
            test set.
    """
    files = _files(folders)
    notes: list[str] = []
    configs: dict[str, PretrainConfig] = {}
    for run in _named(files, CONFIG_FILE):
        try:
            config = _config(files, f"{run}/{CONFIG_FILE}")
        except ConfigError as error:
            problem = error.problems[0]
            notes.append(f"{run}/{CONFIG_FILE}: is not used ({problem.key}: {problem.message})")
            continue
        if config is not None:
            configs[run] = config
    rows = _score_rows(files)
    models, unplaced = facets_of_models(sorted({*configs, *(row.model for row in rows)}), configs)
    losses: list[LossPoint] = []
    events: list[LossEvent] = []
    for run, config in configs.items():
        if f"{run}/{METRICS_FILE}" not in files:
            continue
        base_steps = models[run].base_steps if run in models else 0
        metrics = parse_metrics(_read(files, f"{run}/{METRICS_FILE}").decode(errors="replace"))
        losses += loss_points(run, metrics, base_steps)
        events += loss_events(run, config, base_steps)
    evaluations = _evaluations(files, {*models, *unplaced}, notes)
    return Study(models, unplaced, notes, rows, evaluations, losses, events)


def _files(folders: Sequence[str]) -> dict[str, Store]:
    """Return the files that a report reads, relative to the study's folder, with the store that has each."""
    files: dict[str, Store] = {}
    for folder in folders:
        store = open_store(folder)
        for name in _list(store):
            depth, base = name.count("/"), posixpath.basename(name)
            # Runs are directly below the study's folder: fine-tuning and evaluation also write a config.yaml.
            if (depth == 1 and base in (CONFIG_FILE, METRICS_FILE)) or (depth and base in (GRID_FILE, EVALUATION_FILE)):
                if name in files:
                    raise UserError(f"{name} is in {files[name].root} and in {folder}: a study has it once")
                files[name] = store
    return dict(sorted(files.items()))


def _list(store: Store) -> list[str]:
    try:
        return list(store.list())
    except OSError as error:
        raise UserError(f"{store.root}: can't be read ({first_line(error)})") from None


def _named(files: Iterable[str], base: str) -> list[str]:
    """Return the folders that have a file with this name."""
    return [posixpath.dirname(name) for name in files if posixpath.basename(name) == base]


def _config(files: Mapping[str, Store], name: str) -> PretrainConfig | None:
    """Return a run's resolved configuration; None if its job is not pretraining."""
    content = _read(files, name)
    try:
        job = yaml.safe_load(content)["job"]
    except (yaml.YAMLError, LookupError, TypeError):
        return None
    if job != "pretrain":
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_bytes(content)
        return load_job(PretrainConfig, file)


def _score_rows(files: Mapping[str, Store]) -> list[ScoreRow]:
    rows: list[ScoreRow] = []
    owners: dict[tuple[str, str], str] = {}
    for folder in _named(files, GRID_FILE):
        place = join(files[f"{folder}/{GRID_FILE}"].root, folder)
        source = open_store(place)
        grid = read_grid(source)
        sweep_rows = rows_of_sweep(collect_scores(grid, read_records(source, grid.trials)))
        for model, test_set in dict.fromkeys((row.model, row.test_set) for row in sweep_rows):
            owner = owners.setdefault((model, test_set), folder)
            if owner != folder:
                message = f"scores of {model} on {test_set} are also in {owner}: a study has them once"
                raise UserError(f"{place}: {message}")
        rows += sweep_rows
    return rows


def _evaluations(files: Mapping[str, Store], models: set[str], notes: list[str]) -> list[EvaluationRow]:
    rows: list[EvaluationRow] = []
    for folder in _named(files, EVALUATION_FILE):
        name = f"{folder}/{EVALUATION_FILE}"
        model = next((part for part in reversed(folder.split("/")) if part in models), None)
        if model is None:
            notes.append(f"{name}: is not used, because no folder above it has the name of a model")
            continue
        try:
            for record in json.loads(_read(files, name))["records"]:
                documents = record["about"]["documents"]
                for scores in record["scores"]:
                    split = f"{scores['subset']}, {scores['split']}".removeprefix("default, ")
                    interval = tuple(scores["interval"]) if scores["interval"] else None
                    rows.append(
                        EvaluationRow(
                            *(model, record["system"], scores["task"], split, documents),
                            *(scores["metric"], scores["value"], interval),
                        )
                    )
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{join(files[name].root, name)}: is not an evaluation's result ({first_line(error)})"
            ) from None
    return rows


def _read(files: Mapping[str, Store], name: str) -> bytes:
    try:
        return files[name].read(name)
    except OSError as error:
        raise UserError(f"{join(files[name].root, name)}: can't be read ({first_line(error)})") from None
