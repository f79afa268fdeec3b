"""How ranks share the model: which strategy, and what Composer is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.fsdp import FSDPModule

from biphasic.config.architecture import Architecture, shard_ranks
from biphasic.config.errors import UserError
from biphasic.config.schema import PretrainConfig
from biphasic.versions import require_form

Strategy = Literal["ddp", "fsdp"]
STATES_SHARE = 0.5
"""Of a device's memory that weights, gradients and optimizer state may take under DDP; activations need the rest."""


def strategy_of(config: PretrainConfig, size: Architecture, checkpoint: str | None) -> Strategy:
    """DDP or FSDP. `auto` is DDP while the model's states fit a device, and FSDP where the checkpoint is sharded.

    Args:
        config: of the run.
        size: of the model.
        checkpoint: name of the one that the run goes on from.

    Raises:
        UserError: the checkpoint is sharded and the YAML says `ddp`.
    """
    sharded = checkpoint is not None and not checkpoint.endswith(".pt")
    asked = config.parallelism.strategy
    if asked == "ddp" and sharded:
        raise UserError(
            f"parallelism.strategy: ddp can't load {checkpoint}, which is sharded: expected fsdp (with any number of ranks) "
            "or auto"
        )
    if asked != "auto":
        return asked
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    if not sharded and (memory is None or size.state_bytes(shards=1) <= STATES_SHARE * memory):
        return "ddp"
    return "fsdp"


def parallelism(config: PretrainConfig, strategy: Strategy, *, whole: bool) -> dict[str, Any] | None:
    """Composer's parallelism configuration; none for DDP, which it does by itself.

    Weights, gradients and moments are fp32; with `precision: amp_bf16` layers compute in bf16 from gathered bf16 copies,
    and gradients are reduced in fp32 (Composer's `DEFAULT`).

    Args:
        config: of the run.
        strategy: as chosen.
        whole: load a monolithic checkpoint. Sharded ones are saved after it; see `save_sharded`.
    """
    if strategy == "ddp":
        return None
    ours, form = config.parallelism, "full" if whole else "sharded"
    replicas, shards = _mesh(config)
    return {
        "fsdp": _FSDP2(
            replicas,
            shards,
            reshard_after_forward=ours.reshard_after_forward,
            state_dict_type=form,
            mixed_precision="DEFAULT",
        )
    }


class _FSDP2(FSDP2Config):
    """Composer replaces an FSDP2Config's mesh by a flat one, unless its read-only degrees say otherwise."""

    def __init__(self, replicas: int, shards: int, **settings: Any):
        for name in ("data_parallel_shard_degree", "data_parallel_replicate_degree"):
            require_form("mosaicml", FSDP2Config, name, getattr(_FSDP2, name))
        self._degrees = (replicas, shards)
        super().__init__(**settings)

    @property
    def data_parallel_shard_degree(self) -> int:
        return self._degrees[1]

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        return self._degrees[0] if self._degrees[0] > 1 else None


def set_up_collectives(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Set how FSDP2's modules gather weights and reduce gradients. Changes nothing that isn't sharded.

    A layer's weights are gathered while the layer before it computes; in the backward pass FSDP2 does so by itself. Gloo has
    no average: its reduce-scatter adds up where FSDP2 asks for one, so it is asked for a sum, which FSDP2 then divides.

    Args:
        model: as Composer has wrapped it.
        layers: the decoder layers, in order.
    """
    for layer, following in pairwise(layers):
        if isinstance(layer, FSDPModule) and isinstance(following, FSDPModule):
            layer.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule) and torch.distributed.get_backend() == "gloo":
            module.set_force_sum_reduction_for_comms(True)


def save_sharded(state: Any) -> None:
    """After a monolithic checkpoint was loaded into a sharded model, save sharded ones."""
    if state.fsdp_config is not None:
        state.fsdp_config.state_dict_type = "sharded"


def _mesh(config: PretrainConfig) -> tuple[int, int]:
    """Copies of the model, and ranks that hold one."""
    ranks, degree = dist.get_world_size(), config.parallelism.shard_degree
    shards = shard_ranks(degree, ranks, dist.get_local_world_size())
    if ranks % shards:
        raise UserError(f"parallelism.shard_degree: expected a divisor of the number of ranks ({ranks}); got {shards}")
    return ranks // shards, shards
