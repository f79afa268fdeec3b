"""What an encoder of given dimensions costs: parameters, FLOPs, bytes, and how many ranks share them. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a Llama-style stack (RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases).

    Widths and counts are in elements. `head_dim` is given by itself, since a few families don't keep
    `heads * head_dim == hidden`.
    """

    vocab_size: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, its two norms included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the language-model head; zero when it is tied to the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def body_parameters(self) -> int:
        """All parameters but the embedding and the head."""
        return self.layers * self.layer_parameters + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.body_parameters + self.embedding_parameters + self.head_parameters

    def flops(self, lengths: Iterable[int], causal: bool, predicted: float) -> float:
        """Floating-point operations that training on some segments takes: forward, and backward as twice the forward.

        A multiplication and an addition count as two. Counted are the matrix products of the layers, the scores and sums
        of attention for the pairs of tokens that see each other, and the logits of the predicted positions; not what is
        computed again in the backward pass. This is MFU's numerator (PaLM, appendix B).

        Args:
            lengths: tokens in each segment.
            causal: a token sees itself and what is before it in its segment; otherwise all of its segment.
            predicted: positions that get logits.
        """
        return 3 * (self._layers_forward(list(lengths), causal, self.layers) + self._head_forward(predicted))

    def hardware_flops(self, lengths: Iterable[int], causal: bool, predicted: float, recomputed: int) -> float:
        """What a device computes: `flops`, and the forward pass of `recomputed` layers once more. HFU's numerator.

        Args:
            lengths: tokens in each segment, padding included.
            causal: as for `flops`.
            predicted: positions that get logits.
            recomputed: layers whose activations are computed again in the backward pass.
        """
        lengths = list(lengths)
        return self.flops(lengths, causal, predicted) + self._layers_forward(lengths, causal, recomputed)

    def _layers_forward(self, lengths: list[int], causal: bool, layers: int) -> float:
        pairs = sum(length * (length + 1) // 2 if causal else length * length for length in lengths)
        matrices = 2 * (self.layer_parameters - 2 * self.hidden) * sum(lengths)
        return layers * (matrices + 4 * self.heads * self.head_dim * pairs)

    def _head_forward(self, predicted: float) -> float:
        return 2 * self.vocab_size * self.hidden * predicted

    def state_bytes(self, shards: int) -> int:
        """Bytes of weights, gradients and Adam's two moments in fp32 on each of `shards` ranks that split them."""
        return 16 * self.parameters // shards

    def activation_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Rough bytes kept for the backward pass of `tokens` without activation checkpointing.

        Counts each tensor that autograd saves once: per layer the two norms' inputs and outputs, queries, keys, values,
        the attention's output and the MLP's gate, up, activation and product.
        """
        per_layer = 5 * self.hidden + self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 4 * self.ffn
        return tokens * self.layers * per_layer * bytes_per_value


def shard_ranks(degree: int | str, ranks: int, ranks_of_a_machine: int) -> int:
    """How many ranks hold the model once among them.

    Args:
        degree: `parallelism.shard_degree`: a number of ranks, `all` or `node`.
        ranks: of the run.
        ranks_of_a_machine: those on one machine.
    """
    return {"all": ranks, "node": ranks_of_a_machine}[degree] if isinstance(degree, str) else degree


# EuroBERT's vocabulary (Llama 3's), untied head. 210m and 610m: the paper's appendix, table 1, and EuroBERT's public code;
# 1b: the same table only.
PRESETS = {
    "210m": Architecture(128_256, hidden=768, ffn=3072, layers=12, heads=12, kv_heads=12, head_dim=64),
    "610m": Architecture(128_256, hidden=1152, ffn=4096, layers=26, heads=18, kv_heads=6, head_dim=64),
    "1b": Architecture(128_256, hidden=1728, ffn=5120, layers=28, heads=18, kv_heads=6, head_dim=96),
}


def preset(name: str, vocab_size: int | None = None) -> Architecture:
    """The paper's architecture of that name, with another vocabulary if one is given."""
    found = PRESETS[name]
    return found if vocab_size is None else replace(found, vocab_size=vocab_size)
