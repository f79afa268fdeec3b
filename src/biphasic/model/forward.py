"""Compute hidden states of concatenated texts, packed or, for models without packed attention, in padded batches.

Imports torch only, so that benchmarks/gpu.py runs without other packages.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from biphasic.model.attention import attention_arguments
from biphasic.model.kernels import avoid_plans
from biphasic.model.segments import Segments, padding_groups, reserved_positions


def packed_forward(backbone: Any, tokens: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Compute hidden states [tokens, width], after the final norm, from token ids, int64 [tokens], without padding.

    The backbone is a Hugging Face base model (Llama, BERT) with `biphasic` attention. Tokens attend within their segment,
    and positions restart at each segment.
    """
    embedded = backbone.get_input_embeddings()(tokens[None])
    device, dtype = embedded.device.type, embedded.dtype
    if torch.is_autocast_enabled(device):
        # The residual stream and the rotary tables stay in fp32, even if FSDP gathers the embedding in bf16.
        embedded, dtype = embedded.float(), torch.get_autocast_dtype(device)
    arguments = attention_arguments(backbone, segments, device, dtype, causal)
    positions = segments.position_ids[None]
    if reserved := reserved_positions(backbone):
        # Such families don't count padding tokens. Texts have them where EOS is the padding.
        is_padding = tokens == reserved - 1
        count = torch.nn.functional.pad(is_padding.cumsum(0), (1, 0))
        skipped = count[1:] - count[segments.cu_seqlens[segments.segment_index]]
        positions = torch.where(is_padding, reserved - 1, positions + reserved - skipped)
    if hasattr(getattr(backbone, "embeddings", None), "token_type_embeddings"):
        arguments["token_type_ids"] = torch.zeros_like(positions)
    output = backbone(inputs_embeds=embedded, position_ids=positions, use_cache=False, **arguments)
    return output.last_hidden_state[0]


def padded_forward(model: nn.Module, tokens: Tensor, segments: Segments, pad_id: int) -> Tensor:
    """Compute hidden states [tokens, width] from token ids, int64 [tokens], in padded batches. Each segment is a text.

    The model is a Hugging Face encoder whose attention takes no segments, such as DeBERTa. Texts of similar length
    share a batch. Some families (RoBERTa) compute positions from `pad_id`.
    """
    if tokens.is_cuda:
        avoid_plans()
    texts = tokens.split(list(segments.lengths))
    hidden: dict[int, Tensor] = {}
    for group in padding_groups(segments.lengths, exponent=1, extra=256):
        inputs = pad_sequence([texts[index] for index in group], batch_first=True, padding_value=pad_id)
        # Lengths stay on the host, because slicing by values on the device would need a synchronization.
        lengths = torch.tensor([segments.lengths[index] for index in group])
        mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(tokens.device, non_blocking=True)
        output: Any = model(input_ids=inputs, attention_mask=mask)
        for index, row in zip(group, output.last_hidden_state, strict=True):
            hidden[index] = row[: segments.lengths[index]]
    return torch.cat([hidden[index] for index in range(len(texts))])
