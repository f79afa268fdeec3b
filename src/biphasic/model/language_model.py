"""Define the language model: a backbone with a head, which computes the loss with causal or bidirectional attention.

Imports torch and transformers only, so that benchmarks/gpu.py runs without other packages.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from biphasic.errors import UserError
from biphasic.model import attention
from biphasic.model.architecture import MODERNBERT_HEADS, Architecture
from biphasic.model.forward import packed_forward
from biphasic.model.losses import cross_entropy_at_targets
from biphasic.model.probe import computes_own_logits, in_fp32, packing_problem
from biphasic.model.segments import Segments


class LanguageModel(nn.Module):
    """A Hugging Face base model with `biphasic` attention, and a language-model head.

    `lm_head` may share its weight with the embedding; `head` are layers between the two (ModernBERT). `compiled_loss` is set
    by `biphasic.training.compute.configure_compute`.
    """

    def __init__(self, backbone: nn.Module, lm_head: nn.Linear, head: nn.Module | None = None):
        super().__init__()
        self.backbone = backbone
        self.lm_head = lm_head
        self.head = head
        # transformers gives the padding token's embedding no gradient. A packed backbone gets no padding, and in EuroBERT's
        # tokenizer, padding and end of text are the same token, which must be learned.
        backbone.get_input_embeddings().padding_idx = None  # pyright: ignore[reportCallIssue]
        self.compiled_loss = False
        self.softcap: float | None = getattr(backbone.config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        scale: float | None = getattr(backbone.config, "logit_scale", None)
        self.logit_scale = scale or 1 / getattr(backbone.config, "logits_scaling", 1.0)

    def forward(self, inputs: Tensor, targets: Tensor, segments: Segments, causal: bool) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy, an fp32 scalar in nats, and the number of targets, an int64 scalar.

        Inputs and targets are int64 [tokens]; targets are `IGNORE` where nothing is predicted. The loss is computed here,
        because FSDP gathers the head's weight only during this module's forward.
        """
        hidden = packed_forward(self.backbone, inputs, segments, causal)
        if self.logit_scale != 1:
            hidden = hidden * self.logit_scale
        lm_head = self.lm_head
        total = cross_entropy_at_targets(
            hidden, lm_head.weight, targets, self.softcap, self.compiled_loss, lm_head.bias, self.head
        )
        return total, (targets >= 0).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of hidden states [..., width]."""
        logits = self.lm_head((hidden if self.head is None else self.head(hidden)) * self.logit_scale)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @property
    def config(self) -> Any:
        return self.backbone.config

    def architecture(self) -> Architecture:
        """Raises a UserError if the layers have different sizes (Gemma 4)."""
        try:
            return Architecture.from_hf_config(self.config)
        except RuntimeError:  # transformers' for a value that differs between layers
            problem = "its layers have different sizes, which isn't supported"
            raise UserError(f"{self.config.model_type} can't be trained: {problem}") from None

    @property
    def rope_theta(self) -> float:
        """Raises a UserError if there isn't exactly one base of rotary positions."""
        return plain_rope(self.config)["rope_theta"]

    def set_rope_theta(self, rope_theta: float | None) -> None:
        """Change the base of the rotary positions, unless None. Raises a UserError if there isn't exactly one."""
        if rope_theta is None or rope_theta == self.rope_theta:
            return
        plain_rope(self.config)["rope_theta"] = rope_theta
        rotary: Any = self.backbone.rotary_emb
        changed = type(rotary)(self.config)
        for name in ("inv_freq", "original_inv_freq"):
            getattr(rotary, name).copy_(getattr(changed, name))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether FSDP wraps a module separately, which is true for decoder layers. Composer calls this."""
        return any(module is layer for layer in self.backbone.layers)  # pyright: ignore[reportGeneralTypeIssues]

    def resize_token_embeddings(self, vocab_size: int) -> None:
        """Enlarge embedding and head to `vocab_size` rows. New rows are the mean of the old ones."""
        added = vocab_size - self.lm_head.out_features
        if added > 0:
            self.map_vocabulary(lambda rows: torch.cat([rows, rows.mean(0, keepdim=True).repeat_interleave(added, 0)]))

    def map_vocabulary(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the weights of embedding and head, and the head's bias, by a function of these: a row for each token."""
        embedding = self.backbone.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        lm_head, tied = self.lm_head, self.lm_head.weight is embedding.weight
        with torch.no_grad():
            embedding.weight = nn.Parameter(function(embedding.weight))
            lm_head.weight = embedding.weight if tied else nn.Parameter(function(lm_head.weight))
            if lm_head.bias is not None:
                lm_head.bias = nn.Parameter(function(lm_head.bias))
        embedding.num_embeddings = lm_head.out_features = self.config.vocab_size = len(embedding.weight)


def language_model_of(network: Any, name: str, longest: int | None = None) -> LanguageModel:
    """Return the language model of a Hugging Face network with a head, whose weights it shares, with `biphasic` attention.

    Messages call it `name`, such as `model PATH`. `longest` is the number of tokens in the longest row to train on. Default:
    the model's own limit. Raises a UserError if its head isn't one linear layer, or it can't be computed on packed segments
    in both directions.
    """
    attention.register()
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config, family = network.config, network.config.model_type
    refused, base = f"{name}: {family} isn't supported", network.base_model
    lm_head, backbone = network.get_output_embeddings(), base.get_decoder() if hasattr(base, "get_decoder") else base
    head = getattr(network, MODERNBERT_HEADS.get(family, ""), None)
    if not hasattr(backbone, "layers"):
        raise UserError(f"{refused}: its base model has no list `layers`, as Llama's, Gemma's and ModernBERT's have")
    if getattr(config, "use_bidirectional_attention", False):
        raise UserError(f"{refused}: its config.json sets use_bidirectional_attention; expected a causal decoder")
    parts = (backbone, lm_head, *([] if head is None else [head]))
    known = {id(weight) for part in parts if isinstance(part, nn.Module) for weight in part.parameters()}
    others = [key for key, weight in network.named_parameters() if id(weight) not in known]
    if not isinstance(lm_head, nn.Linear) or others:
        raise UserError(f"{refused}: its head isn't one linear layer" + (f" (it has {others[0]})" if others else ""))
    if lm_head.bias is not None and not has_head_bias(config):
        config.lm_head_bias = backbone.config.lm_head_bias = True
    was_training = network.training
    network.eval().set_attn_implementation(attention.ATTENTION_NAME)
    decoder = type(network) in MODEL_FOR_CAUSAL_LM_MAPPING.values()
    with in_fp32(network):
        if (problem := packing_problem(backbone, decoder, longest)) is not None:
            raise UserError(f"{name}: {family} can't be trained on packed segments: {problem}")
        language_model = LanguageModel(backbone, lm_head, head)
        if not computes_own_logits(network, language_model):
            raise UserError(f"{refused}: its logits aren't those of its head on the last hidden states")
    network.train(was_training)
    return language_model


def plain_rope(hf_config: Any, path: str = "this model", key: str = "model.rope_theta") -> dict[str, Any]:
    """Return a configuration's rotary positions. Raises a UserError about `key` if they are scaled or several."""
    rope = getattr(hf_config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default":
        problem = f"has no plain rotary positions with one base (its rope_parameters: {rope}); leave rope_theta out"
        raise UserError(f"{key}: {path} ({hf_config.model_type}) {problem}")
    return rope


def llama_config(size: Architecture, positions: int, **settings: float) -> Any:
    """Build a Llama's configuration. `settings` replace `rms_norm_eps`, `rope_theta` and `initializer_range`."""
    from transformers import LlamaConfig

    values: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "initializer_range": 0.02, **settings}
    # transformers initializes the padding token's embedding with zeros.
    values |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return LlamaConfig(
        vocab_size=size.vocab_size, hidden_size=size.hidden, intermediate_size=size.ffn, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        max_position_embeddings=positions, tie_word_embeddings=size.tied, **values,
    )  # fmt: skip


def from_hf_config(hf_config: Any, seed: int, device: str | None = None) -> LanguageModel:
    """Build a network with new weights in fp32, drawn from a normal distribution with std `initializer_range`.

    Different types of the `device`, by default the CPU, draw different weights from the same seed; `meta` allocates none.
    """
    attention.register()
    from transformers import AutoModel

    forked = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=forked), torch.device(device) if device else nullcontext():
        torch.manual_seed(seed)
        backbone = AutoModel.from_config(hf_config, attn_implementation=attention.ATTENTION_NAME, dtype=torch.float32)
        lm_head = nn.Linear(hf_config.hidden_size, hf_config.vocab_size, bias=has_head_bias(hf_config))
        nn.init.normal_(lm_head.weight, std=hf_config.initializer_range)
        head = None
        if hf_config.model_type in MODERNBERT_HEADS:
            from transformers.models.modernbert.modeling_modernbert import ModernBertPredictionHead

            head = ModernBertPredictionHead(hf_config)
    if hf_config.tie_word_embeddings:
        lm_head.weight = backbone.get_input_embeddings().weight
    return LanguageModel(backbone, lm_head, head)


def has_head_bias(hf_config: Any) -> bool:
    """Return whether the language-model head of this Hugging Face configuration has a bias."""
    # `decoder_bias` is ModernBERT's. `load_language_model` sets `lm_head_bias` for families without a name for it.
    return bool(getattr(hf_config, "lm_head_bias", False) or getattr(hf_config, "decoder_bias", False))
