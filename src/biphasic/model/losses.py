"""Cross-entropy from hidden states, without ever holding the logits of more than a bounded chunk of tokens.

The gradients are computed chunk by chunk in the forward pass, while the chunk's logits exist, and only scaled in the
backward pass: three matrix products in all, as many as with full logits. The idea is that of fused linear
cross-entropy kernels (cut-cross-entropy); this is plain PyTorch and runs everywhere. What lies between the products can be
compiled, so that it reads the logits twice or three times and writes them once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The target of a position that is not predicted."""
CHUNK_BYTES = 128 * 2**20
"""Size of the logits that exist at one time, on a CPU. A larger chunk is not faster there."""
_GPU_SHARE = 1 / 64
"""Of a GPU's memory that a chunk's logits take. A small chunk costs time: each adds to the head's whole gradient."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        loss_and_gradient: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        with_gradients = any(ctx.needs_input_grad[:2])
        cast = weight.to(dtype)
        chunk = _chunk_tokens(cast)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        # In fp32 also where the weights are gathered in bf16: it is a sum over chunks.
        exact = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=exact) if with_gradients else None
        for start in range(0, hidden.shape[0], chunk):
            part, wanted = hidden[start : start + chunk].to(dtype), targets[start : start + chunk, None]
            logits = part @ cast.T
            if grad_hidden is None or grad_weight is None:
                total += _loss(logits, wanted, softcap)
                continue
            loss, grad = loss_and_gradient(logits, wanted, softcap)
            del logits
            total += loss
            grad_hidden[start : start + chunk] = grad @ cast
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.T, part)
            else:
                grad_weight += grad.T @ part
        ctx.gradients = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Scaled in place: the weight's gradient is as large as the head, and a second one would double the peak.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, (None, None)
        if grad_hidden is None or grad_weight is None:
            raise RuntimeError("the loss can be differentiated once; its gradients were given away")
        scaled = grad_weight.mul_(grad_total).to(ctx.weight_dtype)
        return grad_hidden.mul_(grad_total), scaled, None, None, None, None


def _chunk_tokens(weight: Tensor) -> int:
    """Tokens whose logits exist at one time."""
    if not weight.is_cuda:
        return max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    budget = int(torch.cuda.get_device_properties(weight.device).total_memory * _GPU_SHARE)
    fit = budget // (weight.element_size() * weight.shape[0])
    return max(128, fit // 128 * 128)


def _loss(logits: Tensor, wanted: Tensor, softcap: float | None) -> Tensor:
    logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits.logsumexp(1, keepdim=True) - logits.gather(1, wanted)).sum()


def _loss_and_gradient_in_place(logits: Tensor, wanted: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """A chunk's summed loss and its gradient at each logit, in no more memory than the logits take (in fp32)."""
    dtype, logits = logits.dtype, logits.float()
    if softcap is not None:
        logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
    normaliser = logits.logsumexp(1, keepdim=True)
    loss = (normaliser - logits.gather(1, wanted)).sum()
    bend = 1 - (logits / softcap).square() if softcap is not None else None
    grad = logits.sub_(normaliser).exp_()
    grad.scatter_add_(1, wanted, grad.new_full(wanted.shape, -1.0))
    if bend is not None:
        grad *= bend
    return loss, grad.to(dtype)


def _loss_and_gradient(logits: Tensor, wanted: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The same for torch.compile, which makes two passes over the logits of it and none of the tensors in between."""
    bent = logits.float()
    if softcap is not None:
        bent = softcap * torch.tanh(bent / softcap)
    normaliser = bent.logsumexp(1, keepdim=True)
    loss = (normaliser - bent.gather(1, wanted)).sum()
    here = torch.arange(logits.shape[1], device=logits.device)[None] == wanted
    grad = (bent - normaliser).exp() - here.float()
    if softcap is not None:
        grad = grad * (1 - (bent / softcap).square())
    return loss, grad.to(logits.dtype)


@functools.cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_gradient, dynamic=False)


def _loss_and_gradient_compiled(logits: Tensor, wanted: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    # A batch's last chunk has another size each time.
    for x in (logits, wanted):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return _compiled_loss_and_gradient()(logits, wanted, softcap)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, compiled: bool = False
) -> Tensor:
    """The sum of cross-entropies, in nats, over the positions that have a target.

    Args:
        hidden: [tokens, width], the backbone's outputs.
        weight: [vocabulary, width], the head.
        targets: int64 [tokens]; `IGNORE` where nothing is predicted.
        softcap: logits are squashed to ±softcap by tanh (Gemma 2).
        compiled: whether what lies between the matrix products is compiled.

    Returns:
        fp32 scalar; 0 with zero gradients when nothing is predicted.
    """
    predicted = targets != IGNORE
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden, targets = hidden[predicted], targets[predicted]
    with torch.autocast(device, enabled=False):
        compute = _loss_and_gradient_compiled if compiled else _loss_and_gradient_in_place
        total = _ChunkedCrossEntropy.apply(hidden, weight, targets, softcap, dtype, compute)
    assert isinstance(total, Tensor)
    return total


def full_logits_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same with all logits at once: what `cross_entropy_sum` is compared with, in results and in memory."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, ignore_index=IGNORE, reduction="sum")
