"""Read the predictions of finished runs, and score any choice of their examples.

A metric is a function of values of examples, so that it can be computed on resamples: accuracy is the mean of a value,
F1 a ratio of sums of counts, and Spearman's correlation ranks the numbers of each resample.
"""

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import yaml

from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.evaluation.squad import squad_scores
from biphasic.finetuning.records import DownstreamResult
from biphasic.report.statistics import ExampleValues, mean_score
from biphasic.storage import Store, is_remote, open_store, user_errors
from biphasic.sweep.records import PREDICTIONS_FOLDER, read_grid, read_records
from biphasic.sweep.selection import choose_rates, trials_by_group

Columns = dict[str, list[Any]]
_FAMILIES = ("classification", "multi_label", "regression", "tokens", "question_answering", "retrieval")
_NOT_BY_EXAMPLE = (("multi_label", "macro_f1"), ("multi_label", "average_precision"))
"""Families and metrics whose score on a resample needs more than a few values of each example."""
_READ_ERRORS = (ValueError, LookupError, TypeError, yaml.YAMLError)
_TOLERANCE = 1e-4
"""Largest difference between a recorded score and that of the stored predictions: mteb rounds to five digits."""


class SetScores(NamedTuple):
    """A model's predictions on a test set, and their values, by seed.

    `data` is the fingerprint of an evaluation's data. The columns are `id` (in order), `gold`, `predicted` and, of
    queries, `text`.
    """

    data: str
    predictions: dict[int, Columns]
    examples: dict[int, ExampleValues]


class ScoredModel(NamedTuple):
    """A model of a finished run: its predictions by test set and metric, and the test sets without (all) predictions."""

    place: str
    kind: str
    sets: dict[tuple[str, str], SetScores]
    left_out: list[str]


def read_scored_model(place: str) -> ScoredModel:
    """Read the results of a run of `job: evaluate` or `job: finetune`, or a sweep's trials at the best learning rates.

    `place` is the run's folder; `FOLDER@NAME` names one of a sweep's models, or of an evaluation's systems (`BM25`).

    Raises:
        UserError: the folder has no results, is unfinished or damaged, or has several models and none is named.
    """
    readers = {"scores.json": _read_evaluation, "record.json": _read_finetuning, "sweep.json": _read_sweep}
    folder, _, name = place.rpartition("@")
    for root, chosen in ((place, ""), (folder, name)) if folder else ((place, ""),):
        store = open_store(root if is_remote(root) else str(Path(root).resolve()))
        for file, read in readers.items():
            if store.stat(file) is not None:
                with user_errors(f"{root}/{file}: is not a run's result", *_READ_ERRORS):
                    model, results, unfinished = read(store, chosen)
                    kind = "evaluate" if file == "scores.json" else "finetune"
                    scored = ScoredModel(f"{store.root}@{model}", kind, {}, unfinished)
                    for fingerprint, trials in results:
                        _add_set(store, scored, trials, fingerprint)
                    return scored
    expected = "scores.json (job: evaluate), record.json (job: finetune) or sweep.json (job: sweep)"
    raise UserError(f"{place}: has no {expected}: expected the folder of such a run that has ended")


Trials = dict[int, tuple[str, DownstreamResult]]
"""The folder of the predictions and the result of each seed, on one test set."""
_Read = tuple[str, list[tuple[str, Trials]], list[str]]
"""A model's name, the fingerprint of the data and the trials of each finished test set, and the unfinished test sets."""


def _choose(store: Store, names: Sequence[str], chosen: str) -> str:
    if chosen not in names and (chosen or len(names) != 1):
        problem = f"has no model {chosen}" if chosen else f"has {len(names)} models"
        raise UserError(f"{store.root}: {problem}: expected FOLDER@MODEL with one of {', '.join(names)}")
    return chosen or names[0]


def _read_evaluation(store: Store, chosen: str) -> _Read:
    records, sets = json.loads(store.read("scores.json"))["records"], []
    is_model = {record["system"]: bool(record["about"]["settings"]) for record in records}
    system = _choose(store, [name for name, own in is_model.items() if own or chosen], chosen)
    for record, row in ((each, row) for each in records if each["system"] == system for row in each["scores"]):
        name = " ".join(part for part in (row["task"], row["subset"], row["split"]) if part != "default")
        data, file = record["about"]["source"], row.get("by_query", "")
        result = DownstreamResult(row["task"], name, "retrieval", "ndcg_at_10", None, row["ndcg_at_10"], {}, data, file)
        sets.append((record["about"]["data"], {0: (".", result)}))
    return system, sets, []


def _read_finetuning(store: Store, chosen: str) -> _Read:
    record = json.loads(store.read("record.json"))
    seed, results = yaml.safe_load(record["about"]["config"])["seed"], record["results"]
    sets = [("", {seed: ("predictions", DownstreamResult(**row))}) for row in results]
    return _choose(store, ["model"], chosen), sets, []


def _read_sweep(store: Store, chosen: str) -> _Read:
    grid, sets, unfinished = read_grid(store), [], []
    records, groups = read_records(store, grid.trials), trials_by_group(grid)
    name = _choose(store, grid.models, chosen)
    for (model, task, test_set), rate in choose_rates(grid, records).items():
        if model != name:
            continue
        at_rate = {seed: trial for (lr, seed), trial in groups[name, task].items() if rate.complete and lr == rate.lr}
        trials: Trials = {
            seed: (f"{PREDICTIONS_FOLDER}/{trial}", result)
            for seed, trial in at_rate.items()
            if trial in records
            for result in records[trial].results
            if result.name == test_set
        }
        if len(trials) < len(grid.seeds):
            unfinished.append(f"{test_set} (unfinished: run the sweep again, with --retry-failed if trials failed)")
        else:
            sets.append(("", trials))
    return name, sets, unfinished


def _add_set(store: Store, model: ScoredModel, trials: Trials, fingerprint: str) -> None:
    scores = SetScores(fingerprint, {}, {})
    for seed, (folder, result) in trials.items():
        file = f"{folder}/{result.file}"
        is_known = result.family in _FAMILIES and (result.family, result.metric) not in _NOT_BY_EXAMPLE
        if result.test is None or not is_known or not result.file or store.stat(file) is None:
            model.left_out.append(result.name)
            return
        content = pq.read_table(io.BytesIO(store.read(file)))
        columns = content.take(np.argsort(content["id"].to_numpy(), kind="stable")).to_pydict()
        examples = example_values(result, columns)
        scores.predictions[seed], scores.examples[seed] = columns, examples
        if not abs((score := float(examples.score(examples.values))) - result.test) <= _TOLERANCE:
            raise UserError(f"{store.root}/{file}: its {result.metric} is {score:.5f}, but {result.test:.5f} is recorded")
    result = next(iter(trials.values()))[1]
    model.sets[result.name.removesuffix(f" {result.metric}"), result.metric] = scores


def example_values(result: DownstreamResult, columns: Columns) -> ExampleValues:
    """Return the values of the examples by which a result is scored, from the columns of its predictions.

    Raises:
        UserError: the dataset's label names, which some metrics need, can't be read.
    """
    gold, predicted, metric = columns["gold"], columns["predicted"], result.metric
    if metric in columns:
        quality = np.array(columns[metric], float)
    elif result.family == "question_answering":
        threshold = result.more["test"].get("no_answer_threshold", np.inf)
        rows = zip(gold, predicted, columns.get("no_answer", [-np.inf] * len(gold)), strict=True)
        quality = np.array([squad_scores([row[0]], [row[1]], [row[2]], threshold)[metric] for row in rows])
    elif result.family == "multi_label":
        return set_counts(zip(map(set, gold), map(set, predicted), strict=True))
    elif result.family == "tokens" and metric == "f1":
        return entity_counts(gold, predicted)
    elif result.family == "tokens":
        from biphasic.finetuning.classification import sentence_f1

        quality = np.array([sentence_f1([first], [second]) for first, second in zip(gold, predicted, strict=True)])
    elif result.family == "regression":
        values = np.array([gold, predicted], float).T
        score = _correlation if metric == "pearson" else _rank_correlation
        return ExampleValues(values, score, -np.abs(values[:, 0] - values[:, 1]))
    else:
        first, second = np.array(gold), np.array(predicted)
        quality = (first == second).astype(float)
        if metric != "accuracy":
            names = np.array(TaskFolder(result.data, "runs/cache", None).label_names)
            first, second = (answers[:, None] == names for answers in (first, second))  # one-hot
            if metric == "matthews":  # the correlation of one-hot labels, also of more than two
                return ExampleValues(np.concatenate([first, second], 1).astype(float), _correlation, quality)
            first, second = first[:, 1], second[:, 1]
            return ExampleValues(np.stack([first & second, second, first], 1).astype(float), _f1, quality)
    return ExampleValues(quality[:, None], mean_score, quality)


def entity_counts(gold: list[list[str]], predicted: list[list[str]]) -> ExampleValues:
    """Return the numbers of correct, of predicted and of gold entities of each sentence, as seqeval finds them."""
    from seqeval.metrics.sequence_labeling import get_entities

    pairs = zip(gold, predicted, strict=True)
    return set_counts((set(get_entities(first)), set(get_entities(second))) for first, second in pairs)


def set_counts(pairs: Iterable[tuple[set[Any], set[Any]]]) -> ExampleValues:
    """Return the numbers of correct, of predicted and of gold elements of each example, for a micro F1."""
    counts = np.array([(len(first & second), len(second), len(first)) for first, second in pairs], float)
    return ExampleValues(counts, _f1, 2 * counts[:, 0] - counts[:, 1] - counts[:, 2])


def _f1(values: np.ndarray) -> np.ndarray:
    correct, predicted, gold = np.moveaxis(values.sum(-2), -1, 0)
    return _ratio(2 * correct, predicted + gold)


def _correlation(values: np.ndarray) -> np.ndarray:
    first, second = np.split(values - values.mean(-2, keepdims=True), 2, -1)
    return _ratio((first * second).sum((-1, -2)), np.sqrt((first**2).sum((-1, -2)) * (second**2).sum((-1, -2))))


def _rank_correlation(values: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return _correlation(rankdata(values, axis=-2))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return a ratio that is 0 where the denominator is 0 but for rounding."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 1e-12)
