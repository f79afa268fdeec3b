"""What a trained model says of many texts, shared out among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor
from tqdm import tqdm

from biphasic.data.array_cache import Ragged
from biphasic.finetuning.task import Examples, SplitTask, Trained, flat
from biphasic.model.encoder import passes
from biphasic.model.packed import mean_pool
from biphasic.model.segments import Segments


def outputs(task: SplitTask, examples: Examples, model: Trained, title: str) -> list[Any]:
    """What the model says of all examples, in their order, on every rank."""
    mine: list[tuple[int, Any]] = []
    for rows, hidden, segments in _passes(model, examples.texts, title):
        mine += zip(rows, task.say(hidden, segments, model.head, examples, rows), strict=True)
    found: list[Any] = [None] * len(examples)
    for part in dist.all_gather_object(mine):
        for row, one in part:
            found[row] = one
    return found


def embed(model: Trained, texts: Ragged, title: str) -> Tensor:
    """Mean-pooled embeddings of all texts, fp32 [texts, width] on the model's device, on every rank."""
    embeddings = torch.zeros((len(texts), model.encoder.width), device=model.device)
    for rows, hidden, segments in _passes(model, texts, title):
        embeddings[rows] = mean_pool(hidden, segments)
    dist.all_reduce(embeddings, reduce_operation="SUM")
    return embeddings


def _passes(model: Trained, texts: Ragged, title: str) -> Iterator[tuple[list[int], Tensor, Segments]]:
    """This rank's forward passes: which texts, their hidden states, and how these are cut."""
    bar = tqdm(total=len(texts), desc=title, unit="text", delay=10, leave=False, disable=dist.get_global_rank() > 0)
    with model.scoring(), bar:
        for number, rows in enumerate(passes(texts.lengths.tolist(), model.tokens_at_once)):
            if number % dist.get_world_size() == dist.get_global_rank():
                tokens, lengths = flat(texts, rows)
                segments = Segments.of(lengths, model.device)
                yield rows, model.encoder.hidden(tokens.to(model.device, non_blocking=True), segments), segments
            bar.update(len(rows))
