"""Weights from where they lie to safetensors, a portion at a time: a model is never held whole, let alone twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.model.checkpoint import read_weights, weight_shapes

SHARD_BYTES = 5_000_000_000
"""A file of weights is no larger, unless a single one is."""
PORTION_BYTES = 256_000_000
"""What is read at a time, unless a single weight is larger: it is cast before more is read."""


@dataclass(frozen=True)
class Weights:
    """Named weights whose shapes are known before a byte of them is read.

    Attributes:
        shapes: each on the meta device, in the type in which it is stored.
        read: gives some of them by name, on the CPU.
        where: what they are of, for messages.
    """

    shapes: Mapping[str, Tensor]
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    where: str

    @staticmethod
    def held(weights: Mapping[str, Tensor], where: str = "model") -> Weights:
        """Those of a network in memory."""
        weights = {name: weight.detach() for name, weight in weights.items()}
        shapes = {name: torch.empty_like(weight, device="meta") for name, weight in weights.items()}
        return Weights(shapes, lambda names: {name: weights[name].cpu() for name in names}, where)

    @staticmethod
    def of_checkpoint(path: str) -> Weights:
        """Those of a run's checkpoint, a file or a sharded folder, named as in `LanguageModel`.

        Raises:
            UserError: there is no checkpoint, or it is damaged, or of something else.
        """
        return Weights(weight_shapes(path), lambda names: read_weights(path, names), f"checkpoint {path}")

    def renamed(self, rename: Callable[[str], str]) -> Weights:
        """The same under other names."""
        names = {rename(name): name for name in self.shapes}

        def read(wanted: Sequence[str]) -> dict[str, Tensor]:
            found = self.read([names[name] for name in wanted])
            return {name: found[names[name]] for name in wanted}

        return Weights({name: self.shapes[old] for name, old in names.items()}, read, self.where)


def expected_of(network: nn.Module) -> dict[str, Tensor]:
    """A network's weights by name, in its order; what shares another's weight is left out, and bound to it on loading."""
    found, seen = {}, set[int]()
    for name, weight in network.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            found[name] = weight
            seen.add(id(weight))
    return found


def write_weights(weights: Weights, network: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write a network's weights as transformers does: `model.safetensors`, or above `SHARD_BYTES` shards and their index.

    At most one file's weights are in memory.

    Args:
        weights: where they come from. What shares another's weight in the network may be there, and is left out.
        network: what they must fit, on the meta device.
        folder: where the files go.
        dtype: of the weights on disk.

    Raises:
        UserError: weights are missing, have another shape, or are none of the network's; nothing was written then.
        OSError: the folder can't be written.
    """
    expected = expected_of(network)
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
    """The sort key by which transformers orders weights: layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _require_fit(weights: Weights, expected: Mapping[str, Tensor], network: nn.Module) -> None:
    shapes, shared = weights.shapes, set(network.state_dict()) - set(expected)
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected and name not in shared]
    wrong = [name for name in expected if name in shapes and shapes[name].shape != expected[name].shape]
    kind = type(network).__name__
    if missing:
        raise UserError(f"{weights.where}: lacks {len(missing)} weights that {kind} has, e.g. {missing[0]}")
    if extra:
        raise UserError(f"{weights.where}: has {len(extra)} weights that {kind} has no place for, e.g. {extra[0]}")
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{weights.where}: {name} is {list(shapes[name].shape)}, where {kind} has {list(expected[name].shape)}"
            + (f", and {len(wrong) - 1} more don't fit" if len(wrong) > 1 else "")
        )


def _cast(weights: Weights, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for portion in _portions(weights.shapes, names):
        for name, weight in weights.read(portion).items():
            found[name] = weight.to(dtype).contiguous()
    return found


def _portions(shapes: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    held = 0
    for name in names:
        size = shapes[name].nbytes
        if portion and held + size > PORTION_BYTES:
            yield portion
            portion, held = [], 0
        portion.append(name)
        held += size
    if portion:
        yield portion
