"""Small backbones of every family."""

from collections.abc import Iterable

import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig

from biphasic.model.forward import packed_forward
from biphasic.model.language_model import from_hf_config
from biphasic.model.segments import Segments
from helpers import attention_on_cpu  # noqa: F401 - the backends of `gradients`

TESTED_FAMILIES = (
    *("llama", "eurobert", "qwen3", "mistral", "olmo2", "smollm3", "gemma2", "gemma3_text"),
    *("modernbert", "modernbert-decoder", "phi", "cohere", "granite"),
)
"""Families whose attention tests/model compares token by token, causal and bidirectional."""
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
# Without grouped-query attention; the decoder's configuration requires a padding token.
MODERNBERT = {"num_key_value_heads": 4, "pad_token_id": 0, "local_attention": 6}
OTHER_SIZES = {
    "modernbert": MODERNBERT,
    "modernbert-decoder": MODERNBERT,
    "phi": {"num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
}


def backbone(family: str, **changes: object) -> torch.nn.Module:
    config = AutoConfig.for_model(family, **{**SMALL, **OTHER_SIZES.get(family, {}), **changes})
    model = from_hf_config(config, seed=3).backbone
    # Larger weights than a new model's, so that an error shows far above rounding.
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


# Eight batches, four of each phase, with different segments: among them a single one, and single tokens.
BATCHES = [(5, 9, 1, 6), (7, 7, 7), (21,), (2,) * 10 + (1,), (5, 16), (1,) * 21, (3, 9, 9), (21,)]


def gradients(
    model: torch.nn.Module, backend: str, count: list[int] | None = None, batches: Iterable[int] = range(len(BATCHES))
) -> list[torch.Tensor]:
    """Outputs and gradients for each batch; the number of compiled graphs after each is appended to `count`."""
    results = []
    model.attention_backend = backend  # pyright: ignore[reportAttributeAccessIssue]
    for number in batches:
        lengths = BATCHES[number]
        segments = Segments.of(lengths, torch.device("cpu"), max_seqlen=21)
        tokens = torch.randint(97, (21,), generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        hidden = packed_forward(model, tokens, segments, causal=number < 4)
        hidden.square().sum().backward()
        if count is not None:
            count.append(counters["stats"]["unique_graphs"])
        results.append(torch.cat([hidden.detach().flatten(), *(p.grad.flatten() for p in model.parameters())]))  # pyright: ignore
    return results
