"""Load a fine-tuned model with its task, and run it on new text by the training's own code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from biphasic.config.finetune import FinetuneConfig, TaskConfig
from biphasic.config.tasks import DatasetConfig
from biphasic.devices import rank_device, supports_bf16
from biphasic.downstream.labels import id_text
from biphasic.downstream.tables import Table, open_table
from biphasic.errors import UserError
from biphasic.export.write import HEAD_FILE
from biphasic.finetuning.task import Columns, FinetuneTask, PredictionTask, TrainedModel
from biphasic.finetuning.trial import FAMILIES
from biphasic.finetuning.truncation import CutTexts
from biphasic.model.encoder import load_encoder
from biphasic.storage import user_errors

TASK_FILE = "finetuned.json"
"""File in a fine-tuned model's folder with what predictions need besides weights and tokenizer."""
_ROWS_AT_ONCE = 100_000
"""Rows in memory at once. Among them, texts of similar length share forward passes."""


def describe_task(config: FinetuneConfig, task: FinetuneTask) -> dict[str, Any]:
    """Return the content of `TASK_FILE`."""
    return {
        "task": config.task.model_dump(mode="json"),
        "max_length": task.scored_length,
        "label_names": task.label_names,
        "threshold": task.threshold,
        "precision": config.precision,
        "microbatch_tokens": config.microbatch_tokens,
    }


def read_task(folder: str) -> dict[str, Any]:
    """Return the content of a folder's `TASK_FILE`; a UserError if it can't be read or is of retrieval."""
    file = Path(folder) / TASK_FILE
    with user_errors(f"{file}: can't be read, so {folder} is no fine-tuned model", ValueError, LookupError, TypeError):
        record = json.loads(file.read_text(encoding="utf-8"))
        kind = record["task"]["kind"]
    if kind == "retrieval":
        advice = f'SentenceTransformer("{folder}").encode(texts) embeds with it'
        raise UserError(f"{folder}: is a model for retrieval, which has no predictions: {advice}")
    return record


def predict_file(folder: str, file: str, trust_remote_code: bool) -> Iterator[Columns]:
    """Yield a fine-tuned model's predictions for groups of a file's rows, as `predict`, and print what is cut.

    Formats and errors are those of `open_table`, `load_finetuned` and `predict`.
    """
    record = read_task(folder)
    kind = record["task"]["kind"]
    pair = ["text_pair"] * ("{text_pair}" in record["task"].get("text", ""))
    table = open_table(DatasetConfig(files={"texts": [file]}), "texts", [*FAMILIES[kind].inputs, *pair])
    print(f"{len(table):,} rows of {file} ({kind})", flush=True)
    model, task = load_finetuned(folder, record, trust_remote_code)
    for ids, columns in _portions(table):
        predictions, cut = predict(model, task, ids, columns)
        if description := cut.describe():
            print(description, flush=True)
        yield predictions


def _portions(table: Table) -> Iterator[tuple[list[str], Columns]]:
    """Yield the ids and columns of up to 100,000 rows at a time. Rows without `id` or `_id` are numbered from 0.

    Raises a UserError if a value is missing or of another type than the task reads.
    """
    for first in range(0, len(table), _ROWS_AT_ONCE):
        columns = table.rows[first : first + _ROWS_AT_ONCE]
        for name in table.columns:
            for row, value in enumerate(columns[name], first + 1):
                if value is None:
                    raise UserError(f"{table.source}: row {row} has no {name}")
                words = value if isinstance(value, list) and name == "tokens" else [value]
                if (name == "tokens") != isinstance(value, list) or not all(isinstance(word, str) for word in words):
                    expected = "a list of words" if name == "tokens" else "text"
                    raise UserError(f"{table.source}: row {row}: {name} is not {expected}: {value!r:.60}")
        numbers = range(first, first + len(columns[table.columns[0]]))
        ids = columns.get("id") or columns.get("_id") or numbers
        yield [id_text(id) or str(number) for number, id in zip(numbers, ids, strict=True)], columns


def load_finetuned(
    folder: str, record: dict[str, Any], trust_remote_code: bool = False
) -> tuple[TrainedModel, PredictionTask]:
    """Load a fine-tuned encoder and its head, on the GPU if there is one, and its task, which can't be retrieval.

    `trust_remote_code` allows the model to run its own Python files. Raises a UserError if the model can't be loaded.
    """
    encoder = load_encoder(folder, trust_remote_code)
    with user_errors(f"{folder}/{TASK_FILE}: can't be used", ValueError, LookupError, TypeError):
        settings = {**record["task"], "data": folder, "max_length": record["max_length"]}
        config: Any = TypeAdapter(TaskConfig).validate_python(settings)
        task: Any = FAMILIES[config.kind](config, encoder.text_tokenizer, "", {**record, "kind": config.family})
        task.threshold = record["threshold"]
    head = task.build_head(encoder.width)
    with user_errors(f"{folder}/{HEAD_FILE}: can't be read", RuntimeError, SafetensorError):
        head.load_state_dict(load_file(Path(folder) / HEAD_FILE))
    _require_same_head(folder, head.state_dict())
    for module in (encoder.backbone, head):
        rank_device().module_to_device(module)
    bf16 = record["precision"] == "amp_bf16" and supports_bf16()
    return TrainedModel(encoder, head, record["microbatch_tokens"], bf16), task


def _require_same_head(folder: str, head: dict[str, Tensor]) -> None:
    """Raise a UserError if the weights' own files hold another head: other software trained the model further, into them."""
    for file in sorted(Path(folder).glob("model*.safetensors")):
        with user_errors(f"{file}: can't be read", SafetensorError), safe_open(file, "pt") as weights:
            for name in head.keys() & weights.keys():
                stored = weights.get_tensor(name)
                if not torch.equal(stored, head[name].to(stored.dtype)):
                    problem = f"its {name} differs from {HEAD_FILE}'s: other software has trained or replaced the model"
                    raise UserError(f"{file}: {problem}; predict with that software, or fine-tune it here")


def predict(model: TrainedModel, task: PredictionTask, ids: list[str], columns: Columns) -> tuple[Columns, CutTexts]:
    """Return the predictions for new text and what of it was cut.

    The predictions are `id`, `predicted`, `score` and other columns of the family's `answers`. Raises a UserError if
    the text can't be used.
    """
    # `tokenize` expects the columns of correct answers; their values have no effect.
    unknown: Columns = {
        "text_pair": [None] * len(ids),
        "label": [0] * len(ids),
        "labels": [[0] * len(tokens) for tokens in columns.get("tokens", [[]] * len(ids))],
        "answers": [{"text": []}] * len(ids),
    }
    rows = {**unknown, **{name: columns[name] for name in {*task.inputs, "text_pair"} & columns.keys()}}
    examples = task.tokenize(rows, "")
    return {"id": ids, **task.run(model, rows, examples, "predictions")}, CutTexts.of(examples, task.max_length)
