"""AdamW over the groups of parameters that a YAML asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from biphasic.config.schema import OptimizerConfig


def adamw(
    module: nn.Module, config: OptimizerConfig, *, embedding: Tensor, head: Tensor | None = None
) -> torch.optim.AdamW:
    """AdamW, decaying every parameter but those of the groups in `no_decay`.

    Args:
        module: whose parameters are trained.
        config: the YAML's `optimizer:` section.
        embedding: the group `embedding` (a head tied to it included).
        head: the group `head`. The group `norm` is every other one-dimensional parameter: the norms' scales, and biases
            where a family has them.
    """

    def group(parameter: nn.Parameter) -> str:
        if parameter is embedding:
            return "embedding"
        return "head" if parameter is head else "norm" if parameter.dim() < 2 else "matrix"

    decayed = [parameter for parameter in module.parameters() if group(parameter) not in config.no_decay]
    spared = [parameter for parameter in module.parameters() if group(parameter) in config.no_decay]
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
