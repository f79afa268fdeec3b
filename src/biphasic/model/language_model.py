"""Define the language model: a backbone with a head, which computes the loss of tokens, causal or bidirectional."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from biphasic.config.architecture import Architecture
from biphasic.model.forward import packed_forward
from biphasic.model.losses import cross_entropy_sum
from biphasic.model.segments import Segments


class LanguageModel(nn.Module):
    """A Hugging Face base model with `biphasic` attention, and a head without bias.

    Args:
        backbone: the base model, with its Hugging Face configuration in `backbone.config`.
        lm_head: linear layer from hidden states to logits; may share its weight with the embedding.

    Attributes:
        compiled_loss: whether the operations between the loss's matrix products are compiled. Set by
            `biphasic.training.compute.configure_compute`.
    """

    def __init__(self, backbone: nn.Module, lm_head: nn.Linear):
        super().__init__()
        self.backbone = backbone
        self.lm_head = lm_head
        # transformers gives the padding token's embedding no gradient. A packed backbone gets no padding, and in EuroBERT's
        # tokenizer, padding and end of text are the same token, which must be learned.
        backbone.get_input_embeddings().padding_idx = None  # pyright: ignore[reportCallIssue]
        self.compiled_loss = False
        self.softcap: float | None = getattr(backbone.config, "final_logit_softcapping", None)

    def forward(self, inputs: Tensor, targets: Tensor, segments: Segments, causal: bool) -> tuple[Tensor, Tensor]:
        """Sum the cross-entropy over the predicted positions, and count these positions.

        The loss is computed here, and not by the caller from hidden states, because sharded parameters (here the head's)
        are gathered only while this module's forward runs.

        Args:
            inputs: int64 [tokens].
            targets: int64 [tokens], `IGNORE` where nothing is predicted.
            segments: segments of the tokens.
            causal: If True, use causal attention.

        Returns:
            Summed loss, fp32 scalar in nats, and number of targets, int64 scalar.
        """
        hidden = packed_forward(self.backbone, inputs, segments, causal)
        total = cross_entropy_sum(hidden, self.lm_head.weight, targets, self.softcap, self.compiled_loss)
        return total, (targets >= 0).sum()

    @property
    def config(self) -> Any:
        """The backbone's Hugging Face configuration."""
        return self.backbone.config

    def architecture(self) -> Architecture:
        """Return the model's dimensions, from which FLOPs and bytes are computed."""
        tied = self.lm_head.weight is self.backbone.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
        size = Architecture.from_hf_config(self.config)
        return replace(size, vocab_size=self.lm_head.weight.shape[0], tied=tied)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether FSDP wraps a module separately: true for decoder layers. Composer calls this."""
        return any(module is layer for layer in self.backbone.layers)  # pyright: ignore[reportGeneralTypeIssues]

    def resize_token_embeddings(self, vocab_size: int) -> None:
        """Enlarge embedding and head to `vocab_size` rows. New rows are the mean of the old ones."""
        embedding = self.backbone.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        old = embedding.weight.shape[0]
        if vocab_size <= old:
            return
        tied = self.lm_head.weight is embedding.weight
        for module in (embedding,) if tied else (embedding, self.lm_head):
            with torch.no_grad():
                mean = module.weight.mean(0, keepdim=True)
                module.weight = nn.Parameter(torch.cat([module.weight, mean.expand(vocab_size - old, -1)]))
        if tied:
            self.lm_head.weight = embedding.weight
        embedding.num_embeddings = self.lm_head.out_features = self.config.vocab_size = vocab_size
