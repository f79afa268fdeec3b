"""EuroBERT's architecture for transformers 4.57, in the format that transformers 5 loads natively.

The parameters are Llama's, by name and shape; what differs is that attention looks both ways, and the heads. Names, keys and
heads follow transformers 5's `eurobert`, so that a folder means the same to both.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from biphasic.model import attention
from biphasic.model.eurobert_config import EuroBertConfig
from biphasic.model.packed import encode_padded

_REFUSED = ("position_ids", "inputs_embeds", "past_key_values", "output_hidden_states", "output_attentions")


class _PreTrained(LlamaPreTrainedModel):
    config_class = EuroBertConfig
    base_model_prefix = "model"
    # The losses are means; transformers' Trainer then divides them by its accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: EuroBertConfig, *inputs: Any, **kwargs: Any):
        attention.register()
        config._attn_implementation = attention.NAME
        super().__init__(config, *inputs, **kwargs)


class EuroBertModel(_PreTrained, LlamaModel):
    """The bare encoder.

    Called as any encoder (`input_ids` [batch, length], `attention_mask`) it takes the padding out, looks both ways, and
    gives zeros at padded positions. Called with `segments=` and `is_causal=` it is a packed backbone like any other.
    """

    def __init__(self, config: EuroBertConfig):
        super().__init__(config)
        # The padding row of an embedding gets no gradient. Padding never reaches it here, and where padding and end of
        # text are one token, as in EuroBERT's tokenizer, the end of text must go on learning.
        self.embed_tokens.padding_idx = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Hidden states [batch, length, width], after the final norm."""
        if "segments" in kwargs:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)  # pyright: ignore
        if input_ids is None:
            raise ValueError("this encoder takes input_ids")
        unknown = [name for name in _REFUSED if kwargs.get(name) is not None and kwargs[name] is not False]
        if unknown:
            raise ValueError(
                "this encoder sets positions itself, keeps no cache and gives the last hidden states only: "
                f"{', '.join(unknown)} can't be given"
            )
        return BaseModelOutput(last_hidden_state=encode_padded(self, input_ids, attention_mask))  # pyright: ignore


class EuroBertForMaskedLM(_PreTrained):
    """The encoder with its language-model head."""

    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config: EuroBertConfig):
        super().__init__(config)
        self.model = EuroBertModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits [batch, length, vocabulary]; with `labels` (-100 where nothing is predicted) the mean loss."""
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits)  # pyright: ignore


class EuroBertForSequenceClassification(_PreTrained):
    """The encoder with a two-layer classifier.

    `classifier_pooling`: `late` classifies every token and averages the logits, `mean` averages hidden states first, `bos`
    takes the first token's.
    """

    def __init__(self, config: EuroBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = EuroBertModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.GELU()
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [batch, labels]; with `labels` the loss that `config.problem_type` says, or that their kind implies."""
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        kept = torch.ones(hidden.shape[:2], device=hidden.device) if attention_mask is None else attention_mask
        kept = kept.to(hidden.dtype)[..., None]

        def mean(values: Tensor) -> Tensor:
            return (values * kept).sum(1) / kept.sum(1)

        def head(values: Tensor) -> Tensor:
            return self.classifier(self.activation(self.dense(values)))

        pooling = self.config.classifier_pooling
        logits = mean(head(hidden)) if pooling == "late" else head(mean(hidden) if pooling == "mean" else hidden[:, 0])
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)  # pyright: ignore


class EuroBertForTokenClassification(_PreTrained):
    """The encoder with a linear classifier for each token."""

    def __init__(self, config: EuroBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = EuroBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [batch, length, labels]; with `labels` (-100 where there is none) the mean loss."""
        logits = self.classifier(self.model(input_ids, attention_mask, **kwargs).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits)  # pyright: ignore


def _register() -> None:
    """Make `eurobert` known to transformers' auto classes, unless they know it already (transformers 5)."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return
    AutoModel.register(EuroBertConfig, EuroBertModel, exist_ok=True)
    AutoModelForMaskedLM.register(EuroBertConfig, EuroBertForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(EuroBertConfig, EuroBertForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(EuroBertConfig, EuroBertForTokenClassification, exist_ok=True)


_register()
