"""Schema of a pretraining YAML's `model:` section, its checks, and the architecture that it describes.

Parameters, FLOPs and memory are computed from the dimensions. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from biphasic.config.base import Address, KeyProblems, Positive, Section


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a Llama-style stack (RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases).

    `head_dim` is a field because `heads * head_dim` differs from `hidden` in a few model families.
    """

    vocab_size: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    @classmethod
    def from_hf_config(cls, config: Any) -> Architecture:
        """Read the dimensions from a Hugging Face configuration.

        Raises AttributeError if a dimension is missing, as for other kinds of networks.
        """
        heads = config.num_attention_heads
        return cls(
            vocab_size=config.vocab_size,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            tied=getattr(config, "tie_word_embeddings", False),
        )

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in a decoder layer, including its two norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters in the input embedding."""
        return self.vocab_size * self.hidden

    @property
    def head_parameters(self) -> int:
        """Number of parameters in the language-model head; 0 if it is tied to the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def body_parameters(self) -> int:
        """Number of parameters without the embedding and the head."""
        return self.layers * self.layer_parameters + self.hidden

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return self.body_parameters + self.embedding_parameters + self.head_parameters

    def flops(self, lengths: Iterable[int], causal: bool, predicted: float) -> float:
        """Return the FLOPs of a training step, the numerator of MFU (PaLM, appendix B).

        A multiplication and an addition count as two; the backward pass counts as twice the forward pass. Included are
        the layers' matrix products, attention between tokens that see each other, and logits; recomputation is not.

        Args:
            lengths: number of tokens in each segment.
            causal: whether a token attends only to itself and earlier tokens of its segment.
            predicted: number of positions with logits.
        """
        head = 2 * self.vocab_size * self.hidden * predicted
        return 3 * (self._layers_forward(list(lengths), causal, self.layers) + head)

    def hardware_flops(self, lengths: Iterable[int], causal: bool, predicted: float, recomputed: int) -> float:
        """Return HFU's numerator: `flops` plus a forward pass of `recomputed` layers. `lengths` include padding."""
        lengths = list(lengths)
        return self.flops(lengths, causal, predicted) + self._layers_forward(lengths, causal, recomputed)

    def _layers_forward(self, lengths: list[int], causal: bool, layers: int) -> float:
        pairs = sum(length * (length + 1) // 2 if causal else length * length for length in lengths)
        matrices = 2 * (self.layer_parameters - 2 * self.hidden) * sum(lengths)
        return layers * (matrices + 4 * self.heads * self.head_dim * pairs)

    def state_bytes(self, shards: int) -> int:
        """Return the bytes of fp32 weights, gradients and Adam's two moments on each of `shards` ranks."""
        return 16 * self.parameters // shards

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the buckets in which DDP sums fp32 gradients over ranks: a second copy of the gradients."""
        return 4 * self.parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: weights and Adam's two moments in fp32."""
        return 12 * self.parameters

    def activation_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Estimate the bytes that `tokens` store for the backward pass without activation checkpointing.

        Each tensor that autograd saves counts once. Per layer: inputs and outputs of the two norms, queries, keys and
        values, the attention output, and the MLP's gate, up, activation and product.
        """
        per_layer = 5 * self.hidden + self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 4 * self.ffn
        return tokens * self.layers * per_layer * bytes_per_value


def shard_ranks(degree: int | str, ranks: int, ranks_of_a_machine: int) -> int:
    """Return the number of ranks that share one copy of the model. `degree` is `parallelism.shard_degree`."""
    return {"all": ranks, "node": ranks_of_a_machine}[degree] if isinstance(degree, str) else degree


# EuroBERT's (Llama 3's) vocabulary, untied heads. Sources: the paper's appendix, table 1; for 210m and 610m also
# EuroBERT's public code.
PRESETS = {
    "210m": Architecture(128_256, hidden=768, ffn=3072, layers=12, heads=12, kv_heads=12, head_dim=64),
    "610m": Architecture(128_256, hidden=1152, ffn=4096, layers=26, heads=18, kv_heads=6, head_dim=64),
    "1b": Architecture(128_256, hidden=1728, ffn=5120, layers=28, heads=18, kv_heads=6, head_dim=96),
}


class ModelConfig(Section):
    """The model to train: a `preset`, explicit dimensions, or an existing model (`init_from`)."""

    preset: Literal["210m", "610m", "1b"] | None = None
    """One of the paper's sizes."""
    init_from: Address | None = None
    """Path of a model whose architecture and weights are loaded: a Biphasic checkpoint, the folder or bucket prefix that a
    run saves to (for its newest checkpoint), an exported folder, or the folder of any Hugging Face decoder."""
    vocab_size: Positive | None = None
    """Number of rows of the embedding. Default: the preset's 128,256. Required with explicit dimensions."""
    hidden_size: Positive | None = None
    """Width of the residual stream. With `preset`, the preset's."""
    intermediate_size: Positive | None = None
    """Width of the SwiGLU layers. With `preset`, the preset's."""
    num_layers: Positive | None = None
    """Number of layers. With `preset`, the preset's."""
    num_heads: Positive | None = None
    """Number of attention heads, a divisor of `hidden_size`. With `preset`, the preset's."""
    num_kv_heads: Positive | None = None
    """Default: `num_heads` (no grouped-query attention)."""
    head_dim: Positive | None = None
    """Default: `hidden_size / num_heads`."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary position embeddings. Default: 10,000, as the paper's models; with `init_from` the model's own."""
    max_position_embeddings: Positive | None = None
    """The longest sequence that the model is for, recorded in its configuration; rotary positions need no weights for it.
    Default: `data.sequence_length`; with `init_from` the model's own, which must be at least `data.sequence_length`."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm (EuroBERT's code)."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of every weight matrix and embedding at initialization."""
    trust_remote_code: bool = False
    """Whether to run Python files from a Hugging Face folder."""


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
_FIXED_BY_PRESET = (*_REQUIRED[1:], "num_kv_heads", "head_dim")
_FIXED_BY_INIT_FROM = ("preset", "vocab_size", *_FIXED_BY_PRESET, "rms_norm_eps", "initializer_range")
DEFAULT_ROPE_THETA = 10_000.0


def architecture_of(model: ModelConfig) -> Architecture | None:
    """Return the architecture in a YAML; None if dimensions are missing or come from `init_from`."""
    if model.init_from is not None:
        return None
    if model.preset is not None:
        architecture = PRESETS[model.preset]
        return architecture if model.vocab_size is None else replace(architecture, vocab_size=model.vocab_size)
    vocab_size, hidden, ffn = model.vocab_size, model.hidden_size, model.intermediate_size
    layers, heads = model.num_layers, model.num_heads
    if not (vocab_size and hidden and ffn and layers and heads):
        return None
    kv_heads, head_dim = model.num_kv_heads or heads, model.head_dim or hidden // heads
    return Architecture(vocab_size, hidden, ffn, layers, heads, kv_heads, head_dim)


def model_problems(model: ModelConfig, sequence_length: int) -> KeyProblems:
    """Check combinations of values in the model section, and that rows don't exceed the model's maximum length."""
    if model.max_position_embeddings is not None and model.max_position_embeddings < sequence_length:
        message = f"expected at least data.sequence_length ({sequence_length})"
        yield ["model.max_position_embeddings", "data.sequence_length"], message
    if model.init_from is not None:
        message = "can't be given beside model.init_from, whose own value is used; remove one of them"
        yield from model.require_defaults(_FIXED_BY_INIT_FROM, "model", [], message)
        return
    if model.preset is not None:
        message = f"can't be given beside model.preset: {model.preset}, which fixes it"
        yield from model.require_defaults(_FIXED_BY_PRESET, "model", [], message)
    else:
        missing = [name for name in _REQUIRED if getattr(model, name) is None]
        if len(missing) == len(_REQUIRED):
            yield ["model"], "expected one of `preset`, `init_from`, or explicit dimensions (hidden_size and so on)"
        else:
            for name in missing:
                yield [f"model.{name}"], "is missing: explicit dimensions need it (or use model.preset)"
        if (architecture := architecture_of(model)) is None:
            return
        if architecture.hidden % architecture.heads:
            yield ["model.num_heads", "model.hidden_size"], f"expected a divisor of hidden_size ({architecture.hidden})"
            return
        if architecture.heads % architecture.kv_heads:
            yield ["model.num_kv_heads", "model.num_heads"], f"expected a divisor of num_heads ({architecture.heads})"
        if architecture.head_dim % 2:
            key = "model.head_dim" if model.head_dim else "model.num_heads"
            yield [key, "model.hidden_size"], f"rotary positions need an even head_dim; got {architecture.head_dim}"
