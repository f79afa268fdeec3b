"""Calling a backbone on packed segments, and getting padded batches in and out of that form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biphasic.model.attention import prepare
from biphasic.model.segments import Segments


def encode(backbone: nn.Module, tokens: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Hidden states of a flat run of tokens.

    Args:
        backbone: a Hugging Face base model whose attention is `biphasic` (see `biphasic.model.backbone`).
        tokens: int64 [tokens].
        segments: how they are cut; no token attends across a cut, positions restart at each.
        causal: whether a token sees only what is before it.

    Returns:
        [tokens, width], after the final norm.
    """
    # With autocast, what flows from layer to layer is in the compute type, as it is where weights are gathered in it (FSDP).
    embedded = backbone.get_input_embeddings()(tokens[None])  # pyright: ignore[reportCallIssue]
    device = embedded.device.type
    if torch.is_autocast_enabled(device):
        embedded = embedded.to(torch.get_autocast_dtype(device))
    prepare(segments, backbone.config, device, embedded.dtype, causal)
    output = backbone(
        inputs_embeds=embedded,
        position_ids=segments.position_ids[None],
        use_cache=False,
        segments=segments,
        is_causal=causal,
    )
    return output.last_hidden_state[0]


def mean_pool(hidden: Tensor, segments: Segments) -> Tensor:
    """The mean of each segment's hidden states, in fp32: [tokens, width] to [segments, width]."""
    counts = segments.cu_seqlens.diff()
    owner = torch.repeat_interleave(counts.long(), output_size=hidden.shape[0])
    sums = hidden.new_zeros((len(segments.lengths), hidden.shape[1]), dtype=torch.float32)
    return sums.index_add(0, owner, hidden.float()) / counts[:, None]


def encode_padded(backbone: nn.Module, tokens: Tensor, attention_mask: Tensor | None, causal: bool = False) -> Tensor:
    """Hidden states of a padded batch; the padding is taken out before the backbone and comes back as zeros.

    Args:
        backbone: as for `encode`.
        tokens: int64 [batch, length].
        attention_mask: [batch, length], non-zero where there is a token; None when there is no padding.
        causal: whether a token sees only what is before it.

    Returns:
        [batch, length, width]; zeros, too, for a text without a token.
    """
    kept = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    lengths = [count for count in kept.sum(1).tolist() if count]
    if not lengths:
        embedding = backbone.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
        return embedding.new_zeros((*tokens.shape, embedding.shape[1]))
    segments = Segments.of(lengths, tokens.device)
    hidden = encode(backbone, tokens[kept], segments, causal)
    return hidden.new_zeros((*tokens.shape, hidden.shape[1])).masked_scatter(kept[..., None], hidden)
