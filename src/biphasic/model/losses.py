"""Cross-entropy from hidden states, without ever holding the logits of more than a bounded chunk of tokens.

The gradients are computed chunk by chunk in the forward pass, while the chunk's logits exist, and only scaled in the
backward pass: three matrix products in all, as many as with full logits. The idea is that of fused linear
cross-entropy kernels (liger-kernel, cut-cross-entropy); this is plain PyTorch and runs everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The target of a position that is not predicted."""
CHUNK_BYTES = 128 * 2**20
"""Size in fp32 of the logits that exist at one time."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, dtype: torch.dtype
    ) -> Tensor:
        with_gradients = any(ctx.needs_input_grad[:2])
        chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        cast = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros_like(weight) if with_gradients else None
        for start in range(0, hidden.shape[0], chunk):
            part, wanted = hidden[start : start + chunk].to(dtype), targets[start : start + chunk, None]
            logits = (part @ cast.T).float()
            if softcap is not None:
                logits = softcap * torch.tanh_(logits / softcap)
            normaliser = logits.logsumexp(1, keepdim=True)
            total += (normaliser - logits.gather(1, wanted)).sum()
            if grad_hidden is None or grad_weight is None:
                continue
            slope = 1 - (logits / softcap).square() if softcap is not None else None
            grad = logits.sub_(normaliser).exp_()
            grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0))
            if slope is not None:
                grad *= slope
            grad = grad.to(dtype)
            grad_hidden[start : start + chunk] = grad @ cast
            if dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.T, part)
            else:
                grad_weight += grad.T @ part
        ctx.gradients = grad_hidden, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Scaled in place: the weight's gradient is as large as the head, and a second one would double the peak.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, (None, None)
        if grad_hidden is None or grad_weight is None:
            raise RuntimeError("the loss can be differentiated once; its gradients were given away")
        return grad_hidden.mul_(grad_total), grad_weight.mul_(grad_total), None, None, None


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> Tensor:
    """The sum of cross-entropies, in nats, over the positions that have a target.

    Args:
        hidden: [tokens, width], the backbone's outputs.
        weight: [vocabulary, width], the head.
        targets: int64 [tokens]; `IGNORE` where nothing is predicted.
        softcap: logits are squashed to ±softcap by tanh (Gemma 2).

    Returns:
        fp32 scalar; 0 with zero gradients when nothing is predicted.
    """
    predicted = targets != IGNORE
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        total = _ChunkedCrossEntropy.apply(hidden[predicted], weight, targets[predicted], softcap, dtype)
    assert isinstance(total, Tensor)
    return total


def full_logits_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same with all logits at once: what `cross_entropy_sum` is compared with, in results and in memory."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=IGNORE, reduction="sum")
