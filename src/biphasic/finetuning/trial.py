"""One fine-tuning: its name, its cost, and what comes out."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from biphasic.config.architecture import Architecture
from biphasic.config.errors import UserError
from biphasic.config.finetune import EncoderConfig, FinetuneConfig, TaskConfig
from biphasic.config.load import dump
from biphasic.finetuning.families import FAMILIES
from biphasic.finetuning.task import FORMAT, Task, Trained, drawn, steps_of
from biphasic.model.checkpoint import is_checkpoint
from biphasic.model.encoder import Reader, hf_config, load_encoder, load_reader
from biphasic.model.heads import initialize
from biphasic.model.mark import model_mark, stamp
from biphasic.sweep.records import GridTask, Result

_FREE = (
    "run_name",
    "output",
    "cache",
    "microbatch_tokens",
    "save_model",
    "logging",
    "model",
    "task.data",
    "task.scored_on",
)
"""Keys that don't decide the result, or paths, of which what lies there decides."""
_TASK: TypeAdapter[TaskConfig] = TypeAdapter(TaskConfig)
_VERSIONS = ("biphasic", "mosaicml", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Outcome:
    """What a trial found: results on each test set, seconds (`train`, `score`, `total`), and what it was."""

    results: tuple[Result, ...]
    seconds: dict[str, float]
    about: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What a trial takes, estimated without its weights: tokens, FLOPs, and bytes at the peak; None: not known."""

    parameters: int | None
    train_tokens: int
    scored_tokens: int
    flops: float | None
    bytes: int | None


def trial_name(config: FinetuneConfig) -> str:
    """A hash of everything that decides a trial's result: the model's files, the tables' files, and the settings.

    Raises:
        UserError: model or data aren't there.
    """
    settings = config.model_dump(mode="json")
    for key in _FREE:
        section, _, name = key.rpartition(".")
        (settings[section] if section else settings).pop(name, None)
    task = config.task
    places = [task.data, *getattr(task, "scored_on", {}).values()]
    stamps = tuple(map(stamp, [config.model.path, *places]))
    content = _content(config.model.model_dump_json(), task.model_dump_json(), config.cache, stamps)
    return hashlib.sha256(json.dumps([FORMAT, settings, content], sort_keys=True).encode()).hexdigest()[:24]


def results_of(config: FinetuneConfig) -> GridTask:
    """A task and the test sets that its trials are scored on, from the configuration alone."""
    task = config.task
    family = FAMILIES[task.kind]
    if task.kind == "retrieval":
        found = [(name, name) for name in task.scored_on]
    else:
        found = [(task.name, name) for name in task.scored]
    metric = task.metric if task.kind == "classification" else family.metric
    return GridTask(task.name, task.kind, tuple((of, name, metric) for of, name in found))


def task_of(model: EncoderConfig, task: TaskConfig, cache: str) -> tuple[Task, Reader]:
    """The task, for the way in which the model reads.

    Raises:
        UserError: model or data aren't there.
    """
    reader = _reader(model)
    return FAMILIES[task.kind](task, reader, cache), reader


def run_trial(config: FinetuneConfig) -> Outcome:
    """Train and score, in this process or with all ranks; writes nothing but what `logging` asks for.

    Raises:
        UserError: model or data can't be used, or the loss is not a finite number.
    """
    return train_and_score(config)[0]


def train_and_score(config: FinetuneConfig) -> tuple[Outcome, Trained, Task]:
    """As `run_trial`, and the model."""
    # Here: these take seconds to import, and who only asks for a trial's name needs none of them.
    from composer.utils import dist, get_device

    from biphasic.export.finetuned import require_exportable
    from biphasic.finetuning.trainer import fit
    from biphasic.training.compute import require_precision

    require_precision(config.precision)
    dist.initialize_dist(get_device(None))
    begin = time.monotonic()
    task, _ = task_of(config.model, config.task, config.cache)
    encoder = load_encoder(config.model.path, config.model.trust_remote_code, config.model.revision)
    if config.save_model:
        require_exportable(encoder)
    head = task.head(encoder.width)
    deviation: float = getattr(encoder.backbone.config, "initializer_range", 0.02)  # pyright: ignore
    initialize(head, deviation, drawn("head", config.seed))
    ready = time.monotonic()
    fitted = fit(config, encoder, head, task)
    trained = time.monotonic()
    weights = [*encoder.backbone.parameters(), *head.parameters()]
    if not all(bool(torch.isfinite(one).all()) for one in weights):
        raise UserError(
            "training: a weight is not a finite number after the last batch: a smaller optimizer.lr may help"
        )
    model = Trained(encoder, head, config.microbatch_tokens, config.precision == "amp_bf16")
    scores = task.scores(model)
    end = time.monotonic()
    names = {name: of for of, name, _ in results_of(config).results}
    outcome = Outcome(
        results=tuple(Result(task=names[score.name], family=task.family, **asdict(score)) for score in scores),
        seconds={"load": ready - begin, "train": trained - ready, "score": end - trained, "total": end - begin},
        about={
            "steps": fitted.steps,
            "tokens": fitted.tokens,
            "loss": fitted.loss,
            "parameters": sum(one.numel() for one in weights),
            "ranks": dist.get_world_size(),
            "config": dump(config),
            "host": socket.gethostname(),
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
            "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
        },
    )
    return outcome, model, task


def cost_of(config: FinetuneConfig) -> Cost:
    """What a trial takes. Tokens are counted where the data is tokenized already, else guessed at four characters each.

    Raises:
        UserError: model or data aren't there.
    """
    task, reader = task_of(config.model, config.task, config.cache)
    rows, characters = task.data.rows("train"), task.data.characters("train")
    tokens_each = min(characters / 4 / rows + len(reader.prefix) + len(reader.suffix), task.longest)
    examples = rows if rows >= config.batch_size else config.batch_size
    train = round(steps_of(config, examples) * config.batch_size * tokens_each)
    scored = round(sum(folder.characters(table) / 4 for folder, table in task.tables() if table != "train"))
    size = _architecture(config)
    if size is None:
        return Cost(None, train, scored, None, None)
    body = size.parameters - size.head_parameters
    matrices = size.body_parameters
    batch = min(config.microbatch_tokens, round(config.batch_size * tokens_each))
    width = 2 if config.precision == "amp_bf16" else 4
    memory = 16 * body + size.activation_bytes(batch, width) + (2 << 30)
    return Cost(body, train, scored, float(matrices) * (6 * train + 2 * scored), memory)


def _architecture(config: FinetuneConfig) -> Architecture | None:
    path, model = config.model.path, config.model
    if is_checkpoint(path):
        from biphasic.model.backbone import hf_config_of
        from biphasic.model.checkpoint import read_checkpoint

        found = hf_config_of(read_checkpoint(path).backbone)
    else:
        found = hf_config(path, model.revision, model.trust_remote_code)
    try:
        heads = found.num_attention_heads
        return Architecture(
            vocab_size=found.vocab_size,
            hidden=found.hidden_size,
            ffn=found.intermediate_size,
            layers=found.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(found, "num_key_value_heads", None) or heads,
            head_dim=getattr(found, "head_dim", None) or found.hidden_size // heads,
            tied=False,
        )
    except AttributeError:
        return None


@functools.lru_cache(maxsize=256)
def _content(encoder: str, task: str, cache: str, stamps: tuple[Any, ...]) -> list[Any]:
    """Hashes of what a trial reads. A sweep asks for thousands of trials that read the same."""
    model = EncoderConfig.model_validate_json(encoder)
    config: TaskConfig = _TASK.validate_json(task)
    found, reader = task_of(model, config, cache)
    return [
        model_mark(model.path, model.revision),
        [reader.tokenizer.sha256, reader.prefix, reader.suffix, reader.longest],
        [[table, folder.mark(table)] for folder, table in found.tables()],
        list(getattr(config, "scored_on", {})),
    ]


def _reader(model: EncoderConfig) -> Reader:
    found = _reader_or_fault(model.path, model.revision, model.trust_remote_code, stamp(model.path))
    if isinstance(found, UserError):
        raise UserError(str(found))
    return found


@functools.lru_cache(maxsize=64)
def _reader_or_fault(path: str, revision: str | None, trust_remote_code: bool, stamp: Any) -> Reader | UserError:
    """Remembered while the model's files stay as they are: reading a large vocabulary takes a second, and asking a hub
    that can't be reached a minute."""
    try:
        return load_reader(path, revision, trust_remote_code)
    except UserError as error:
        return error
