"""A decoder as an encoder: its own layers, with attention that looks both ways. Written by Biphasic's export.

Loads with `trust_remote_code=True`, in transformers 5. What it does beyond the family's own classes: it hands them the mask
that the encoder was trained with. Flash and Flex attention are refused, since they don't take such a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig as FamilyConfig
from transformers import LlamaModel as FamilyModel
from transformers import LlamaPreTrainedModel as FamilyPreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput, TokenClassifierOutput

FAMILY = "llama"


class BidirectionalConfig(FamilyConfig):
    """The family's configuration under a name of its own: without this file nothing loads it as a decoder."""

    model_type = f"bidirectional_{FAMILY}"


class _PreTrained(FamilyPreTrainedModel):
    config_class = BidirectionalConfig
    base_model_prefix = "model"
    _supports_flash_attn = _supports_flex_attn = False
    # The losses are means; transformers' Trainer then divides them by its accumulation steps.
    accepts_loss_kwargs = False


class BidirectionalModel(_PreTrained, FamilyModel):
    """The bare encoder."""

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        # Where padding and end of text are one token, the end of text must go on learning.
        embedding: Any = self.get_input_embeddings()
        embedding.padding_idx = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states [batch, length, width] after the final norm; without meaning where `attention_mask` is 0."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("this encoder takes input_ids or inputs_embeds")
        refused = [name for name in ("position_ids", "past_key_values") if kwargs.pop(name, None) is not None]
        if refused:
            raise ValueError(
                f"this encoder sets positions itself and keeps no cache: {', '.join(refused)} can't be given"
            )
        kept = torch.ones(1, given.shape[1], dtype=torch.bool, device=given.device)
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError("this encoder takes an attention_mask of [batch, length]")
            kept = attention_mask.bool()
        positions = (kept.long().cumsum(1) - 1).clamp(min=0)
        kwargs.update(input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=positions, use_cache=False)
        return super().forward(attention_mask=self._masks(kept, positions), **kwargs)

    def _masks(self, kept: Tensor, positions: Tensor) -> Any:
        """Who sees whom, [batch, 1, length, length]; by kind of layer, where there are several."""
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            raise ValueError(f"this encoder needs attn_implementation eager or sdpa, not {implementation}")
        length = kept.shape[1]
        # A position of padding sees itself: a row that sees nothing would be NaN in some kernels.
        itself = torch.eye(length, dtype=torch.bool, device=kept.device)
        full = kept[:, None, None, :] | itself
        window = getattr(self.config, "sliding_window", None)
        near = full
        if window:
            distance = positions[:, None, :, None] - positions[:, None, None, :]
            near = (full & (distance.abs() < window)) | itself
        if implementation == "eager":  # adds it to the scores
            dtype = self.dtype
            full, near = (
                torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
                for mask in (full, near)
            )
        # A family that names its layers' kinds takes a mask for each; any takes one that is for all.
        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        masks = {"full_attention": full, "sliding_attention": near}
        return masks if len(kinds) > 1 else masks[kinds.pop()]


class BidirectionalForMaskedLM(_PreTrained):
    """The encoder with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.model = BidirectionalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits [batch, length, vocabulary]; with `labels` (-100 where nothing is predicted) the mean loss."""
        logits = self.lm_head(self.model(input_ids, attention_mask, **kwargs)[0])
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits)


class BidirectionalForSequenceClassification(_PreTrained):
    """The encoder with a two-layer classifier of the mean hidden state."""

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.model = BidirectionalModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.GELU()
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [batch, labels]; with `labels` the loss that `config.problem_type` says, or that their kind implies."""
        hidden = self.model(input_ids, attention_mask, **kwargs)[0]
        kept = torch.ones(hidden.shape[:2], device=hidden.device) if attention_mask is None else attention_mask
        kept = kept.to(hidden.dtype)[..., None]
        mean = (hidden * kept).sum(1) / kept.sum(1)
        logits = self.classifier(self.activation(self.dense(mean)))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class BidirectionalForTokenClassification(_PreTrained):
    """The encoder with a linear classifier for each token."""

    def __init__(self, config: BidirectionalConfig):
        super().__init__(config)
        self.num_labels: Any = config.num_labels
        self.model = BidirectionalModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [batch, length, labels]; with `labels` (-100 where there is none) the mean loss."""
        logits = self.classifier(self.model(input_ids, attention_mask, **kwargs)[0])
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits)
