"""A backbone and its language-model head: hidden states to a loss, in either direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from biphasic.config.architecture import Architecture
from biphasic.model.losses import cross_entropy_sum
from biphasic.model.packed import encode
from biphasic.model.segments import Segments


class LanguageModel(nn.Module):
    """A Hugging Face base model with `biphasic` attention, and a head without bias.

    Args:
        backbone: the base model; `backbone.config` describes it.
        lm_head: from width to vocabulary; may share its weight with the embedding.

    Attributes:
        attention: backend that the batches' segments should name; see `biphasic.model.attention`.
        compiled_loss: whether the loss is compiled; see `biphasic.model.losses`.
    """

    def __init__(self, backbone: nn.Module, lm_head: nn.Linear):
        super().__init__()
        self.backbone = backbone
        self.lm_head = lm_head
        self.attention = "auto"
        self.compiled_loss = False
        self.softcap: float | None = getattr(backbone.config, "final_logit_softcapping", None)

    def forward(self, inputs: Tensor, targets: Tensor, segments: Segments, causal: bool) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy over the predicted positions, and how many they are.

        The loss is computed in here, and not from returned hidden states, because sharded parameters (the head's) exist
        only while this module's forward runs.

        Args:
            inputs: int64 [tokens].
            targets: int64 [tokens], `IGNORE` where nothing is predicted.
            segments: how the tokens are cut.
            causal: whether a token sees only what is before it.

        Returns:
            fp32 scalar in nats, int64 scalar.
        """
        hidden = encode(self.backbone, inputs, segments, causal)
        total = cross_entropy_sum(hidden, self.lm_head.weight, targets, self.softcap, self.compiled_loss)
        return total, (targets >= 0).sum()

    @property
    def config(self) -> Any:
        """The backbone's Hugging Face configuration."""
        return self.backbone.config

    def architecture(self) -> Architecture:
        """The dimensions, for counting FLOPs and bytes."""
        config = self.config
        return Architecture(
            vocab_size=self.lm_head.weight.shape[0],
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            tied=self.lm_head.weight is self.backbone.get_input_embeddings().weight,  # pyright: ignore[reportCallIssue]
        )

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Composer asks which modules are sharded by themselves: the decoder layers."""
        return any(module is layer for layer in self.backbone.layers)  # pyright: ignore[reportGeneralTypeIssues]

    def widen(self, vocab_size: int) -> None:
        """Give embedding and head at least `vocab_size` rows; a new row is the mean of the old ones."""
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
