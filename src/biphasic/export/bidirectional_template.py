"""A decoder family as an encoder: the family's layers with bidirectional attention. Written by Biphasic's export.

It loads with `trust_remote_code=True` in transformers from version `OLDEST` on. The family's classes receive the attention
mask that the encoder was trained with. Flash and Flex attention are refused because they can't take such a mask.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig as FamilyConfig
from transformers import LlamaModel as FamilyModel
from transformers import LlamaPreTrainedModel as FamilyPreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput, TokenClassifierOutput

FAMILY = "llama"
OLDEST = (5, 0)
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
if VERSION < OLDEST:
    needed = f"transformers {OLDEST[0]}.{OLDEST[1]} or later, not {transformers.__version__}"
    raise ImportError(f"this {FAMILY} encoder needs {needed}")


class BidirectionalConfig(FamilyConfig):
    """The family's configuration with a separate model type, so that it can't be loaded as a decoder without this file."""

    model_type = f"bidirectional_{FAMILY}"

    if VERSION < (5, 0):

        def __init__(self, rope_parameters: dict[str, Any] | None = None, **kwargs: Any):
            """Set the rotary positions by the names that they have in transformers 4."""
            rope = rope_parameters or {}
            full, local = (rope.get(kind, rope) for kind in ("full_attention", "sliding_attention"))
            plain = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
            kwargs |= {**plain, "rope_local_base_freq": local.get("rope_theta")}
            if full.get("rope_type", "default") != "default":
                kwargs["rope_scaling"] = {name: value for name, value in full.items() if name not in plain}
            super().__init__(**kwargs)
            self.rope_parameters = rope_parameters


class _PreTrained(FamilyPreTrainedModel):
    config_class = BidirectionalConfig
    base_model_prefix = "model"
    _supports_flash_attn = _supports_flex_attn = False
    # Tells transformers' Trainer that losses are means, so that it divides them by its gradient accumulation steps.
    accepts_loss_kwargs = False


class BidirectionalModel(_PreTrained, FamilyModel):
    """The bare encoder."""

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        # The padding token may also be the end-of-text token, whose embedding has to be trained.
        embedding: Any = self.get_input_embeddings()
        embedding.padding_idx = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return hidden states [batch, length, width] after the final norm; ignore them where `attention_mask` is 0."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("this encoder takes input_ids or inputs_embeds")
        if refused := [name for name in ("position_ids", "past_key_values") if kwargs.pop(name, None) is not None]:
            names = ", ".join(refused)
            raise ValueError(f"this encoder sets positions itself and keeps no cache: {names} can't be given")
        kept = torch.ones(1, inputs.shape[1], dtype=torch.bool, device=inputs.device)
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("this encoder takes an attention_mask of [batch, length]")
            kept = attention_mask.bool()
        positions = (kept.long().cumsum(1) - 1).clamp(min=0)
        kwargs.update(input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=positions, use_cache=False)
        return super().forward(attention_mask=self._masks(kept, positions), **kwargs)

    def _masks(self, kept: Tensor, positions: Tensor) -> Any:
        """Return the attention mask [batch, 1, length, length], or a dict by kind of layer if there are several kinds."""
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise ValueError(f"this encoder needs attn_implementation eager or sdpa, not {implementation}")
        length = kept.shape[1]
        # Padding attends to itself, because a row without any key would be NaN in some kernels.
        itself = torch.eye(length, dtype=torch.bool, device=kept.device)
        full = kept[:, None, None, :] | itself
        window = getattr(self.config, "sliding_window", None)
        near = full
        if window:
            distance = positions[:, None, :, None] - positions[:, None, None, :]
            near = (full & (distance.abs() < window)) | itself
        masks = {"full_attention": full, "sliding_attention": near}
        if implementation == "eager":  # eager attention adds the mask to the scores
            for kind, mask in masks.items():
                lowest = torch.finfo(self.dtype).min
                masks[kind] = torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, lowest)
        # A family with several kinds of layers takes a mask for each kind.
        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        return masks if len(kinds) > 1 else masks[kinds.pop()]


class _WithHead(_PreTrained):
    """The encoder with a head; subclasses compute logits and loss."""

    output_class: Any

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.model = BidirectionalModel(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the logits and, if `labels` are given (-100: no label), the mean loss."""
        logits, loss = self._logits(self.model(input_ids, attention_mask, **kwargs)[0], attention_mask), None
        if labels is not None:  # transformers' loss for this kind of class, which takes some of these arguments
            arguments = {"logits": logits, "pooled_logits": logits, "vocab_size": self.config.vocab_size}
            loss = self.loss_function(labels=labels, config=self.config, **arguments)
        return self.output_class(loss=loss, logits=logits)

    def _logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        raise NotImplementedError


class BidirectionalForMaskedLM(_WithHead):
    """The encoder with its language-model head: logits [batch, length, vocabulary]."""

    output_class = MaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        bias = bool(getattr(config, "lm_head_bias", False))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()

    def _logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        scale = getattr(self.config, "logit_scale", None) or 1 / getattr(self.config, "logits_scaling", 1.0)
        logits = self.lm_head(hidden * scale)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class BidirectionalForSequenceClassification(_WithHead):
    """The encoder with a two-layer classifier on the mean hidden state: logits [batch, labels]."""

    output_class = SequenceClassifierOutput

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.GELU()
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        kept = torch.ones(hidden.shape[:2], device=hidden.device) if attention_mask is None else attention_mask
        kept = kept.to(hidden.dtype)[..., None]
        mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1)  # zeros for a text without tokens
        return self.classifier(self.activation(self.dense(mean)))


class BidirectionalForTokenClassification(_WithHead):
    """The encoder with a linear classifier on each token: logits [batch, length, labels]."""

    output_class = TokenClassifierOutput

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classifier(hidden)
