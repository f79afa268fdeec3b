"""Calling a backbone on packed segments, and pooling what comes out."""

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
