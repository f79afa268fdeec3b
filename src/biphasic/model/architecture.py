"""What a model's configuration says: parameters, FLOPs and memory, and how long its rotary positions are right.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

MODERNBERT_HEADS = {"modernbert": "head", "modernbert-decoder": "lm_head"}
"""Families with ModernBERT's prediction head, and its name in their classes."""


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a Llama-style stack (RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases).

    `head_dim` is a field because `heads * head_dim` differs from `hidden` in a few model families. In `local_layers` of
    the `layers`, tokens attend only to tokens closer than `window`. `dense_head` is whether a layer of `hidden` x `hidden`
    comes before the language-model head (ModernBERT).
    """

    vocab_size: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    local_layers: int = 0
    window: int = 0
    dense_head: bool = False

    @classmethod
    def from_hf_config(cls, config: Any) -> Architecture:
        """Read a Hugging Face configuration. Raises an AttributeError if it has no such dimensions."""
        heads, layers, family = config.num_attention_heads, config.num_hidden_layers, config.model_type
        modernbert = family.startswith("modernbert")
        # In files of the hub, ModernBERT's configuration has the older keys.
        window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", 0) // 2
        every = getattr(config, "global_attn_every_n_layers", 3 if modernbert else layers + 1)
        kinds = getattr(config, "layer_types", None) or [
            "sliding_attention" if layer % every or not modernbert else "full_attention" for layer in range(layers)
        ]
        return cls(
            vocab_size=config.vocab_size,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            layers=layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            tied=getattr(config, "tie_word_embeddings", modernbert),
            local_layers=kinds.count("sliding_attention") if window else 0,
            # ModernBERT's encoder attends to the tokens at this distance too.
            window=window + (family == "modernbert"),
            dense_head=modernbert,
        )

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in a decoder layer, including its two norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def head_parameters(self) -> int:
        """Number of parameters in the language-model head, without weights that are tied to the embedding."""
        return (0 if self.tied else self.embedding_parameters) + self.dense_head * self.hidden**2

    @property
    def parameters(self) -> int:
        body = self.layers * self.layer_parameters + self.hidden  # with the final norm
        return body + self.embedding_parameters + self.head_parameters

    def flops(self, lengths: Iterable[int], causal: bool, predicted: float, recomputed: int = 0) -> float:
        """Return the FLOPs of a training step, the numerator of MFU (PaLM, appendix B).

        A multiplication and an addition count as two; the backward pass counts as twice the forward pass. Included are
        the layers' matrix products, attention between tokens of segments of these `lengths` that see each other, and the
        logits of `predicted` positions. What a GPU computes has also the forward pass of `recomputed` layers, and padding.
        """
        head = 2 * (self.vocab_size + self.dense_head * self.hidden) * self.hidden * predicted
        lengths = list(lengths)
        matrices = 2 * (self.layer_parameters - 2 * self.hidden) * sum(lengths)
        everywhere, nearby = (sum(_pairs(length, causal, limit) for length in lengths) for limit in (0, self.window))
        share = self.local_layers / self.layers
        pairs = everywhere if not share else share * nearby + (1 - share) * everywhere
        layer = matrices + 4 * self.heads * self.head_dim * pairs
        return (3 * self.layers + recomputed) * layer + 3 * head

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


def _pairs(length: int, causal: bool, window: int) -> int:
    """Return the number of pairs of tokens in a segment of which one attends to the other; a `window` of 0 is no limit."""
    near = min(length, window or length)
    earlier = near * (near + 1) // 2 + (length - near) * near
    return earlier if causal else 2 * earlier - length


PoolingMode = Literal["mean", "cls", "lasttoken", "max"]
"""Supported pooling modes of sentence-transformers."""
RANKS_OF_A_MACHINE = 8
"""What a plan assumes where nothing says how many GPUs a machine has."""


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


class RopeThreshold(NamedTuple):
    """Type of rotary positions that depend on a call's longest segment beyond a `length`, and its key in config.json."""

    kind: str
    key: str
    length: int


def rope_threshold(content: Mapping[str, Any]) -> RopeThreshold | None:
    """Return from which length on a model's rotary positions depend on a call's longest segment; None if they don't.

    transformers chooses the frequencies of `longrope` and `dynamic` by the longest position of the whole call. `content`
    is a config.json, or a Hugging Face configuration as a dictionary.
    """
    rope, found = content.get("rope_scaling") or content.get("rope_parameters"), list[RopeThreshold]()
    original, positions = "original_max_position_embeddings", cast(Any, content.get("max_position_embeddings"))
    of_layers = (rope, *rope.values()) if isinstance(rope, dict) else ()  # there may be one for each layer type
    for each in (each for each in of_layers if isinstance(each, dict)):
        kind = str(each.get("rope_type") or each.get("type"))
        # Phi-3's older names are others.
        if kind == "longrope" or (kind in ("su", "yarn") and content.get("model_type") == "phi3"):
            found += [RopeThreshold("longrope", original, at.get(original, positions)) for at in (content, each)]
        elif "dynamic" in kind and "alpha" not in each:  # with Hunyuan's `alpha` they are constant
            found.append(RopeThreshold(kind, "max_position_embeddings", positions))
    return min((each for each in found if isinstance(each.length, int)), key=lambda each: each.length, default=None)


def scaled_rope(content: Mapping[str, Any]) -> Any:
    """Return what in a config.json says that rotary positions are scaled, of several bases or none; None if nothing does."""
    if content and not _is_rotary(content):
        return "it has none"
    rope = content.get("rope_parameters") or content.get("rope_scaling")
    if isinstance(rope, dict):
        of_layers = any(isinstance(each, dict) for each in rope.values())
        if of_layers or (rope.get("rope_type") or rope.get("type") or "default") != "default":
            return rope
    return content.get("rope_local_base_freq") or content.get("global_rope_theta")


def _is_rotary(content: Mapping[str, Any]) -> bool:
    # LLaMA's first config.json has rotary positions, and no key for them.
    return any("rope" in key or "rotary" in key for key in content) or "rms_norm_eps" in content


def rows_problem(path: str, content: Mapping[str, Any], longest: int, max_positions: int | None) -> str | None:
    """Return why the model of `model.init_from` can't be trained on rows of up to `longest` tokens; None if it can.

    `content` is as in `rope_threshold`, and `max_positions` is the YAML's `model.max_position_embeddings`.
    """
    own, rope = content.get("max_position_embeddings"), rope_threshold(content)
    # Another maximum would change LongRoPE's scale, and the threshold of `dynamic`.
    if rope is not None and (longest > rope.length or max_positions not in (None, own)):
        return (
            f"model.init_from: {path} has rotary positions of type {rope.kind}: in rows longer than its {rope.key} "
            f"({rope.length}), a document's would depend on the other documents of its microbatch. Set data.sequence_length "
            f"(also of phases; the longest is {longest}) to at most {rope.length} and leave model.max_position_embeddings "
            'out, or remove the scaling from its config.json ("rope_type": "default")'
        )
    if isinstance(own, int) and not _is_rotary(content) and (longest > own or max_positions not in (None, own)):
        return (
            f"model.init_from: {path} has {own} learned positions, none for longer rows: set data.sequence_length (also of "
            f"phases; the longest is {longest}) to at most {own} and leave model.max_position_embeddings out"
        )
    positions = max_positions or own
    if isinstance(positions, int) and positions < longest:
        return (
            f"data.sequence_length is {longest}, but {path} is for sequences of up to {positions} tokens: set "
            f"model.max_position_embeddings={longest}, and a larger model.rope_theta (recipes/long_context)"
        )
    return None
