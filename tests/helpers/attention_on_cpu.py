"""The reference for attention, and CPU kernels for PyTorch's GPU attention.

`varlen_attn` gets CPU kernels. FlexAttention refuses gradients on CPUs, where it has no compiled kernel for them; its
uncompiled form, which these tests run, has them.
"""

from typing import Any

import torch
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen
from torch import Tensor

from biphasic.model import attention
from biphasic.model.attention import AttentionOptions, masked_attention
from biphasic.model.segments import Segments, visibility_mask


def _reference(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    """All tokens at once, under a mask of all tokens by all tokens."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    same_segment = segments.segment_index[:, None] == segments.segment_index[None, :]
    mask = same_segment & visibility_mask(query.shape[2], options.causal, options.window, query.device)
    return masked_attention(query, key, value, mask, options).transpose(1, 2)


attention.BACKEND_FUNCTIONS["mask"] = _reference
torch.nn.attention.flex_attention._validate_device = lambda query, key, value: None


def _weights(query: Tensor, key: Tensor, cu_seqlens: Tensor, scale: float | None, window_size: Any) -> Tensor:
    """Attention weights of [tokens, heads, head_dim] each: [heads, tokens, tokens]."""
    left, right = window_size
    segments = Segments.of(cu_seqlens.diff().tolist(), cu_seqlens.device)
    same_segment = segments.segment_index[:, None] == segments.segment_index[None, :]
    mask = same_segment & visibility_mask(query.shape[0], right == 0, left + 1, query.device)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)


def _for_each_head(query: Tensor, *others: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in others]


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None, *unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert cu_seq_k is not None and max_q == max_k >= int(cu_seq_q.diff().max())
    assert is_causal == (window_size == [-1, 0])
    keys, values = _for_each_head(query, key, value)
    out = torch.einsum("hqk,khd->qhd", _weights(query, keys, cu_seq_q, scale, window_size), values).contiguous()
    return out, out.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


# Autograd is off inside an operator, so the gradients are written out.
@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
    max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None = None,
    window_size: list[int] | None = None, *unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys, values = _for_each_head(query, key, value)
    weights = _weights(query, keys, cu_seq_q, scale, window_size)
    grad_weights = torch.einsum("qhd,khd->hqk", grad, values)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    by_head = torch.einsum("hqk,qhd->khd", grad_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    grad_key, grad_value = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in by_head)
    return torch.einsum("hqk,khd->qhd", grad_scores, keys).contiguous(), grad_key, grad_value
