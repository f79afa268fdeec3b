"""Tokenized examples of a downstream task, and the microbatches that are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphasic.downstream.array_cache import Arrays, Ragged

TaskBatch = dict[str, Any]
"""A microbatch: concatenated `tokens`, the texts' `lengths` on the host, and other inputs of the task's loss."""


@dataclass(frozen=True)
class TokenizedExamples:
    """Examples by index: `texts` holds token ids, and `arrays` holds other data that the task family needs."""

    texts: Ragged
    arrays: Arrays

    def __len__(self) -> int:
        return len(self.texts)


def concatenate(texts: Ragged, indices: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the chosen texts concatenated, int64 [tokens], and the length of each text."""
    chosen = [texts[index] for index in indices]
    return torch.from_numpy(np.concatenate(chosen).astype(np.int64)), [len(text) for text in chosen]
