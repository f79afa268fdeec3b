"""Write weights as safetensors, holding at most one file's weights in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.model.checkpoint import read_weights, weight_shapes

SHARD_BYTES = 5_000_000_000
"""Largest size of a weights file, unless a single weight is larger."""
PORTION_BYTES = 256_000_000
"""Bytes that are read and cast at a time, unless a single weight is larger."""


@dataclass(frozen=True)
class Weights:
    """Named weights whose shapes are known before they are read.

    Attributes:
        shapes: tensors on the meta device, with the stored shapes and dtypes.
        read: returns the named weights, on the CPU.
        source: where the weights come from, for messages.
    """

    shapes: Mapping[str, Tensor]
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    source: str

    @staticmethod
    def in_memory(weights: Mapping[str, Tensor]) -> Weights:
        """Return `Weights` for tensors in memory."""
        weights = {name: weight.detach() for name, weight in weights.items()}
        shapes = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
        return Weights(shapes, lambda names: {name: weights[name].cpu() for name in names}, "model")

    @staticmethod
    def from_checkpoint(path: str) -> Weights:
        """Return the weights of a run's checkpoint (a file or a sharded folder), named as in `LanguageModel`.

        Raises:
            UserError: the checkpoint is missing or damaged, or was not written by a run.
        """
        return Weights(weight_shapes(path), lambda names: read_weights(path, names), f"checkpoint {path}")

    def renamed(self, rename: Callable[[str], str]) -> Weights:
        """Return the same weights under other names."""
        names = {rename(name): name for name in self.shapes}

        def read(some: Sequence[str]) -> dict[str, Tensor]:
            weights = self.read([names[name] for name in some])
            return {name: weights[names[name]] for name in some}

        return Weights({name: self.shapes[old] for name, old in names.items()}, read, self.source)


def unique_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's weights by name; a weight with several names is returned under the first."""
    unique, seen = {}, set[int]()
    for name, weight in network.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            unique[name] = weight
            seen.add(id(weight))
    return unique


def write_weights(weights: Weights, network: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write a network's weights as transformers does: `model.safetensors`, or above `SHARD_BYTES` shards and their index.

    Args:
        weights: the weights to write. A weight with several names is written once.
        network: a network on the meta device, which determines the expected names and shapes.
        folder: the folder to write the files to.
        dtype: the dtype of the weights on disk.

    Raises:
        UserError: weights are missing, unexpected or have another shape. Nothing is written then.
        OSError: the folder can't be written.
    """
    expected = unique_weights(network)
    _require_fit(weights, expected, network)
    names = sorted(expected, key=_order_of_names)
    stored = {name: torch.empty(expected[name].shape, dtype=dtype, device="meta") for name in names}
    split = split_torch_state_dict_into_shards(stored, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file(_cast(weights, names, dtype), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        count = sum(weight.numel() for weight in stored.values())
        index: dict[str, Any] = {
            "metadata": {"total_parameters": count, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _order_of_names(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which transformers sorts weights: layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _require_fit(weights: Weights, expected: Mapping[str, Tensor], network: nn.Module) -> None:
    shapes, shared = weights.shapes, set(network.state_dict()) - set(expected)
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected and name not in shared]
    wrong = [name for name in expected if name in shapes and shapes[name].shape != expected[name].shape]
    kind = type(network).__name__
    if missing:
        raise UserError(f"{weights.source}: lacks {len(missing)} weights that {kind} has, e.g. {missing[0]}")
    if extra:
        raise UserError(f"{weights.source}: has {len(extra)} weights that {kind} has no place for, e.g. {extra[0]}")
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{weights.source}: {name} is {list(shapes[name].shape)}, where {kind} has {list(expected[name].shape)}"
            + (f", and {len(wrong) - 1} more don't fit" if len(wrong) > 1 else "")
        )


def _cast(weights: Weights, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    cast = {}
    for portion in groups_up_to(PORTION_BYTES, names, lambda name: weights.shapes[name].nbytes):
        for name, weight in weights.read(portion).items():
            cast[name] = weight.to(dtype).contiguous()
    return cast
