"""Compute attention over packed segments, causal or bidirectional, for any Hugging Face decoder.

The decoder's layers call `attention`, which is registered with transformers as `ATTENTION_NAME`. No mask is built, because
the segments define which tokens attend to each other. All backends compute the same results, within rounding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.version import hip

from biphasic.model.kernels import GQA_OPTIONS, avoid_plans, head_dim, varlen_attn
from biphasic.model.segments import Segments, visibility_mask

ATTENTION_NAME = "biphasic"


class NotPackedError(ValueError):
    """Raised when the attention function is called without segments or with a mask."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments | None = None,
    is_causal: bool | None = None,
    attention_backend: str = "sdpa",
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each segment. The signature is that of transformers' AttentionInterface.

    Args:
        module: the attention layer; not used.
        query: [1, heads, tokens, head_dim]; key and value [1, kv_heads, tokens, head_dim].
        attention_mask: must be None; padding is removed before the backbone is called.
        scaling: factor that scores are multiplied by. Default: 1/sqrt(head_dim).
        dropout: probability of dropping an attention weight.
        segments, is_causal, attention_backend: from `attention_arguments`. Required.
        sliding_window: a token attends only to tokens closer than this (Mistral, Gemma 2, ModernBERT).
        softcap: bound of the absolute scores, applied by tanh (Gemma 2).

    Returns:
        [1, tokens, heads, head_dim], and None in place of attention weights.

    Raises:
        NotPackedError: the backbone was called without segments or with a mask.
        ValueError: the backend doesn't support one of the layer's options.
    """
    if segments is None or is_causal is None or attention_mask is not None:
        call = "call biphasic.model.forward.packed_forward, which passes them and no padding"
        raise NotPackedError(f"this backbone attends to packed segments: {call}")
    if unused.get("s_aux") is not None:
        raise ValueError("attention sinks are not supported")
    backend = attention_backend
    if (backend in ("varlen", "flex") and dropout) or (backend == "varlen" and softcap is not None):
        raise ValueError(f"attention {backend} has no {'dropout' if dropout else 'softcap'}: choose another, or auto")
    # Under autocast, rotary positions and norms may have left queries and keys in fp32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, dropout, is_causal, sliding_window or 0, softcap)
    return BACKEND_FUNCTIONS[backend](query, key, value, segments, options), None


def register() -> None:
    """Register `attention` with transformers. Registering twice changes nothing."""
    from transformers.modeling_utils import AttentionInterface

    # transformers builds no mask for a name without a registered mask function.
    AttentionInterface.register(ATTENTION_NAME, attention)


def attention_arguments(backbone: Any, segments: Segments, device: str, dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    """Return the keyword arguments of a backbone's forward that its layers pass on to `attention`.

    The backbone's `attention_backend`, if it has one, is the requested backend. `device` is the type of the tokens' device,
    and `dtype` that of queries, keys and values. FlexAttention's block masks are added to `segments`.
    """
    requested: str = getattr(backbone, "attention_backend", "auto")
    backend = choose_backend(backbone.config, requested, device, dtype, backbone.training)
    if device == "cuda":
        avoid_plans()
    if backend == "flex":
        segments.block_masks = {window: block_mask(segments, causal, window) for window in sliding_windows(backbone)}
    return {"segments": segments, "is_causal": causal, "attention_backend": backend}


def sliding_windows(backbone: Any) -> set[int]:
    """Return the sliding windows of a backbone's layers, with 0 for none. ModernBERT's is not its configuration's."""
    of_layers: set[Any] = {getattr(module, "sliding_window", None) for module in backbone.modules()} - {None}
    return {0, *(of_layers or {getattr(backbone.config, "sliding_window", None) or 0})}


def choose_backend(hf_config: Any, requested: str, device: str, dtype: torch.dtype, training: bool) -> str:
    """Return the requested backend, or with `auto` the first available one that supports the model's options.

    `device` and `dtype` are as in `attention_arguments`. The model's attention dropout applies only in `training`.
    """
    if requested != "auto":
        return requested
    if device != "cuda":
        return "sdpa"
    for backend in ("varlen", "flex"):
        if missing_option(hf_config, backend, dtype, training) is None and backend_available(backend):
            return backend
    return "sdpa"


def missing_option(hf_config: Any, backend: str, dtype: torch.dtype, training: bool) -> str | None:
    """Return what a model's attention needs and a backend's kernels for GPUs don't have; None if there is nothing."""
    softcap = getattr(hf_config, "attn_logit_softcapping", None) is not None
    names = ("attention_dropout", "attention_probs_dropout_prob")
    dropout = training and any(getattr(hf_config, name, 0.0) for name in names)
    size = head_dim(hf_config)
    if backend == "varlen":
        if dtype not in (torch.float16, torch.bfloat16):
            return "fp32 (set precision: amp_bf16)"
        if size > 256:
            return "heads larger than 256"
        if size % 8:
            return "heads whose size is not a multiple of 8"
        if softcap:
            return "softcapped scores"
    if backend in ("varlen", "flex") and dropout:
        return "dropout of attention weights"
    if backend == "flex" and size < 16:  # Triton's matrix products need at least this size
        return "heads smaller than 16"
    return None


def backend_available(backend: str) -> bool:
    """Return whether the backend runs on this machine, with the installed torch and GPU."""
    if backend == "sdpa":
        return True
    if not torch.cuda.is_available() or (backend == "varlen" and varlen_attn is None):
        return False
    # FlashAttention 2 and Triton, which compiles FlexAttention, support NVIDIA's GPUs since Ampere.
    return hip is not None or torch.cuda.get_device_capability()[0] >= 8


FLEX_BLOCK = 128
"""Number of queries and of keys in a block of FlexAttention's masks."""


class AttentionOptions(NamedTuple):
    """Options of a layer's attention, as in `attention`. A `window` of 0 is no limit."""

    scale: float
    dropout: float
    causal: bool
    window: int
    softcap: float | None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    # [tokens, heads, head_dim], contiguous, so that gradients are contiguous too.
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    left = options.window - 1  # number of tokens that a query attends to on this side; -1: all
    # cuDNN's causal kernels require the same tensor object for queries and keys.
    cu_seqlens, max_seqlen = segments.cu_seqlens, segments.max_seqlen
    output = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        scale=options.scale, window_size=(left, 0 if options.causal else left), **GQA_OPTIONS,
    )  # fmt: skip
    return output[None]


def block_mask(segments: Segments, causal: bool, window: int) -> BlockMask:
    """Build FlexAttention's block mask; with a `window`, tokens attend only to tokens closer than this.

    PyTorch's `create_block_mask` compares every pair of tokens. Segments are contiguous, so the first and last tokens of
    two blocks show whether the blocks share a segment: a mask for 32,768 tokens takes 256 x 256 comparisons.
    """
    segment, tokens = segments.segment_index, segments.segment_index.shape[0]
    first, last = segment[::FLEX_BLOCK], torch.cat([segment[FLEX_BLOCK - 1 : -1 : FLEX_BLOCK], segment[-1:]])
    blocks = torch.arange(len(first), device=segment.device)
    row, column = blocks[:, None], blocks[None, :]
    some = (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    single = first == last
    # In full blocks, every token attends to every token. An incomplete last block needs the mask function.
    full = some & single[:, None] & single[None, :]
    if tokens % FLEX_BLOCK:
        full[-1] = False
        full[:, -1] = False
    if causal:
        some &= row >= column
        full &= row > column
    if window:
        distance = (row - column).abs()
        some &= (distance - 1) * FLEX_BLOCK + 1 < window
        full &= (distance + 1) * FLEX_BLOCK - 1 < window

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = segment[query] == segment[key]
        if causal:
            visible = visible & (query >= key)
        if window:
            visible = visible & ((query - key).abs() < window)
        return visible

    return BlockMask.from_kv_blocks(*_ordered(some & ~full), *_ordered(full), FLEX_BLOCK, attends, (tokens, tokens))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks for each query block, and their indices followed by those of the other blocks."""
    count = blocks.sum(1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return count[None, None], indices[None, None]


@functools.cache  # so that it is compiled once
def _softcapped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled for any number of tokens."""
    # With static shapes, PyTorch would fall back to uncompiled FlexAttention after eight token counts, which keeps all
    # scores in memory.
    return torch.compile(flex_attention, dynamic=True)


def _flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    mask = segments.block_masks[options.window]
    # On GPUs the kernel is always compiled, because an uncompiled one would keep all scores in memory.
    call = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else compiled_flex_attention()
    score_mod = None if options.softcap is None else _softcapped(options.softcap)
    # For fewer than 128 tokens PyTorch would choose a decoding kernel, which refuses some grouped queries (its PR 185349).
    kernel: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    grouped = query.shape[1] != key.shape[1]
    output = call(query, key, value, score_mod, mask, options.scale, grouped, kernel_options=kernel)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


# Not compiled, because it would be recompiled for every batch: segment lengths differ.
@torch.compiler.disable
def _sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    length = segments.lengths[0]
    if all(other == length for other in segments.lengths):
        q, k, v = (x.unflatten(2, (-1, length))[0].transpose(0, 1) for x in (query, key, value))
        return _dense(q, k, v, options).transpose(1, 2).flatten(0, 1)[None]
    dense, heads = segments.dense_groups, query.shape[1]
    sizes = [count * longest for count, longest in dense.shapes]
    # By `F.embedding` and not by indexing, because the gradient of indexing is slow on CPUs.
    by_group = [F.embedding(dense.tokens, x[0].transpose(0, 1).flatten(1)).split(sizes) for x in (query, key, value)]
    outputs = []
    for shape, mask, *group in zip(dense.shapes, dense.masks, *by_group, strict=True):
        q, k, v = (x.unflatten(0, shape).unflatten(2, (heads, -1)).transpose(1, 2) for x in group)
        outputs.append(_dense(q, k, v, options, mask).transpose(1, 2).flatten(2).flatten(0, 1))
    return F.embedding(dense.outputs, torch.cat(outputs)).unflatten(1, (heads, -1))[None]


def _dense(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, is_token: Tensor | None = None) -> Tensor:
    """Compute attention of padded segments; all tensors are [segments, heads, length, head_dim].

    `is_token` is bool [segments, 1, 1, length], false at padding; None without padding.
    """
    length = query.shape[2]
    if options.softcap is None and not 0 < options.window < length:
        # Causal attention needs no mask for padding, which comes after the tokens.
        mask = None if options.causal else is_token
        return F.scaled_dot_product_attention(query, key, value, mask, options.dropout, options.causal, scale=options.scale)
    mask = visibility_mask(length, options.causal, options.window, query.device)
    if is_token is not None:
        # Padding attends to itself, because a token that attends to nothing has no defined output.
        mask = mask & is_token | torch.eye(length, dtype=torch.bool, device=query.device)
    return masked_attention(query, key, value, mask, options)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention of [batch, heads, length, head_dim]. `mask` is bool [(batch, 1,) queries, keys], true where seen."""
    if options.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, mask, options.dropout, scale=options.scale)
    scores = options.softcap * torch.tanh(query @ key.transpose(2, 3) * options.scale / options.softcap)
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(query.dtype)
    return F.dropout(weights, options.dropout) @ value


BACKEND_FUNCTIONS: dict[str, Callable[..., Any]] = {"varlen": _varlen, "flex": _flex, "sdpa": _sdpa}
"""`varlen`: PyTorch's variable-length kernels (cuDNN, FlashAttention 2; FlashAttention 3 or 4 where one is installed).
`flex`: FlexAttention. `sdpa`: dense attention of segments of similar length.

Each takes query, key and value as `attention` does, `Segments` and `AttentionOptions`, and returns [1, tokens, heads,
head_dim]."""
