"""Schema and checks of a pretraining YAML's `model:` section, and the architecture that it describes."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Address, KeyProblems, Positive, Section
from biphasic.model.architecture import PRESETS, Architecture


class ModelConfig(Section):
    """The model to train: a `preset`, explicit dimensions, or an existing model (`init_from`)."""

    preset: Literal["210m", "610m", "1b"] | None = None
    """One of the paper's sizes."""
    init_from: Address | None = None
    """Path of a model whose architecture and weights are loaded: a Biphasic checkpoint, the folder or bucket prefix that a
    run saves to (for its newest checkpoint), an exported folder, or the folder of a Hugging Face decoder, of EuroBERT or
    ModernBERT."""
    new_vocabulary: Literal["overlap"] | None = None
    """How embedding and head of `init_from` are rebuilt for data with another tokenizer than the model's. `overlap`: a token
    whose text is also that of an old token keeps its vector, a special token that of its role, and any other gets the mean
    of its pieces' in the old tokenizer (moBERTo, arXiv 2606.22722), or of all. The old one is that of `init_from`."""
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
    Default: the longest row of any phase; with `init_from` the model's own, at least `data.sequence_length`."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm (EuroBERT's code)."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of every weight matrix and embedding at initialization."""


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
    yield from model.require_defaults(("new_vocabulary",), "model", [], "has no effect without model.init_from")
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
