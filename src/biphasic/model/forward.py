"""Compute hidden states of concatenated texts, packed or, for models without packed attention, in padded batches.

Imports torch only, so that benchmarks/gpu.py runs without other packages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from biphasic.model.attention import attention_arguments
from biphasic.model.kernels import avoid_plans
from biphasic.model.segments import Segments, padding_groups

_EXTRA_TOKENS = 256
"""Number of padding tokens in a batch that take hardly any time."""


def packed_forward(backbone: nn.Module, tokens: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Compute hidden states [tokens, width], after the final norm, without padding.

    Args:
        backbone: a Hugging Face base model whose attention is `biphasic`.
        tokens: int64 [tokens].
        segments: segments of the tokens. Tokens attend within a segment, and positions restart at each segment.
        causal: If True, use causal attention.
    """
    embedded = backbone.get_input_embeddings()(tokens[None])  # pyright: ignore[reportCallIssue]
    device, dtype = embedded.device.type, embedded.dtype
    if torch.is_autocast_enabled(device):
        # The sum over layers and the rotary tables stay fp32, also with FSDP, which gathers the embedding in bf16.
        embedded, dtype = embedded.float(), torch.get_autocast_dtype(device)
    arguments = attention_arguments(backbone, segments, device, dtype, causal)
    positions = segments.position_ids[None]
    output = backbone(inputs_embeds=embedded, position_ids=positions, use_cache=False, **arguments)
    return output.last_hidden_state[0]


def packed_encoder_forward(encoder: Any, tokens: Tensor, segments: Segments) -> Tensor:
    """Compute an encoder's hidden states [tokens, width] without padding.

    Args:
        encoder: a Hugging Face encoder (BERT, RoBERTa, ModernBERT) for which
            `biphasic.model.packing_probe.switch_to_packed_attention` returned true.
        tokens: int64 [tokens].
        segments: as in `packed_forward`.
    """
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else next(encoder.parameters()).dtype
    arguments = attention_arguments(encoder, segments, device, dtype, causal=False)
    positions = segments.position_ids[None] + reserved_positions(encoder)
    if hasattr(getattr(encoder, "embeddings", None), "token_type_embeddings"):
        arguments["token_type_ids"] = torch.zeros_like(positions)
    output = encoder(input_ids=tokens[None], position_ids=positions, **arguments)
    return output.last_hidden_state[0]


def reserved_positions(encoder: nn.Module) -> int:
    """Return the first position of a text: in RoBERTa's families, the one after the padding token's; in others 0."""
    embeddings = getattr(encoder, "embeddings", None)
    padding: int | None = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1


def padded_forward(model: nn.Module, tokens: Tensor, segments: Segments, pad_id: int) -> Tensor:
    """Compute hidden states [tokens, width] in padded batches. Texts of similar length share a batch.

    Args:
        model: a Hugging Face encoder whose attention takes no segments, such as DeBERTa.
        tokens: int64 [tokens].
        segments: one segment for each text.
        pad_id: id of the padding token; some families (RoBERTa) compute positions from it.
    """
    if tokens.is_cuda:
        avoid_plans()
    texts = tokens.split(list(segments.lengths))
    hidden: dict[int, Tensor] = {}
    for group in padding_groups(segments.lengths, exponent=1, extra=_EXTRA_TOKENS):
        inputs = pad_sequence([texts[index] for index in group], batch_first=True, padding_value=pad_id)
        # Built on the host, because slicing by values on the device would need a synchronization.
        lengths = torch.tensor([segments.lengths[index] for index in group])
        mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(tokens.device, non_blocking=True)
        output: Any = model(input_ids=inputs, attention_mask=mask)
        for index, row in zip(group, output.last_hidden_state, strict=True):
            hidden[index] = row[: segments.lengths[index]]
    return torch.cat([hidden[index] for index in range(len(texts))])
