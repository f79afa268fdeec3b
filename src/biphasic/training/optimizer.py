"""AdamW over the groups of parameters that a YAML asks for."""

from __future__ import annotations

from typing import Any

import torch

from biphasic.config.schema import OptimizerConfig
from biphasic.model.language_model import LanguageModel


def adamw(model: LanguageModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, decaying every parameter but those of the groups in `no_decay`.

    `norm` is every one-dimensional parameter (the norms' scales; biases where a family has them), `embedding` the input
    embedding (and a head tied to it), `head` the language-model head.
    """
    embedding, head = model.backbone.get_input_embeddings().weight, model.lm_head.weight  # pyright: ignore[reportCallIssue]
    spared: list[torch.nn.Parameter] = []
    decayed: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        kind = (
            "embedding"
            if parameter is embedding
            else "head"
            if parameter is head
            else "norm"
            if parameter.dim() < 2
            else ""
        )
        (spared if kind in config.no_decay else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": config.weight_decay}]
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=torch.cuda.is_available(),
    )
