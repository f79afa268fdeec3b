"""Choose between DDP and FSDP2, and configure Composer for it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from biphasic.devices import rank_device
from biphasic.errors import UserError
from biphasic.model.architecture import Architecture, shard_ranks
from biphasic.ranks import COLLECTIVE_SECONDS
from biphasic.versions import require_form

Strategy = Literal["ddp", "fsdp"]
STATES_SHARE = 0.5
"""Maximum share of a device's memory for weights, gradients, their buckets and optimizer state under DDP."""


def choose_strategy(strategy: Strategy | Literal["auto"], size: Architecture, checkpoint: str | None) -> Strategy:
    """Choose DDP or FSDP. `auto` chooses FSDP if the checkpoint is sharded or DDP would exceed `STATES_SHARE`."""
    sharded = checkpoint is not None and not checkpoint.endswith(".pt")
    if strategy == "ddp" and sharded:
        raise UserError(
            f"parallelism.strategy: ddp can't load {checkpoint}, which is sharded: expected fsdp (with any number of ranks) "
            "or auto"
        )
    if strategy != "auto":
        return strategy
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    if memory is not None:
        memory = min(dist.all_gather_object(memory))  # nodes may have different GPUs
    states = size.state_bytes(shards=1) + (size.bucket_bytes if dist.get_world_size() > 1 else 0)
    fits = memory is None or states <= STATES_SHARE * memory
    return "ddp" if fits and not sharded else "fsdp"


def parallelism_config(strategy: Strategy, shard_degree: int | str, *, monolithic: bool) -> dict[str, Any] | None:
    """Return Composer's parallelism configuration; None for DDP, Composer's default.

    Weights, gradients and optimizer state are fp32. With `precision: amp_bf16`, layers compute with bf16 copies of the
    gathered weights, and gradients are reduced in fp32 (Composer's `DEFAULT`). A run that starts from a `monolithic`
    checkpoint loads a full state dict, and `ShardedModel` then sets it to save sharded ones.
    """
    if strategy == "ddp":
        return None
    ranks = dist.get_world_size()
    shards = shard_ranks(shard_degree, ranks, dist.get_local_world_size())
    if ranks % shards:
        raise UserError(f"parallelism.shard_degree: expected a divisor of the number of ranks ({ranks}); got {shards}")
    form = "full" if monolithic else "sharded"
    return {"fsdp": _FSDP2(ranks // shards, shards, state_dict_type=form, mixed_precision="DEFAULT")}


class _FSDP2(FSDP2Config):
    """An FSDP2Config with shard and replicate degrees, without which Composer builds a flat device mesh."""

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


class ShardedModel(Callback):
    """Callback that sets FSDP2 options that Composer leaves out. `layers` are the decoder layers, in order."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers

    def after_load(self, state: State, logger: Logger) -> None:
        if state.device_mesh is not None:
            # PyTorch creates the groups of HSDP with its own timeout, 600 s for NCCL.
            for group in state.device_mesh.get_all_groups():
                group.set_timeout(timedelta(seconds=COLLECTIVE_SECONDS))
        # Composer's preparation of FSDP2 has made a device of its own, and so turned on TF32.
        rank_device()
        set_collectives(state.model, self.layers)
        keep_inputs(state.model)
        if state.fsdp_config is not None:  # also after a monolithic checkpoint was loaded
            state.fsdp_config.state_dict_type = "sharded"


def set_collectives(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Set how FSDP2's modules gather weights and reduce gradients.

    A layer's weights are prefetched while the previous layer computes; in the backward pass FSDP2 does so by default. The
    other weights, embedding and head, stay gathered until the backward pass, which begins with them: FSDP2's own default,
    which Composer replaces. Gloo's reduce-scatter sums even if FSDP2 requests an average, so FSDP2 is set to request a sum
    and divide it.
    """
    for layer, following in pairwise(layers):
        if isinstance(layer, FSDPModule) and isinstance(following, FSDPModule):
            layer.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if module not in layers:
            module.set_reshard_after_forward(False, recurse=False)
        if torch.distributed.get_backend() == "gloo":
            module.set_force_sum_reduction_for_comms(True)


def keep_inputs(model: nn.Module) -> None:
    """Let FSDP2 pass each module's inputs on unchanged (`cast_forward_inputs=False`, which Composer can't set).

    By default FSDP2 casts inputs to the dtype of the gathered weights. In bf16, the residual stream and the rotary tables
    would be rounded at every layer. FSDP2 would also copy the segments, and each layer would compute their groups again.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            policy = require_form("torch", state, "_mp_policy", MixedPrecisionPolicy())
            state._mp_policy = replace(policy, cast_forward_inputs=False)
