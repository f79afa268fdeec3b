"""A probe of a loaded backbone: whether it computes packed segments as training expects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from biphasic.model import attention
from biphasic.model.packed import encode
from biphasic.model.segments import Segments

_LENGTH = 4
"""Tokens in each of the probe's two segments."""
_TOLERANCE = 1e-3
"""Largest difference from the family's own attention, relative to the largest hidden state."""
_UNCHANGED = 1e-5
"""Largest relative difference that counts as none. Mixtures of experts round differently when other tokens change."""


@torch.no_grad()
def packing_problem(backbone: nn.Module, decoder: bool = True) -> str | None:
    """Run two short segments through the backbone in both directions, with one token changed at a time.

    It finds families whose layers don't call the registered attention function, in which segments see each other, or whose
    direction can't be chosen (convolutions, state spaces).

    Args:
        backbone: a Hugging Face base model, in evaluation mode, whose attention is `biphasic`.
        decoder: whether the family's own forward is causal; compared then, segment by segment.

    Returns:
        What is wrong, for an error message; None if nothing is.
    """
    vocabulary: int = backbone.get_input_embeddings().weight.shape[0]  # pyright: ignore
    tokens = torch.arange(1, 2 * _LENGTH + 1) * 7 % vocabulary
    try:
        for causal in (False, True):
            hidden = _hidden(backbone, tokens, causal)
            # The last token of the first segment, and the first token of the second.
            for changed in (_LENGTH - 1, _LENGTH):
                other = tokens.clone()
                other[changed] = (other[changed] + 1) % vocabulary
                difference = (_hidden(backbone, other, causal) - hidden).abs().amax(1)
                moved = (difference > _UNCHANGED * hidden.abs().max()).tolist()
                first, second = moved[:_LENGTH], moved[_LENGTH:]
                expected = [not causal] * (_LENGTH - 1) + [True] if changed < _LENGTH else [True] * _LENGTH
                if any(second if changed < _LENGTH else first):
                    return "its segments see each other"
                if (first if changed < _LENGTH else second) != expected:
                    return f"its layers can't be made to look {'back only' if causal else 'both ways'}"
        if decoder and _difference_from_own(backbone, tokens, hidden) > _TOLERANCE:
            return "its hidden states are not those of its own attention"
    except attention.NotPackedError:
        return "its layers don't pass segments on to their attention function"
    except Exception as error:  # whatever the family's code raises
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"its code fails ({type(error).__name__}: {first_line})"
    return None


def _hidden(backbone: nn.Module, tokens: Tensor, causal: bool) -> Tensor:
    return encode(backbone, tokens, Segments.of([_LENGTH, _LENGTH], tokens.device), causal).float()


def _difference_from_own(backbone: Any, tokens: Tensor, hidden: Tensor) -> float:
    """The largest relative difference from the family's own causal attention, each segment alone."""
    backbone.set_attn_implementation("eager")
    try:
        own = backbone(input_ids=tokens.view(2, _LENGTH), use_cache=False).last_hidden_state.flatten(0, 1).float()
    finally:
        backbone.set_attn_implementation(attention.NAME)
    return float((own - hidden).abs().max() / own.abs().max())
