"""Check whether a loaded backbone attends in both directions, and whether it computes packed segments correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from biphasic.errors import UserError, first_line
from biphasic.model import attention
from biphasic.model.forward import packed_encoder_forward, packed_forward, padded_forward, reserved_positions
from biphasic.model.rope import rope_threshold
from biphasic.model.segments import Segments, run_lengths, visibility_mask
from biphasic.quiet import without_warnings

if TYPE_CHECKING:
    from biphasic.model.language_model import LanguageModel

_LENGTH = 4
"""Number of tokens in each of the probe's two segments."""
_TOLERANCE = 1e-3
"""Maximum difference from the family's own attention, relative to the largest absolute hidden state."""
_ROUNDING = 1e-5
"""Maximum difference due to rounding, relative to the largest absolute hidden state. In mixtures of experts, a token's
rounding depends on the other tokens."""
_MAX_FLOPS, _MAX_WINDOW = 1e12, 1024
"""Limits of a forward pass over segments longer than a sliding window, seconds on a CPU."""


@torch.no_grad()
def packing_problem(backbone: Any, decoder: bool = True, longest: int | None = None) -> str | None:
    """Return why a backbone can't compute packed segments, for an error message; None if there is no problem.

    One token of two short segments is changed, to see which hidden states change, with causal and with bidirectional
    attention. This detects families whose layers don't call the registered attention function, leak between segments,
    or can't be made causal or bidirectional (convolutions, state spaces). A third segment at a row's last position shows
    whether positions depend on other segments. Last, hidden states are compared with those of the family's own attention,
    also in segments on both sides of each sliding window, if that is cheap.

    Args:
        backbone: a Hugging Face base model with `biphasic` attention, in evaluation mode.
        decoder: whether the family's own attention is causal.
        longest: number of tokens in the longest segment. Default: the model's own limit.
    """
    vocabulary, pair = _vocabulary(backbone), [_LENGTH, _LENGTH]
    tokens = _tokens(2 * _LENGTH, vocabulary).to(_device(backbone))
    rope = rope_threshold(backbone.config.to_dict())
    own: int | None = getattr(backbone.config, "max_position_embeddings", None) if rope is None else rope.length
    longest = longest or (own or _LENGTH) - reserved_positions(backbone)
    try:
        for causal in (not decoder, decoder):  # in the family's own direction last
            hidden = _hidden(backbone, tokens, causal, pair)
            visible = visibility_mask(_LENGTH, causal, 0, tokens.device)
            # The last token of the first segment, and the first token of the second.
            for segment, position in ((0, _LENGTH - 1), (1, 0)):
                changed = _with_changed_token(tokens, segment * _LENGTH + position, vocabulary)
                difference = (_hidden(backbone, changed, causal, pair) - hidden).abs().amax(1)
                moved = (difference > _ROUNDING * hidden.abs().max()).view(2, _LENGTH)
                if moved[1 - segment].any():
                    return "tokens attend to other segments"
                if not moved[segment].equal(visible[:, position]):
                    return f"its layers can't be made {'causal' if causal else 'bidirectional'}"
        far = _hidden(backbone, torch.cat([tokens, tokens[:1]]), decoder, [*pair, 1], last=longest - 1)
        if (far[: len(tokens)] - hidden).abs().max() > _ROUNDING * hidden.abs().max():
            return "its positions depend on the longest segment of a call"
        if _difference_from_own(backbone, _lengths(backbone, longest), decoder) > _TOLERANCE:
            return "its hidden states are not those of its own attention"
    except attention.NotPackedError:
        return "its layers don't pass segments on to their attention function"
    except Exception as error:  # the family's code may raise anything
        return f"its code fails ({type(error).__name__}: {first_line(error)})"
    return None


def packed_attention(model: Any) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Switch a Hugging Face model to attention over segments, in both directions, and return a function that computes it.

    The function takes token ids, int64 [rows, length], segment ids (1 for a row's first segment, 2 for the second, …; 0 for
    padding), and whether attention is causal. It returns the hidden states, [rows, length, width]. Tokens attend within
    their segment only, positions restart at each segment, and nothing is computed twice or masked on kernels for segments
    of any length.

    Raises:
        UserError: the model's layers can't be switched. Its own attention stays.
    """
    attention.register()
    base = model.base_model
    backbone: Any = base.get_decoder() if hasattr(base, "get_decoder") else base
    own, was_training = backbone.config._attn_implementation, model.training
    decoder = not is_bidirectional(backbone.eval())
    model.eval().set_attn_implementation(attention.ATTENTION_NAME)
    problem = packing_problem(backbone, decoder)
    model.train(was_training)
    if problem is not None:
        model.set_attn_implementation(own)
        raise UserError(f"{type(model).__name__} can't be computed on packed segments: {problem}")

    def forward(input_ids: Tensor, segment_ids: Tensor, causal: bool) -> Tensor:
        segments = Segments.of([length for row in run_lengths(segment_ids) for length in row], input_ids.device)
        return packed_forward(backbone, input_ids.flatten(), segments, causal).unflatten(0, input_ids.shape)

    return forward


@torch.no_grad()
def computes_own_logits(network: Any, model: LanguageModel) -> bool:
    """Return whether a language model has the logits of the Hugging Face class that its backbone and head come from.

    Some families scale or transform their logits in ways of their own, which a class's parameters don't show.

    Args:
        network: the class with a head. It has the same modules as `model`.
        model: the language model, in evaluation mode.
    """
    tokens = _tokens(2 * _LENGTH, _vocabulary(model.backbone)).view(2, _LENGTH).to(_device(model.backbone))
    with _own_attention(network):
        own = network(input_ids=tokens).logits
        logits = model.logits(model.backbone(input_ids=tokens).last_hidden_state)
    return bool((own - logits).abs().max() <= _TOLERANCE * own.abs().max())


@contextmanager
def _own_attention(network: Any) -> Iterator[None]:
    """Replace `biphasic` attention by the family's own, for padded calls."""
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(attention.ATTENTION_NAME)


def _vocabulary(backbone: Any) -> int:
    return backbone.get_input_embeddings().weight.shape[0]


def _device(backbone: Any) -> torch.device:
    return backbone.get_input_embeddings().weight.device


def _with_changed_token(tokens: Tensor, index: int, vocabulary: int) -> Tensor:
    changed = tokens.clone()
    changed[index] = (changed[index] + 1) % vocabulary
    return changed


def _tokens(count: int, vocabulary: int) -> Tensor:
    return torch.arange(1, count + 1) * 7 % vocabulary


def _lengths(backbone: Any, longest: int) -> list[int]:
    """Return lengths of segments on both sides of a backbone's thresholds below `longest`, if these are cheap."""
    chunk: int = getattr(backbone.config, "attention_chunk_size", None) or 0
    lengths, parameters = [_LENGTH, _LENGTH], sum(weight.numel() for weight in backbone.parameters())
    for threshold in sorted(attention.sliding_windows(backbone) | {chunk}):
        longer = [*lengths, threshold, min(threshold + 2, longest)]
        if 0 < threshold < min(longest, _MAX_WINDOW + 1) and 2 * parameters * sum(longer) <= _MAX_FLOPS:
            lengths = longer
    return lengths


def _hidden(backbone: nn.Module, tokens: Tensor, causal: bool, lengths: list[int], last: int | None = None) -> Tensor:
    """Compute packed hidden states; `last` is the position of the last token, by default the one in its segment."""
    segments = Segments.of(lengths, tokens.device)
    if last is not None:
        segments.position_ids[-1] = last
    return packed_forward(backbone, tokens, segments, causal).float()


def _difference_from_own(backbone: Any, lengths: list[int], causal: bool) -> float:
    """Return the largest relative difference from hidden states of the family's own attention, segment by segment."""
    tokens = _tokens(sum(lengths), _vocabulary(backbone)).to(_device(backbone))
    hidden = _hidden(backbone, tokens, causal, lengths)
    with _own_attention(backbone):
        texts = [backbone(input_ids=text[None], use_cache=False) for text in tokens.split(lengths)]
        own = torch.cat([text.last_hidden_state[0] for text in texts]).float()
    return float((own - hidden).abs().max() / own.abs().max())


@torch.no_grad()
def is_bidirectional(encoder: nn.Module) -> bool:
    """Return whether a text's first hidden state depends on its last token, with the encoder's own attention."""
    length, vocabulary = 8, _vocabulary(encoder)
    tokens = torch.arange(1, length + 1, device=_device(encoder)) * max(vocabulary // 16, 1) % vocabulary
    both = torch.cat([tokens, _with_changed_token(tokens, -1, vocabulary)])
    hidden = padded_forward(encoder, both, Segments.of([length, length], both.device), pad_id=0).float()
    return bool((hidden[0] - hidden[length]).abs().max() > 1e-6 * hidden[0].abs().max())


@torch.no_grad()
def switch_to_packed_attention(encoder: Any) -> bool:
    """Replace the attention of a Hugging Face encoder (BERT) by `biphasic` attention, if its family supports that.

    Packed hidden states are compared with padded ones of the encoder's own attention, on texts longer than its sliding
    window. If they differ, the encoder keeps its own attention, and the result is False. The encoder must have no
    pooler, and be in evaluation mode, on the CPU in fp32.
    """
    own_attention = encoder.config._attn_implementation
    try:
        with without_warnings():  # from families whose attention can't be replaced
            packs = _packs(encoder)
    except Exception:  # the family's code may raise anything
        packs = False
    if not packs:
        encoder.set_attn_implementation(own_attention)
    return packs


def _packs(encoder: Any) -> bool:
    """Switch the attention and return whether packed and padded hidden states are the same."""
    window: int = getattr(encoder.config, "sliding_window", None) or 0
    longest = min(max(2 * window, _LENGTH) + _LENGTH, encoder.config.max_position_embeddings // 2)
    lengths = (longest, _LENGTH, longest - 1)
    vocabulary = _vocabulary(encoder)
    pad_id: int = getattr(encoder.config, "pad_token_id", None) or 0
    tokens = _tokens(sum(lengths), vocabulary)
    # Some families compute positions from padding tokens.
    tokens[tokens == pad_id] = (pad_id + 1) % vocabulary
    segments = Segments.of(lengths, tokens.device)
    padded = padded_forward(encoder, tokens, segments, pad_id)
    encoder.set_attn_implementation(attention.ATTENTION_NAME)
    packed = packed_encoder_forward(encoder, tokens, segments)
    return packed.shape == padded.shape and bool((packed - padded).abs().max() <= _ROUNDING * padded.abs().max())
