"""Compute cross-entropy from hidden states, with the logits of one chunk of tokens in memory at a time.

Gradients are computed in the forward pass, while a chunk's logits are in memory, and only scaled in the backward pass: three
matrix products, as many as with full logits. The idea is from fused kernels (cut-cross-entropy), here in plain PyTorch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.version import hip

IGNORE = -100
"""Target of positions that are not predicted."""
CHUNK_BYTES = 128 * 2**20
"""Largest size of a chunk's logits in bytes on a CPU."""
_CACHED_BYTES = 8 * 2**20
"""Logits up to this size fit in a CPU's cache. With a large head, chunks are larger, because each one reads the head
from memory."""
_ADDS_TO_FP32 = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether this PyTorch (2.8 or later) adds a product in bf16 to an fp32 sum."""
GPU_SHARE = 1 / 64
"""Share of a GPU's memory for a chunk's logits. Small chunks are slow, because each one adds to the head's full gradient."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        differentiable: bool,
        loss_and_gradient: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        # Not `needs_input_grad` alone: it is true for parameters even under no_grad, as in validation.
        with_gradients = differentiable and any(ctx.needs_input_grad[:3])
        cast, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        chunk = _chunk_tokens(cast)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        # In fp32 even if the weights are gathered in bf16, because the gradient is a sum over chunks.
        exact = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=exact) if with_gradients else None
        grad_bias = None if bias is None or grad_weight is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            part, part_targets = hidden[start : start + chunk].to(dtype), targets[start : start + chunk, None]
            logits = part @ cast.T if cast_bias is None else torch.addmm(cast_bias, part, cast.T)
            if grad_hidden is None or grad_weight is None:
                total -= _softcapped(logits, softcap).log_softmax(1).gather(1, part_targets).sum()
                continue
            loss, grad = loss_and_gradient(logits, part_targets, softcap)
            del logits
            total += loss
            grad_hidden[start : start + chunk] = grad @ cast
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.T, part)
            elif grad.is_cuda and hip is None and _ADDS_TO_FP32:
                # cuBLAS adds to the fp32 sum, which saves rounding each chunk to bf16 and another pass over the gradient.
                torch.addmm(grad_weight, grad.T, part, out_dtype=grad_weight.dtype, out=grad_weight)
            else:
                grad_weight += grad.T @ part
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In place, because the weight's gradient is as large as the head, and a copy would double the peak memory.
        (grad_hidden, grad_weight, grad_bias), ctx.gradients = ctx.gradients, (None, None, None)
        if grad_hidden is None or grad_weight is None:
            raise RuntimeError("the loss can be differentiated only once")
        scaled = grad_weight.mul_(grad_total).to(ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(grad_total).to(ctx.weight_dtype)
        return grad_hidden.mul_(grad_total), scaled, grad_bias, None, None, None, None, None


def _chunk_tokens(weight: Tensor) -> int:
    if not weight.is_cuda:
        size = min(CHUNK_BYTES, max(_CACHED_BYTES, 4 * weight.nbytes))
        return max(1, size // (4 * weight.shape[0]))
    budget = int(torch.cuda.get_device_properties(weight.device).total_memory * GPU_SHARE)
    tokens = budget // (weight.element_size() * weight.shape[0])
    return max(128, tokens // 128 * 128)


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return a chunk's logits in fp32, softcapped in place if they are fp32 already."""
    logits = logits.float()
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _loss_and_gradient(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return a chunk's summed loss and the gradient of its logits, with twice the logits' memory in fp32."""
    # log_softmax processes a row while it is in the cache; logsumexp reads and writes all logits several times.
    capped = _softcapped(logits, softcap)
    log_probabilities = capped.log_softmax(1)
    loss = -log_probabilities.gather(1, targets).sum()
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, -1.0))
    if softcap is not None:
        gradient.mul_(1 - (capped / softcap).square())
    return loss, gradient.to(logits.dtype)


def _loss_and_gradient_to_compile(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compute `_loss_and_gradient` without scatter and, once compiled, without temporaries."""
    # Not in place: torch 2.11's compiler lets `gather` read logits that are overwritten already (its loss is 2% off).
    capped = logits.float() if softcap is None else (logits.float() / softcap).tanh() * softcap
    normalizer = capped.logsumexp(1, keepdim=True)
    loss = (normalizer - capped.gather(1, targets)).sum()
    is_target = torch.arange(logits.shape[1], device=logits.device)[None] == targets
    gradient = (capped - normalizer).exp() - is_target.float()
    if softcap is not None:
        gradient = gradient * (1 - (capped / softcap).square())
    return loss, gradient.to(logits.dtype)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_gradient_to_compile, dynamic=False)


def _compiled_loss_and_gradient(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    # The last chunk's size differs between batches.
    for tensor in (logits, targets):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(logits, targets, softcap)


def cross_entropy_at_targets(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    compiled: bool = False,
    bias: Tensor | None = None,
    transform: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sum the cross-entropy, in nats, over the positions that have a target.

    Args:
        hidden: the backbone's hidden states, [..., width].
        weight: the head's weight, [vocabulary, width].
        targets: int64 [...]; -100 where nothing is predicted.
        softcap: bound of the absolute logits, applied by tanh (Gemma 2).
        compiled: whether the operations between the matrix products are compiled.
        bias: the head's bias, [vocabulary].
        transform: layers between the backbone and the head, applied to the hidden states that have a target (ModernBERT).

    Returns:
        fp32 scalar. Without targets, it is 0 and has zero gradients.
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    # The host waits only for the size of `nonzero`; indexing by a mask would make it wait each time.
    predicted = (targets != IGNORE).nonzero().squeeze(1)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden, targets = hidden.index_select(0, predicted), targets.index_select(0, predicted)
    if transform is not None:
        hidden = transform(hidden)
    with torch.autocast(device, enabled=False):
        compute = _compiled_loss_and_gradient if compiled else _loss_and_gradient
        if torch.compiler.is_compiling():  # by the caller
            compute = _loss_and_gradient_to_compile
        differentiable = torch.is_grad_enabled()
        total = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, softcap, dtype, differentiable, compute)
    assert isinstance(total, Tensor)
    return total
