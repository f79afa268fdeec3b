"""Name, check and run a trial (one fine-tuning)."""

import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch

from biphasic.config.finetune import NOT_IN_RESULT, EncoderConfig, FinetuneConfig, TaskConfig
from biphasic.config.load import dump
from biphasic.data.seeds import derive_seed
from biphasic.devices import rank_device, require_precision
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.finetuning.batches import count_steps, warmup_batches
from biphasic.finetuning.classification import Classification, MultiLabel, Regression, TokenClassification
from biphasic.finetuning.question_answering import AnswerTokens, QuestionAnswering
from biphasic.finetuning.records import TrialResult
from biphasic.finetuning.retrieval import Retrieval
from biphasic.finetuning.task import RESULT_FORMAT, FinetuneTask, TrainedModel
from biphasic.model.heads import initialize_head
from biphasic.model.hf_config import file_stamps, load_hf_config, model_fingerprint
from biphasic.model.text_tokenizer import TextTokenizer, load_text_tokenizer, require_embeddings
from biphasic.provenance import provenance
from biphasic.quiet import progress_bars
from biphasic.ranks import COLLECTIVE_SECONDS, print_once

FAMILIES: dict[str, type[FinetuneTask]] = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "tokens": TokenClassification,
    "question_answering": QuestionAnswering,
    "answer_tokens": AnswerTokens,
    "retrieval": Retrieval,
}
"""The classes of downstream task families, by the `task.kind` of a fine-tuning YAML."""
_contents: dict[tuple[Any, ...], list[Any]] = {}
"""Hashes of everything that a trial reads."""


def trial_name(config: FinetuneConfig) -> str:
    """Return a hash of everything that determines a trial's result: the model's files, the tables and the settings.

    Raises a UserError if the model or the data is missing.
    """
    task = config.task
    paths = [config.model.path, task.data, *task.retrieval_sets.values()]
    key = (config.model.model_dump_json(), task.model_dump_json(), config.cache, tuple(map(file_stamps, paths)))
    # Cached because thousands of trials in a sweep read the same files.
    if key not in _contents:
        family = build_task(config.model, task, config.cache)
        _contents[key] = [
            [model_fingerprint(*_source(config.model)), config.model.trust_remote_code],
            [family.text_tokenizer.fingerprint, family.text_tokenizer.max_length],
            [[table, folder.content_hash(table)] for folder, table in family.tables()],
            list(task.retrieval_sets),
        ]
    settings = config.model_dump(mode="json", exclude=NOT_IN_RESULT)
    content = json.dumps([RESULT_FORMAT, settings, _contents[key]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def require_unchanged(config: FinetuneConfig, name: str) -> None:
    """Raise a UserError if the trial's model or data has other files than when it was named."""
    _contents.clear()  # its keys have stamps of local files, but none of buckets and hubs
    if trial_name(config) != name:
        files = f"model {config.model.path} or the data of {config.task.name}"
        raise UserError(f"{files}: a file has changed since the trial was named by their contents: start again")


def scored_sets(config: FinetuneConfig) -> tuple[tuple[str, str, str], ...]:
    """Return the (task, name, metric) of each test set of a trial, as in `DownstreamResult`."""
    task = config.task
    if task.kind == "retrieval":
        sets = [(name, shown) for name in task.retrieval_sets for shown in task.scored_as(name)]
    else:
        sets = [(task.name, name) for name in task.scored]
    return tuple((own, shown, metric) for own, name in sets for shown, metric in task.shown(name))


def require_validation(config: FinetuneConfig) -> None:
    """Raise a UserError if a scored retrieval set has no validation judgments, by which a sweep chooses among its rates."""
    for path in config.task.retrieval_sets.values():
        if "qrels/validation" not in TaskFolder(path, config.cache, Retrieval.family).record["rows"]:
            problem = "has no judgments for validation (qrels), by which the sweep chooses among its learning rates"
            advice = "divide those for test (`half`, as in yamls/data/own_retrieval.yaml), or give one rate"
            raise UserError(f"{path}: {problem}: {advice}")


def build_task(model: EncoderConfig, task: TaskConfig, cache: str) -> FinetuneTask:
    """Return the task for a model's tokenizer; a UserError if the model or the data is missing."""
    text_tokenizer = _load_text_tokenizer(*_source(model), file_stamps(model.path))
    return FAMILIES[task.kind](task, text_tokenizer, cache)


def run_trial(config: FinetuneConfig) -> TrialResult:
    """Train and score a model with `train_and_score`, and return the result, with its predictions but not its rankings.

    Those of MS MARCO would take ten megabytes for each trial.
    """
    result, _, _, files = train_and_score(config)
    return replace(result, predictions={file: make() for file, make in files.items() if file.endswith(".parquet")})


def train_and_score(
    config: FinetuneConfig,
) -> tuple[TrialResult, TrainedModel, FinetuneTask, dict[str, Callable[[], bytes]]]:
    """Train and score a model, in this process or on all ranks. Only the `logging` destinations write files.

    The model, its task, and the contents of prediction files by name are also returned. Raises a UserError if model or
    data can't be used, or the loss is NaN or Inf.
    """
    # Imported here because these take seconds to import and naming a trial doesn't need them.
    from composer.utils import dist

    from biphasic.export.finetuned import require_exportable
    from biphasic.finetuning.trainer import train
    from biphasic.model.encoder import load_encoder

    require_precision(config.precision)
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    times = [time.monotonic()]
    with progress_bars(config.logging.progress_bar):
        task = build_task(config.model, config.task, config.cache)
        for warning in task.check_data():
            print_once(f"WARNING: {config.task.name}: {warning}")
        name = trial_name(config)
        encoder = load_encoder(config.model.path, config.model.trust_remote_code, config.model.revision)
        require_unchanged(config, name)
        encoder.text_tokenizer = task.scored_tokenizer
        if config.save_model:
            require_exportable(encoder)
        head = task.build_head(encoder.width)
        deviation: float = getattr(encoder.backbone.config, "initializer_range", 0.02)  # pyright: ignore
        initialize_head(head, deviation, derive_seed("head", config.seed))
        times.append(time.monotonic())
        summary = train(config, encoder, head, task)
        times.append(time.monotonic())
        weights = [*encoder.backbone.parameters(), *head.parameters()]
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            problem = "a weight is not a finite number after the last batch"
            raise UserError(f"training: {problem}: a smaller optimizer.lr may help")
        model = TrainedModel(encoder, head, config.microbatch_tokens, config.precision == "amp_bf16")
        results, files = task.evaluate(model)
        times.append(time.monotonic())
    steps = zip(("load", "train", "score"), pairwise(times), strict=True)
    seconds = {name: end - start for name, (start, end) in steps}
    about = {
        **summary,
        "parameters": sum(weight.numel() for weight in weights),
        "ranks": dist.get_world_size(),
        "cut": {name: asdict(cut) for name, cut in task.cut.items() if cut.describe()},
        "config": dump(config),
        **provenance(),
    }
    result = TrialResult(tuple(results), {**seconds, "total": times[-1] - times[0]}, about)
    return result, model, task, files


def check_trial(config: FinetuneConfig) -> list[str]:
    """Return warnings about model, data and settings; a UserError if they don't fit, as far as it shows without weights."""
    task, model = build_task(config.model, config.task, config.cache), load_hf_config(*_source(config.model))
    if not config.model.trust_remote_code:  # own code may give the embedding more rows
        require_embeddings(config.model.path, task.text_tokenizer.tokenizer, getattr(model, "vocab_size", 1 << 30))
    with torch.device("meta"):
        task.build_head(getattr(model, "hidden_size", 1 << 20))
    for folder, table in task.tables():
        folder.row_count(table)
    if config.task.kind not in ("question_answering", "tokens"):  # windows are examples too
        warmup_batches(config, count_steps(config, task.data.row_count("train")))
    return task.check_data()


def _source(model: EncoderConfig) -> tuple[str, str | None, bool]:
    return model.path, model.revision, model.trust_remote_code


@functools.lru_cache(maxsize=64)
def _load_text_tokenizer(path: str, revision: str | None, trust: bool, stamps: tuple[Any, ...]) -> TextTokenizer:
    """Load a tokenizer. It is cached until the model's files change, because a large vocabulary takes a second to read."""
    return load_text_tokenizer(path, revision, trust)
