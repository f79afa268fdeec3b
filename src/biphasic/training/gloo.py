"""FSDP2 on CPUs: gradients are averaged there too."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives


def average_on_gloo() -> None:
    """Have FSDP2 divide sums where the backend can't average.

    PyTorch 2.7 asks for `ReduceOp.AVG`. Gloo's reduce-scatter adds up instead, without a word, so that gradients are too
    large by the number of ranks; its all-reduce, which HSDP needs, refuses. fp16's path, a sum and a division, is right on
    both. Does nothing for NCCL.
    """
    if torch.distributed.get_backend() == "gloo":
        collectives._get_gradient_divide_factors = _sum_then_divide  # pyright: ignore[reportAttributeAccessIssue]


def _sum_then_divide(scatter: Any, reduce: Any, *_: Any) -> tuple[float, float]:
    return 1.0, float(scatter.size() * (1 if reduce is None else reduce.size()))
